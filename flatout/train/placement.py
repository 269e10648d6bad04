"""Where things lie: the device to use, and a mismatch said in names instead of torch's 'expected all tensors ...'."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flatout.data.nested import tensors_in
from flatout.errors import UsageError


def device(index: int | None = None) -> Any:
    """The device to train on: the CUDA device that torch can use (the one with the given index), else the CPU.

    Raises UsageError for an index beyond the visible devices.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is not None and not 0 <= index < max(count, 1):
        raise UsageError(
            f"device index {index}",
            limit=f"torch sees {count} CUDA device{'' if count == 1 else 's'}",
            remedy="see which and why with: flatout check",
        )
    return torch.device("cuda", index or 0) if count else torch.device("cpu")


def explain_devices(model: Any, batch: Any, error: Exception) -> None:
    """Raise a UsageError that names what lies elsewhere, if model and batch are on different devices."""
    held = [(f"model.{name}", tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    inputs = list(tensors_in(batch))
    places = Counter(str(tensor.device) for _, tensor in held)
    if not places:
        return
    home = places.most_common(1)[0][0]
    strays = [(name, str(tensor.device)) for name, tensor in (*held, *inputs) if str(tensor.device) != home]
    if not strays:
        return
    listed = ", ".join(f"{name} is on {place}" for name, place in strays[:4])
    more = f" and {len(strays) - 4} more" if len(strays) > 4 else ""
    moved = "flatout.to_device(batch, ...)" if strays[0][0].startswith("batch") else f"model.to({home!r})"
    raise UsageError(
        f"{listed}{more}, while the model is on {home}",
        limit="what meets in one operation has to lie on one device",
        remedy=f"move it with {moved}".replace("...", repr(home)),
    ) from error
