"""Tensors that are spread over ranks, as a checkpoint holds them: each rank's part, and where in the whole it lies.

A rank writes its parts into a safetensors file of its own, which says in its header where each of them belongs. The
whole is put together when it is read, so that any number of ranks may continue, and one process as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open

from flatout.errors import UsageError
from flatout.parallel.whole_tensors import is_distributed, like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PREFIX = "part-"
"""Of the names of files of parts."""
OFFSETS = "flatout_offsets"
"""In a file's header: name -> where the part begins in the whole, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds of a tensor."""

    local: torch.Tensor
    """Live memory, not a copy; without elements where this rank holds nothing."""
    shape: torch.Size
    """Of the whole."""
    offset: tuple[int, ...]
    """Where `local` begins in the whole."""
    first_copy: bool = True
    """Is this the rank that writes it, of those that hold the same? Ranks along a mesh dimension may have copies."""

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def in_place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like `tensor`, which is spread over the same ranks in the same way, with a copy of these values.

        Raises UsageError where this rank holds another part of it.
        """
        own = part_of(tensor) if is_distributed(tensor) else None
        if own is None or (own.local.shape, own.offset) != (self.local.shape, self.offset):
            raise UsageError(
                "the state holds this rank's parts of tensors, and here they are not spread in that way",
                limit="a state in memory fits the ranks that captured it",
                remedy="save it with Checkpoints, and restore from there",
            )
        from torch.distributed.tensor import DTensor

        spread = cast("DTensor", tensor)
        return DTensor.from_local(
            self.local.to(own.local.device, copy=True),
            spread.device_mesh,
            spread.placements,
            run_check=False,
            shape=spread.shape,
            stride=spread.stride(),
        )


def part_of(tensor: torch.Tensor) -> Part | None:
    """This rank's part of a DTensor; None where every rank has the whole."""
    from torch.distributed.tensor import Replicate

    from flatout.torch_private.ranks import local_shape_and_offset

    spread = cast("DTensor", tensor)
    if all(isinstance(one, Replicate) for one in spread.placements):
        return None
    _, offset = local_shape_and_offset(spread.shape, spread.device_mesh, spread.placements)
    local, place = spread.to_local(), spread.device_mesh.get_coordinate() or ()
    return Part(
        local=local.detach(),
        shape=spread.shape,
        offset=tuple(offset) if local.numel() else (0,) * local.ndim,
        first_copy=not any(at for at, one in zip(place, spread.placements, strict=False) if isinstance(one, Replicate)),
    )


def spread_like(parameter: torch.Tensor | None, value: object) -> object:
    """A saved value, spread over the ranks as the parameter is."""
    if isinstance(value, Part) and parameter is not None:
        return value.in_place_of(parameter)
    return like(parameter, value)


def read_parts(paths: Iterable[Path], whole: Mapping[str, tuple[list[int], str]]) -> dict[str, torch.Tensor]:
    """The whole tensors, from the files of all ranks; `whole` has the shape and dtype of each.

    Of a part that several ranks hold the first copy counts. Raises ValueError for parts that overlap otherwise, reach
    outside, or leave elements out; KeyError, OSError, SafetensorError.
    """
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in whole.items()}
    missing = {name: tensor.numel() for name, tensor in tensors.items()}
    seen: set[tuple[object, ...]] = set()
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            offsets: dict[str, Any] = json.loads(file.metadata()[OFFSETS])
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_tensor(name)
                key = name, *offsets[name], *part.shape
                if key in seen:
                    continue
                seen.add(key)
                place = tensors[name]
                for dim, (begin, length) in enumerate(zip(offsets[name], part.shape, strict=True)):
                    place = place.narrow(dim, begin, length)  # RuntimeError outside
                place.copy_(part)
                missing[name] -= part.numel()
    wrong = [name for name, count in missing.items() if count]
    if wrong:
        raise ValueError(f"the parts of {wrong[0]} are not the whole: {missing[wrong[0]]} elements differ")
    return tensors
