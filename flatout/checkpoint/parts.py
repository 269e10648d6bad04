"""Tensors that are spread over ranks, as a checkpoint holds them: each rank's part, and where in the whole it lies.

A rank writes its parts into a safetensors file of its own, which says in its header where each of them belongs. The
whole is put together when it is read, so that any number of ranks may continue, and one process as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast  # Any: JSON

import torch
from safetensors import safe_open

from flatout.errors import UsageError
from flatout.parallel.whole_tensors import CUT, CutTensor, is_distributed, like, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PREFIX = "part-"
"""Of the names of files of parts."""
OFFSETS, NAMES = "flatout_offsets", "flatout_names"
"""In a file's header, as JSON: name -> where the part begins in the whole; of further boxes of the same tensor, name ->
that of the first."""


@dataclass(frozen=True)
class Box:
    """A range of a rank's part that is one in the whole tensor too."""

    start: tuple[int, ...]
    """In the part."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where it begins in the whole."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        for dim, (begin, length) in enumerate(zip(self.start, self.shape, strict=True)):
            local = local.narrow(dim, begin, length)
        return local


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds of a tensor."""

    local: torch.Tensor
    """Live memory, not a copy; without elements where this rank holds nothing."""
    shape: torch.Size
    """Of the whole."""
    boxes: tuple[Box, ...]
    """What `local` consists of; usually it is one."""
    first_copy: bool = True
    """Is this the rank that writes it, of those that hold the same? Ranks along a mesh dimension may have copies."""

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def in_place_of(self, here: torch.Tensor | CutTensor) -> torch.Tensor:
        """A tensor like `here`, which is spread over the same ranks in the same way, with a copy of these values.

        Raises UsageError where this rank holds another part of it.
        """
        own = part_of(here)
        if own is None or (own.local.shape, own.boxes) != (self.local.shape, self.boxes):
            raise UsageError(
                "the state holds this rank's parts of tensors, and here they are not spread in that way",
                limit="a state in memory fits the ranks that captured it",
                remedy="save it with Checkpoints, and restore from there",
            )
        local = self.local.to(own.local.device, copy=True)
        value = here.value if isinstance(here, CutTensor) else here
        if not is_distributed(value):
            return local
        from torch.distributed.tensor import DTensor

        spread = cast("DTensor", value)
        return DTensor.from_local(
            local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
        )


def part_of(here: torch.Tensor | CutTensor) -> Part | None:
    """This rank's part of what is spread over ranks; None where every rank has the whole.

    here: from a state dict, or a parameter.
    """
    cut, value = (here.cut, here.value) if isinstance(here, CutTensor) else (getattr(here, CUT, None), here)
    part = _part_of_distributed(value) if is_distributed(value) else None
    if cut is None:
        return part
    local = local_part(value).detach() if part is None else part.local
    offset = (0,) * local.ndim if part is None or not part.boxes else part.boxes[0].offset
    return Part(
        local=local,
        shape=torch.Size(cut.shape),
        boxes=tuple(Box(*place) for place in cut.places(local.shape, offset)),
        first_copy=part is None or part.first_copy,
    )


def _part_of_distributed(tensor: torch.Tensor) -> Part | None:
    from torch.distributed.tensor import Replicate

    from flatout.torch_private.ranks import local_shape_and_offset

    spread = cast("DTensor", tensor)
    if all(isinstance(one, Replicate) for one in spread.placements):
        return None
    _, offset = local_shape_and_offset(spread.shape, spread.device_mesh, spread.placements)
    local, place = spread.to_local(), spread.device_mesh.get_coordinate() or ()
    begin = tuple(offset) if local.numel() else (0,) * local.ndim
    return Part(
        local=local.detach(),
        shape=spread.shape,
        boxes=(Box((0,) * local.ndim, tuple(local.shape), begin),),
        first_copy=not any(at for at, one in zip(place, spread.placements, strict=False) if isinstance(one, Replicate)),
    )


def spread_like(here: torch.Tensor | CutTensor | None, value: object) -> object:
    """A saved value, spread over the ranks as what is here is: an entry of a state dict, or a parameter."""
    if isinstance(value, Part) and here is not None:
        return value.in_place_of(here)
    if isinstance(here, CutTensor) and isinstance(value, torch.Tensor):
        value, here = here.cut.part(value), here.value
    return like(here, value)


def entries(parts: Mapping[str, Part]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors of a file, its header): each box by a name of its own, the first by the tensor's."""
    tensors: dict[str, torch.Tensor] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for name, part in parts.items():
        for number, box in enumerate(part.boxes):
            entry = f"{name}#{number}" if number else name
            while number and entry in parts:
                entry += "#"
            if number:
                names[entry] = name
            tensors[entry], offsets[entry] = box.of(part.local), box.offset
    header = {OFFSETS: offsets, **({NAMES: names} if names else {})}
    return tensors, {key: json.dumps(value, separators=(",", ":")) for key, value in header.items()}


def read_parts(paths: Iterable[Path], whole: Mapping[str, tuple[list[int], str]]) -> dict[str, torch.Tensor]:
    """The whole tensors, from the files of all ranks; `whole` has the shape and dtype of each.

    Of a part that several ranks hold the first copy counts. Raises ValueError for parts that overlap otherwise, reach
    outside, or leave elements out; KeyError, OSError, SafetensorError.
    """
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for name, (shape, dtype) in whole.items()
    }
    missing = {name: tensor.numel() for name, tensor in tensors.items()}
    seen: set[tuple[object, ...]] = set()
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata()
            offsets: dict[str, Any] = json.loads(header[OFFSETS])
            names: dict[str, str] = json.loads(header.get(NAMES, "{}"))
            for entry in file.keys():  # noqa: SIM118 (no mapping)
                part, name = file.get_tensor(entry), names.get(entry, entry)
                key = name, *offsets[entry], *part.shape
                if key in seen:
                    continue
                seen.add(key)
                place = tensors[name]
                for dim, (begin, length) in enumerate(zip(offsets[entry], part.shape, strict=True)):
                    place = place.narrow(dim, begin, length)  # RuntimeError outside
                place.copy_(part)
                missing[name] -= part.numel()
    wrong = [name for name, count in missing.items() if count]
    if wrong:
        raise ValueError(f"the parts of {wrong[0]} are not the whole: {missing[wrong[0]]} elements differ")
    return tensors
