"""Tensors <-> what a file of plain dense tensors can hold: shared memory once, other layouts and dtypes as bytes.

Tied weights are several tensors on one piece of memory. Views of the same bytes are stored once, and each reference
describes its view. Almost every tensor is alone and dense: its reference is a name and nothing else, so that
the file reads like any other safetensors file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""dtype -> its name in a safetensors header. Every other dtype is stored as bytes, with its name in the reference."""

Slot = tuple[str, str]
"""Where a tensor is stored: (file without suffix, name in it)."""


class Reference(TypedDict, total=False):
    """What stands for a tensor in the JSON: its slot, and how it views what is stored there where that is not plain."""

    file: str
    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """A tensor found in a state, the slot it prefers, and its reference, which `place` fills in."""

    tensor: torch.Tensor
    slot: Slot
    reference: Reference


@dataclass(frozen=True, kw_only=True)
class _Look:
    """How a tensor views its storage; equal views of one storage are tied tensors."""

    start_bytes: int
    end_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


def place(found: Sequence[Found]) -> dict[Slot, torch.Tensor]:
    """What to store, not yet copied: views of the live memory, on their own device. Fills in every reference."""
    stored: dict[Slot, torch.Tensor] = {}
    for group in _overlapping(found):
        slot = free_slot(group[0].slot, stored)
        looks = {_look(one.tensor) for one in group}
        first = group[0].tensor
        alone = looks.pop() if len(looks) == 1 else None
        if alone is not None and first.dtype in NATIVE and first.numel() * first.element_size() <= alone.size_bytes:
            stored[slot] = first
            for one in group:
                one.reference.update(_named(slot))
                if not _plain_order(alone):
                    one.reference["stride"] = list(alone.stride)
        else:
            stored[slot] = _place_bytes(group, slot)
    return stored


def _place_bytes(group: Sequence[Found], slot: Slot) -> torch.Tensor:
    """What these tensors share, as one of them if it covers all, else as bytes; each reference describes its view."""
    looks = [_look(one.tensor) for one in group]
    start, end = min(look.start_bytes for look in looks), max(look.end_bytes for look in looks)
    whole = next((one.tensor for one in group if _covers(one.tensor, start, end)), None)
    if whole is None or len({look.dtype for look in looks}) > 1:
        start -= start % max(look.dtype.itemsize for look in looks)  # aligned for each
        whole = _bytes_of(group[0].tensor, start, end - start)
    for one, look in zip(group, looks, strict=True):
        one.reference.update(
            {
                **_named(slot),
                "dtype": str(look.dtype).removeprefix("torch."),
                "shape": list(look.shape),
                "stride": list(look.stride),
                "offset_bytes": look.start_bytes - start,
            }
        )
    return whole


def _covers(tensor: torch.Tensor, start_bytes: int, end_bytes: int) -> bool:
    look = _look(tensor)
    same = (look.start_bytes, look.end_bytes) == (start_bytes, end_bytes)
    return same and tensor.dtype in NATIVE and tensor.is_contiguous()


def view(stored: Mapping[Slot, torch.Tensor], reference: Reference) -> torch.Tensor:
    """The tensor that a reference stands for. Raises KeyError or ValueError if it points outside what is stored."""
    tensor = stored[reference["file"], reference["name"]]
    if "dtype" in reference:
        return _look_at(tensor, reference)
    if "stride" in reference:
        strided = torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype, device=tensor.device)
        return strided.copy_(tensor)
    return tensor


def _look_at(tensor: torch.Tensor, reference: Reference) -> torch.Tensor:
    dtype, shape, stride = getattr(torch, reference["dtype"]), reference["shape"], reference["stride"]
    offset, last = divmod(reference["offset_bytes"], dtype.itemsize)
    if last or offset < 0 or (offset + _extent(shape, stride)) * dtype.itemsize > tensor.nbytes:
        raise ValueError(f"{reference['name']} reaches outside its {tensor.nbytes} bytes")
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, shape, stride)


def _bytes_of(tensor: torch.Tensor, start_bytes: int, size_bytes: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start_bytes, (size_bytes,), (1,))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes, without a copy."""
    size = tensor.element_size()
    return _bytes_of(tensor.detach(), int(tensor.storage_offset()) * size, tensor.numel() * size)


def _overlapping(found: Sequence[Found]) -> Iterable[list[Found]]:
    """The tensors in groups whose bytes overlap, in the order of the first of each."""
    order = {id(one): index for index, one in enumerate(found)}
    storages: dict[tuple[torch.device, int], list[Found]] = defaultdict(list)
    groups: list[list[Found]] = []
    for one in found:
        if one.tensor.numel():
            storages[one.tensor.device, one.tensor.untyped_storage().data_ptr()].append(one)
        else:
            groups.append([one])
    for members in storages.values():
        members.sort(key=lambda one: _look(one.tensor).start_bytes)
        end = -1
        for one in members:
            look = _look(one.tensor)
            if look.start_bytes < end:
                groups[-1].append(one)
            else:
                groups.append([one])
            end = max(end, look.end_bytes)
    for group in groups:
        group.sort(key=lambda one: order[id(one)])
    return sorted(groups, key=lambda group: order[id(group[0])])


def _look(tensor: torch.Tensor) -> _Look:
    size, shape = tensor.element_size(), tuple(tensor.shape)
    stride = tuple(tensor.stride())
    start = int(tensor.storage_offset()) * size
    end = start + _extent(shape, stride) * size
    return _Look(start_bytes=start, end_bytes=end, dtype=tensor.dtype, shape=shape, stride=stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last that is used."""
    if 0 in shape:
        return 0
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def _plain_order(look: _Look) -> bool:
    """True if the tensor comes back as it was with no strides stored: they are the usual, or it has holes.

    The strides of a channels_last tensor are kept: fused optimizers want state laid out like its parameter.
    """
    usual, dense, step = True, True, 1
    for size, have in zip(reversed(look.shape), reversed(look.stride), strict=True):
        usual &= size == 1 or have == step
        step *= size
    step = 1
    for have, size in sorted(zip(look.stride, look.shape, strict=True)):
        dense &= size == 1 or have == step
        step *= size
    return usual or not dense or 0 in look.shape


def _named(slot: Slot) -> Reference:
    return {"file": slot[0], "name": slot[1]}


def free_slot(slot: Slot, taken: Collection[Slot]) -> Slot:
    """The slot, or the next that is free: {'a.b': x} and {'a': {'b': x}} want the same one."""
    file, name = slot[0], slot[1].encode("utf-8", "backslashreplace").decode()
    number, free = 1, name or "value"
    while (file, free) in taken or free == "__metadata__":
        number += 1
        free = f"{name}#{number}"
    return file, free
