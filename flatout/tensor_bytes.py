"""The bytes of a tensor's values, for digests and comparisons to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bytes_view(tensor: Tensor) -> Tensor:
    """A flat uint8 tensor in the host's memory: the values row by row, of a sparse tensor its places and its values as
    they are stored. Shares the tensor's memory where it can."""
    import torch

    from flatout.torch_private.tensors import stored_parts

    if tensor.layout is not torch.strided:
        parts = stored_parts(tensor.detach())
        return torch.cat([bytes_view(one) for one in parts]) if len(parts) > 1 else bytes_view(tensor.to_dense())
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if flat.stride(0) != 1:  # `contiguous` leaves a single element as it is, with a stride that no view of bytes takes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
