"""Devices and dtypes: the device to use, and errors that name what does not match instead of torch's messages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flatout import environment
from flatout.data.nested import is_numpy_array, leaves_in, tensors_in
from flatout.errors import UsageError
from flatout.parallel.whole_tensors import home_of

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def device(index: int | None = None) -> torch.device:
    """The device to train on: CUDA device `index` if torch can use CUDA, else the CPU.

    index: default 0; of several ranks that a launcher started on this machine each has that of its local rank.

    Raises UsageError for an index beyond the visible devices.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is None and count > 1:
        index = environment.local_rank()
    if index is not None and (not isinstance(index, int) or not 0 <= index < max(count, 1)):
        raise UsageError(
            f"device index {index!r}",
            limit=f"torch sees {count} CUDA device{'' if count == 1 else 's'}",
            remedy="see why with: flatout check",
        )
    return torch.device("cuda", index or 0) if count else torch.device("cpu")


def join_recurrent_weights(model: Module) -> None:
    """Make each recurrent layer's weights one block again after a deep copy: otherwise cuDNN copies them together in
    every call, and torch warns."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()


def explain_batch(model: Module, batch: object, error: Exception) -> None:
    """Raise a UsageError for a batch that does not match the model: on another device, in another dtype, of numpy
    arrays."""
    explain_devices(model, batch, error)
    _explain_arrays(batch, error)
    _explain_doubles(model, batch, error)
    _explain_dtypes(model, batch, error)


def _explain_arrays(batch: object, error: Exception) -> None:
    if not isinstance(error, TypeError):
        return
    for path, _ in leaves_in(batch, "batch", is_numpy_array):
        raise UsageError(
            f"{path} is a numpy array",
            limit="models compute with tensors",
            remedy="use flatout.batches(arrays, 64), or torch.as_tensor(array)",
        ) from error


def _explain_doubles(model: Module, batch: object, error: Exception) -> None:
    """scikit-learn and numpy produce float64, models are float32."""
    import torch

    if "ouble" not in str(error) or any(one.dtype == torch.float64 for one in model.parameters()):
        return
    dtype = next((str(one.dtype).removeprefix("torch.") for one in model.parameters()), "float32")
    for path, tensor in tensors_in(batch):
        if getattr(tensor, "dtype", None) == torch.float64:
            raise UsageError(
                f"{path} is float64, the default of numpy and scikit-learn",
                limit=f"the model's weights are {dtype}, and products need one dtype",
                remedy="convert the data once: array.astype('float32') or tensor.float()",
            ) from error


def _explain_dtypes(model: Module, batch: object, error: Exception) -> None:
    """The other way round: a model that was converted, and data that was not."""
    if not isinstance(error, RuntimeError) or "dtype" not in str(error):
        return
    held = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if len(held) != 1:
        return
    (dtype,) = held
    for path, tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise UsageError(
                f"{path} is {str(tensor.dtype).removeprefix('torch.')}",
                limit=f"the model's weights are {str(dtype).removeprefix('torch.')}, and products need one dtype",
                remedy=f"convert the data, tensor.to({dtype}), or leave the model as it is: model.to({tensor.dtype})",
            ) from error


def explain_devices(model: Module, batch: object, error: Exception) -> None:
    """Raise a UsageError that names the tensors on another device, if model and batch are on different devices."""
    held = [(f"model.{name}", tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    inputs = list(tensors_in(batch))
    places = Counter(str(home_of(tensor)) for _, tensor in held)
    if not places:
        return
    home = places.most_common(1)[0][0]
    strays = [(name, str(home_of(tensor))) for name, tensor in (*held, *inputs) if str(home_of(tensor)) != home]
    if not strays:
        return
    listed = ", ".join(f"{name} is on {place}" for name, place in strays[:4])
    more = f" and {len(strays) - 4} more" if len(strays) > 4 else ""
    moved = "flatout.to_device(batch, ...)" if strays[0][0].startswith("batch") else f"model.to({home!r})"
    raise UsageError(
        f"{listed}{more}, while the model is on {home}",
        limit="the tensors of an operation have to be on the same device",
        remedy=f"move them with {moved}".replace("...", repr(home)),
    ) from error
