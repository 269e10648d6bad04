"""What several ranks that train one model have to agree on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flatout.train.split import batch_coupled_layers

ASK_SECONDS, ASK_STEPS = 0.25, 16
"""How often ranks ask one another whether to stop: the steps bound it where they suddenly take longer."""


def ranks_of(model: Any) -> int:
    """Over how many ranks the model averages its gradients: 1 unless it is wrapped by DDP."""
    import torch

    parallel = torch.nn.parallel.DistributedDataParallel
    return model.process_group.size() if isinstance(model, parallel) else 1


def mean_over_ranks(value: Any, device: Any, group: Any) -> Any:
    """The mean of a number over all ranks, a tensor on `device`; does not wait for the device."""
    import torch
    from torch import distributed

    total = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
    distributed.all_reduce(total, group=group)
    return total / group.size()


class SharedStep:
    """How far a step is in what its ranks do together, each part of it once: may this rank begin its share again?

    They sum up the weights of their terms; in the first forward pass DDP brings buffers and buckets into line; and
    from the forward pass of the last part on DDP takes every backward pass for the one that reduces. What lies between
    is this rank's own: it may split its share and begin again, while the others wait in their reduction.
    """

    # does not hold the model: whoever copies that copies its hooks, and this with them

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The next step."""
        self.weight: Any = None
        """The mean of the ranks' weights, once it is known."""
        self._in_line = self._reducing = False

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Follow the forward passes of a model in DDP."""
        hooks = [
            model.module.register_forward_pre_hook(self._begins),  # called by DDP when its own part is done
            model.register_forward_hook(self._ended),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def obstacle(self, model: Any) -> str | None:
        """Why this rank cannot begin its share of the step again by itself; None where it can."""
        if coupled := batch_coupled_layers(model):
            return f"{coupled[0]} mixes the samples of a batch"
        if model.static_graph or model.mixed_precision is not None:
            return "DDP's static_graph and mixed_precision keep a state from one pass to the next"
        if not self._in_line:
            return "the ranks were still exchanging buffers or weights"
        if self._reducing:
            return "the last part, which reduces the gradients together with the other ranks, had begun"
        return None

    def begin_again(self, model: Any) -> None:
        """The same step, by this rank alone: the other ranks have broadcast their buffers and do not do so again."""
        model.require_forward_param_sync = False

    def _begins(self, module: Any, inputs: Any) -> None:
        self._in_line = True

    def _ended(self, module: Any, inputs: Any, output: Any) -> None:
        self._reducing = self._reducing or module.require_backward_grad_sync


class SharedStop:
    """Ranks that were asked to stop, each at its own time, stop after the same step: the next collective needs all.

    They ask one another about four times a second, and read the answer when they ask again: nothing waits for it.
    """

    def __init__(self, model: Any) -> None:
        self._group = model.process_group if ranks_of(model) > 1 else None
        self.alone = self._group is None
        """Is there nobody to agree with?"""
        self._device = next(model.parameters()).device
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
        """Gives the largest of all ranks' values."""
        import torch
        from torch import distributed

        largest = torch.stack([torch.full((), value, device=self._device) for value in values])
        if largest.device.type == "cpu":
            work: Any = distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group, async_op=True)
            return lambda: largest.tolist() if work.wait() else []
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        host = torch.empty(largest.shape, pin_memory=True)
        host.copy_(largest, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def answer() -> list[float]:
            event.synchronize()  # of a step before the last: the last one keeps the device busy
            return host.tolist()

        return answer


def gathered(value: Any, model: Any) -> list[Any]:
    """Every rank's value, in their order; of a model that is not in DDP the one that is given."""
    if ranks_of(model) == 1:
        return [value]
    from torch import distributed

    found: list[Any] = [None] * ranks_of(model)
    distributed.all_gather_object(found, value, group=model.process_group)
    return found


def mean_figures(figures: Mapping[str, float], model: Any) -> dict[str, float]:
    """The means over the ranks, of what each of them has: all ranks then decide alike."""
    every = gathered(dict(figures), model)
    if len(every) == 1:
        return dict(figures)
    return {name: sum(one[name] for one in every) / len(every) for name in figures if all(name in one for one in every)}
