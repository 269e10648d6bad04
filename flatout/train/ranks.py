"""What ranks that train the same model have to agree on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from flatout.errors import NumericsError, UsageError
from flatout.train.readings import HostCopy
from flatout.train.split import batch_coupled_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
ASK_SECONDS, ASK_STEPS = 0.25, 16
"""How often ranks ask each other whether to stop; the number of steps limits it when steps suddenly take longer."""


def is_first(group: ProcessGroup | None) -> bool:
    """Is this the rank that logs?"""
    return group is None or group.rank() == 0


class MeanOverRanks:
    """The mean of a number over all ranks, which are not waited for before it is needed: a rank that is ahead can begin
    its forward pass meanwhile."""

    def __init__(self, value: Tensor | float, device: torch.device, group: ProcessGroup) -> None:
        import torch
        from torch import distributed

        share = torch.as_tensor(value, dtype=torch.float32, device=device) / group.size()
        self.mean = share.clone()
        """A tensor on `device`; not to be read before `wait`."""
        self._sent = distributed.all_reduce(self.mean, group=group, async_op=True)

    def wait(self) -> None:
        """On CUDA only the stream waits, not the host."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None


class SharedStep:
    """Which of a step's collectives are over, to know whether this rank may start its share of the step again.

    The ranks sum up the weights of their terms; in the first forward pass DDP broadcasts buffers and checks buckets;
    and from the forward pass of the last part on, DDP takes every backward pass for the one that reduces. In between
    a rank works alone: it may split its share and start again, while the others wait in their reduction.
    """

    # holds no reference to the model: a copy of the model copies its hooks, and this object with them

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The next step."""
        self._in_line = self._reducing = False

    @contextlib.contextmanager
    def watching(self, model: DistributedDataParallel) -> Iterator[None]:
        """Follow the forward passes of a model in DDP."""
        hooks = [
            model.module.register_forward_pre_hook(self._begins),  # called after DDP's own part of the forward pass
            model.register_forward_hook(self._ended),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def obstacle(self, model: DistributedDataParallel) -> str | None:
        """Why this rank cannot start its share of the step again alone; None if it can."""
        if coupled := batch_coupled_layers(model):
            return f"{coupled[0]} mixes the samples of a batch"
        if model.static_graph or model.mixed_precision is not None:
            return "DDP's static_graph and mixed_precision keep a state from one pass to the next"
        if not self._in_line:
            return "the ranks were still exchanging buffers or weights"
        if self._reducing:
            return "the last part, which reduces the gradients together with the other ranks, had begun"
        return None

    def begin_again(self, model: DistributedDataParallel) -> None:
        """The same step, by this rank alone: the other ranks have broadcast their buffers and do not do so again."""
        model.require_forward_param_sync = False

    def _begins(self, module: Module, inputs: object) -> None:
        self._in_line = True

    def _ended(self, module: DistributedDataParallel, inputs: object, output: object) -> None:
        self._reducing = self._reducing or module.require_backward_grad_sync


class SharedStop:
    """Ranks that are asked to stop at different times stop after the same step: the next collective needs all of them.

    They ask each other about four times a second, and read the answer when they ask again: nothing waits for it.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.alone = group is None
        """Is this the only rank?"""
        self._answer: Callable[[], list[float]] | None = None
        self._period, self._steps, self._began = 1, 0, time.perf_counter()

    def __call__(self, requested: bool) -> bool:
        """Called after each step: whether to leave. The same on all ranks."""
        if self._group is None:
            return requested
        self._steps += 1
        if self._steps < self._period:
            return False
        stop = False
        if self._answer is not None:
            asked, step_seconds = self._answer()
            stop, self._period = bool(asked), min(max(1, int(ASK_SECONDS / step_seconds)), ASK_STEPS)
        now = time.perf_counter()
        self._answer = self._ask(float(requested), (now - self._began) / self._steps)
        self._steps, self._began = 0, now
        return stop

    def _ask(self, *values: float) -> Callable[[], list[float]]:
        """Returns a function that returns the largest of all ranks' values."""
        import torch
        from torch import distributed

        largest = torch.stack([torch.full((), value, device=self._device) for value in values])
        if largest.device.type == "cpu":
            work = distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group, async_op=True)
            return lambda: largest.tolist() if work.wait() else []
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        return HostCopy(largest).values  # it waits for a step before the last: the last one keeps the device busy


def largest_of_ranks(value: int, device: torch.device, group: ProcessGroup) -> int:
    """The largest of the ranks' numbers. Waits for the device."""
    import torch
    from torch import distributed

    largest = torch.tensor(value, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    return int(largest)


@contextlib.contextmanager
def raised_on_all_ranks(group: ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Around a check of what a rank alone has: where it fails on one, it does on all, and none waits for that one."""
    found: NumericsError | None = None
    try:
        yield
    except NumericsError as error:
        found = error
    failed = int(found is not None) if group is None else largest_of_ranks(int(found is not None), device, group)
    if failed:
        raise found or NumericsError(
            "the weights on another rank are not finite",
            limit="its own error says which",
            remedy="resume from the last checkpoint with a lower learning rate, clip_norm, or Plan(nonfinite='skip')",
        )


class SameLengths:
    """Sees to it that iterables of the ranks, whose lengths are not known, end together: a rank without a batch would
    never join the others, who would wait for it. A small exchange for each batch, between the hosts; where the ranks
    can only exchange over their GPUs, which it would wait for in every step, there is none."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        from torch import distributed

        self._group = group
        self._asks = device.type == "cpu" or "cpu:" in distributed.get_backend_config(group)
        self._batches = 0

    def check(self, *, ended: bool) -> None:
        """Called with each batch, and at the end. UsageError, on every rank, where some have ended and others not."""
        if not self._asks:
            return
        import torch
        from torch import distributed

        seen = torch.tensor([int(ended), int(not ended)], device="cpu")
        distributed.all_reduce(seen, distributed.ReduceOp.MAX, group=self._group)
        if bool(seen.all()):
            raise UsageError(
                f"some ranks have no batch after {self._batches}, and others have one",
                limit="all take part in every step",
                remedy="give each as many, or let flatout.batches(dataset, batch_size, plan) share them among ranks",
            )
        self._batches += 1


def gathered(value: T, group: ProcessGroup | None) -> list[T]:
    """The value of every rank, in their order; only the given one without other ranks."""
    if group is None:
        return [value]
    from torch import distributed

    found = [value] * group.size()
    distributed.all_gather_object(found, value, group=group)
    return found


def summed(every: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Pairs (sum over some items, their number) by name, each added up over all of `every`."""
    whole: dict[str, tuple[float, float]] = {}
    for one in every:
        for name, (total, count) in one.items():
            before = whole.get(name, (0.0, 0.0))
            whole[name] = before[0] + total, before[1] + count
    return whole


def mean_figures(figures: Mapping[str, float], group: ProcessGroup | None) -> dict[str, float]:
    """The mean of each figure over the ranks that have it, the same on all ranks: they decide alike. A script may
    evaluate on one of them."""
    every = gathered(dict(figures), group)
    by_name = {name: [one[name] for one in every if name in one] for name in dict.fromkeys(chain.from_iterable(every))}
    return {name: sum(values) / len(values) for name, values in by_name.items()}
