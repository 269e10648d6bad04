"""Between tensors that are spread over ranks (DTensors) and whole ones.

`isinstance` would have to import torch.distributed.tensor in every process; what only a DTensor has tells them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias  # Any: what is found in a module's __dict__

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from flatout.parallel.tensor.parts import Across, Cut

CUT = "cut_over_ranks"
"""Attribute of a parameter of which this rank has a part, as a plain tensor or, where FSDP2 shards that further, as a
DTensor: how it is cut (`parallel.tensor.parts`)."""
ELSEWHERE = "on_another_rank"
"""Attribute of a parameter, True: another rank trains it, and it has no values here (`parallel.pipeline.ownership`)."""
PART_OF_STATE = "has_part_of_state"
"""Attribute of an optimizer, True: each rank has the state of some of the parameters (`parallel.sharded_updates`)."""
CUTS, STAGES = "cuts_over_ranks", "stages_of_ranks"
"""Attributes of a module whose parameters are cut, and of a model whose blocks are on several ranks."""
_parts_kept: ContextVar[bool] = ContextVar("parts_kept", default=False)


@dataclass(frozen=True)
class CutTensor:
    """This rank's part of a parameter, or of its optimizer's state, in a state dict of which no whole is made."""

    value: Tensor
    """A plain tensor, or the part of it that FSDP2 has left (a DTensor)."""
    cut: Cut

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        import torch

        return torch.Size(self.cut.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def is_meta(self) -> bool:
        return self.value.is_meta


@contextlib.contextmanager
def parts_kept() -> Iterator[None]:
    """State dicts of what is cut over ranks hold `CutTensor`s, and making one is no collective. Else they hold whole
    tensors, for which each rank would need the memory."""
    token = _parts_kept.set(True)
    try:
        yield
    finally:
        _parts_kept.reset(token)


def whole_or_cut(value: Tensor, cut: Cut) -> Tensor | CutTensor:
    """Of what a state dict has of something that is cut: as it is where that is no part of it."""
    if tuple(value.shape) == cut.part_shape and _parts_kept.get():
        return CutTensor(value, cut)
    return cut.whole(whole(value))


def is_distributed(value: object) -> bool:
    """Is it a tensor of which this rank may hold a part only?"""
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def home_of(parameter: Tensor) -> torch.device:
    """Where it is computed with: its device, or that of its ranks where its part waits in the host's memory."""
    import torch

    if not is_distributed(parameter) or parameter.device.type != "cpu":
        return parameter.device
    kind: str = parameter.device_mesh.device_type  # type: ignore[attr-defined]  # of a DTensor
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else parameter.device


Spread: TypeAlias = Any
"""A DTensor, a tensor or anything else: see `is_distributed`."""


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks, in the same memory; anything else as it is."""
    part: Tensor = value.to_local() if is_distributed(value) else value  # type: ignore[attr-defined]  # of a DTensor
    return part


def whole(value: Spread) -> Spread:
    """The whole of a tensor that is spread over ranks, a collective; anything else as it is."""
    return value.full_tensor() if is_distributed(value) else value


def like(parameter: Spread, value: Spread) -> Spread:
    """`value`, spread over the ranks as `parameter` is, where it is a whole tensor of the same shape; else as it is.

    Nothing is sent: every rank has the whole, and keeps its part of it.
    """
    import torch

    cut = getattr(parameter, CUT, None)
    if cut is not None and isinstance(value, torch.Tensor):
        value = cut.part(value)
    if not is_distributed(parameter) or not isinstance(value, torch.Tensor) or is_distributed(value):
        return value
    if value.shape != parameter.shape or value.ndim == 0:
        return value
    from torch.distributed.tensor import distribute_tensor

    local = value.to(parameter.device)
    part = distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)  # the mesh may be of GPUs, and the parameter wait in the host's memory


def whole_shape(parameter: Spread) -> tuple[int, ...]:
    """The shape of all of a parameter, of which this rank may hold a part."""
    cut = getattr(parameter, CUT, None)
    return tuple(parameter.shape if cut is None else cut.shape)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together, a plain tensor; of spread ones over all ranks."""
    import torch

    spread = [one for one in gradients if is_distributed(one)]
    same = [one for one in gradients if not is_distributed(one)] if spread else gradients
    norm: Tensor = torch.nn.utils.get_total_norm(same)
    if not spread:
        return norm
    over_ranks: Tensor = whole(torch.nn.utils.get_total_norm(spread))
    return torch.hypot(over_ranks, norm.to(over_ranks)) if same else over_ranks


def across_of(model: Module) -> Across | None:
    """The ranks that share the model's layers; None where none do."""
    cuts: Any = next((module.__dict__[CUTS] for module in model.modules() if module.__dict__.get(CUTS)), None)
    return None if cuts is None else next(iter(cuts.values())).across  # a Cut's


def ranks_of_calls(model: Module) -> ProcessGroup | None:
    """Those that take part in every call of the model, because each has a part of it; None: this one has all."""
    from torch import distributed

    spread: Spread = next((one for one in model.parameters() if is_distributed(one)), None)
    across = across_of(model)
    if across is not None:
        return across.group if spread is None else distributed.group.WORLD
    for module in model.modules():
        stages = module.__dict__.get(STAGES)
        if stages is not None and stages.begins:  # before the first step each rank has all of it
            return stages.across.group  # type: ignore[no-any-return]  # of Stages
    return None if spread is None else spread.device_mesh.get_group(0)
