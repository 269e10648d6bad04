"""The operators of a training step that is not taken: followed on fake tensors, which need neither memory nor time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.generators import generators_kept
from flatout.profiling.step_operators import Operator, of_followed, summed

if TYPE_CHECKING:
    from flatout.sizing.training import Training


def followed(training: Training, samples: int, *, as_on_cuda: bool) -> tuple[Operator, ...]:
    """Of the second step, with `samples` in its batch, on fake tensors. Nothing of the training is changed.

    as_on_cuda: with the kernels that CUDA has, and the optimizer's updates for all weights at once. Raises UsageError
    where not the whole step could be followed.
    """
    from flatout.profiling.following import OperatorFollower

    follower = OperatorFollower()
    with fake_step(training, samples, as_on_cuda=as_on_cuda) as step, follower:
        step()
    if follower.incomplete:
        raise UsageError(
            f"not the whole step was followed: {follower.incomplete}", limit="a part of a step predicts no step"
        )
    return summed(of_followed(follower.operators))


@contextlib.contextmanager
def fake_step(training: Training, samples: int, *, as_on_cuda: bool) -> Iterator[Callable[[], object]]:
    """A step of copies on fake tensors, which was taken once: the optimizer has its state."""
    from flatout.memory.fake_run import FakeRun, ValuesForOptimizers, operations_as_on_cuda, torch_keeps_quiet
    from flatout.sizing.forecasting import default_to_foreach, on_fake_copies

    world = FakeRun()
    fake = on_fake_copies(world, training, samples)
    if as_on_cuda:
        default_to_foreach(fake.optimizer)
    on_cpu = training.device_type == "cpu"
    cuda = operations_as_on_cuda() if as_on_cuda and on_cpu else contextlib.nullcontext()
    with torch_keeps_quiet(), generators_kept(), world, cuda, ValuesForOptimizers():
        step = fake.make_step()
        try:
            fake.model.train()
            step(fake.batch)
            yield lambda: step(fake.batch)
        finally:
            step.close()
