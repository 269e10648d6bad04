"""The bytes of a tensor's values, for digests and comparisons to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bytes_view(tensor: Tensor) -> Tensor:
    """A flat uint8 tensor in the host's memory: the values row by row. Shares the tensor's memory where it can."""
    import torch

    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8)
    if flat.stride(0) != 1:  # `contiguous` leaves a single element as it is, with a stride that no view of bytes takes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
