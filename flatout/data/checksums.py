"""Checksums of batches and samples, to notice that data is not what it was before."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from flatout.data.nested import is_numpy_array, leaves_in, map_leaves, moves_itself
from flatout.tensor_bytes import bytes_view

if TYPE_CHECKING:
    from torch import Tensor

_WRITTEN_OUT = (str, bytes, int, float, complex, bool, type(None))


def checksum(nested: object) -> int:
    """Of all tensors, arrays, texts and numbers in there, each with its place; objects of other kinds do not count."""
    import torch

    def counts(value: object) -> bool:
        return isinstance(value, torch.Tensor) or is_numpy_array(value) or isinstance(value, _WRITTEN_OUT)

    found = 0
    for path, leaf in leaves_in(nested, "batch", counts):
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(f"{path} {leaf.dtype} {list(leaf.shape)}".encode(), found)
            for part in _stored(leaf.detach().cpu()):
                found = zlib.crc32(bytes_view(part).numpy().data, found)
        elif is_numpy_array(leaf) and not leaf.dtype.hasobject:
            found = zlib.crc32(f"{path} {leaf.dtype} {list(leaf.shape)}".encode(), found)
            found = zlib.crc32(leaf.tobytes(), found)
        else:
            written = _written(leaf.tolist() if is_numpy_array(leaf) else leaf)
            found = zlib.crc32(f"{path} {written}".encode("utf-8", "surrogatepass"), found)
    return found


class Kept:
    """Something as it is now, for a checksum that is taken later, if at all. No tensor is copied.

    Entries that are added to it or taken out later do not change the checksum.
    """

    def __init__(self, nested: object) -> None:
        self._versions: list[tuple[Tensor, int]] = []
        self._nested = map_leaves(self._noted, nested, lambda value: moves_itself(value) or is_numpy_array(value))

    def checksum(self) -> int | None:
        """None if one of its tensors was changed in place since: what it held is not known any more."""
        if any(tensor._version != version for tensor, version in self._versions):
            return None
        return checksum(self._nested)

    def _noted(self, leaf: object) -> object:
        import torch

        if is_numpy_array(leaf):
            return leaf.copy()  # nothing counts its changes
        for _, tensor in leaves_in(leaf, "batch", lambda value: isinstance(value, torch.Tensor)):
            if not tensor.is_inference():  # those can be changed in inference mode only, and count nothing
                self._versions.append((tensor, tensor._version))
        return leaf


def _written(value: object) -> str:
    """The same in every process, unlike the repr of an object, which may hold its address."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return repr(value) if isinstance(value, _WRITTEN_OUT) else type(value).__name__


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a tensor holds: itself, or of a sparse one the places and values."""
    import torch

    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout != torch.sparse_coo:
        tensor = tensor.to_sparse_coo()
    whole = tensor.coalesce()
    return whole.indices(), whole.values()
