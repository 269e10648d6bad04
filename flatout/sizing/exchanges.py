"""What one of several ranks exchanges with the others in a training step, counted in a fake run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flatout.data.nested import leaves_in
from flatout.sizing.forecasting import fake_step, of_one_rank
from flatout.sizing.training import Training
from flatout.torch_private.dispatch import ListeningMode
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    from torch._ops import OpOverload

ALL_REDUCE = "c10d::allreduce_"


def all_reduced_bytes(step: TrainStep, batch: object, ranks: int) -> list[int]:
    """Of each all_reduce in a step of one of so many ranks, which are pretended, as `forecast` does: the bytes.

    Raises UsageError for a plan without ranks; whatever a step raises that cannot be run on fake tensors.
    """
    training = Training.of(step, batch)
    training, samples = of_one_rank(training, training.samples, ranks)
    counted = _Counted()
    with fake_step(training, samples) as (made, shared):
        made(shared)  # the first step also compares and begins
        with counted:
            made(shared)
    return counted.sizes


class _Counted(ListeningMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func.name() == ALL_REDUCE:
            tensors = leaves_in(args[0], "sent", lambda one: isinstance(one, Tensor))
            self.sizes.append(sum(one.nbytes for _, one in tensors))
        return func(*args, **kwargs)
