"""What one of several ranks exchanges with the others in a training step, counted in a fake run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatout.data.nested import leaves_in
from flatout.sizing.forecasting import fake_step, of_one_rank
from flatout.sizing.training import Training
from flatout.torch_private.dispatch import TorchDispatchMode
from flatout.train.step import TrainStep

ALL_REDUCE = "c10d::allreduce_"


def all_reduced_bytes(step: TrainStep, batch: object, ranks: int) -> list[int]:
    """Of each all_reduce in a step of one of so many ranks, which are pretended, as `forecast` does: the bytes.

    Raises UsageError for a plan without ranks; whatever a step raises that cannot be run on fake tensors.
    """
    training = Training.of(step, batch)
    training, samples = of_one_rank(training, training.samples, ranks)
    counted = _Counted()
    with fake_step(training, samples, counted) as (made, shared):
        made(shared)  # the first step also compares and begins
        counted.sizes.clear()
        made(shared)
    return counted.sizes


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == ALL_REDUCE:
            tensors = leaves_in(args[0], "sent", lambda one: isinstance(one, Tensor))
            self.sizes.append(sum(one.nbytes for _, one in tensors))
        return func(*args, **(kwargs or {}))
