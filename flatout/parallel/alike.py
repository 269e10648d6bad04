"""Do all ranks train the same model in the same way? Ranks of different code would wait for one another, or, worse, add
up gradients of different things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.parallel.whole_tensors import whole_shape

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from flatout.plan import Plan

COMPARED = (
    "parallel",
    "micro_batches",
    "precision",
    "batch_norm",
    "gradient_compression",
    "ddp_bucket_mib",
    "ddp_static_graph",
    "fsdp_dtype",
    "fsdp_keep_gathered",
    "fsdp_cpu_offload",
    "nonfinite",
)
"""Choices that decide what ranks send one another."""


def check_alike(model: Module, plan: Plan, beside: Sequence[Tensor] = ()) -> None:
    """Compare parameters, buffers and plans of all ranks: a collective, before any other.

    beside: what the optimizer trains besides the model's parameters.

    Raises UsageError for the first difference, on all of them.
    """
    from torch import distributed

    others = [(f"parameter {number} beside the model", one) for number, one in enumerate(beside)]
    tensors = [*model.named_parameters(), *model.named_buffers(), *others]
    here: list[str] = [f"{name} is {value!r}" for name in COMPARED if (value := getattr(plan, name)) is not None]
    here += [f"{name} has shape {list(whole_shape(one))} and dtype {str(one.dtype)[6:]}" for name, one in tensors]
    here += [f"{name} {'is' if one.requires_grad else 'is not'} trained" for name, one in model.named_parameters()]
    every: list[list[str]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(every, here)
    for rank, there in enumerate(every):
        if there == every[0]:
            continue
        first, other = next(
            (one, two)
            for one, two in zip([*every[0], "nothing more"], [*there, "nothing more"], strict=False)
            if one != two
        )
        raise UsageError(
            f"the ranks differ: on rank 0 {first}, on rank {rank} {other}",
            limit="all ranks train the same model by the same plan",
            remedy="start the same script with the same arguments on each",
        )
