"""What a step would take on this machine under another plan, batch size or number of threads, without taking it.

Each operator that the step would call is timed by itself, on tensors of its shapes. Its parts do not add up to a step:
caches, Python and the autograd engine are missing. So the present step is both taken and replayed. Of what it takes
beyond its operators, some time for each call is what launching takes. The rest is memory that is not as near as in a
replay: it grows with the bytes that operators read, and on fewer threads as the present operators do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

from flatout.data.nested import leaves_in, map_leaves, map_tensors
from flatout.errors import UsageError
from flatout.generators import generators_kept
from flatout.operator_bytes import moves_no_data
from flatout.profiling.operator_classes import operator_class
from flatout.profiling.step_operators import Operator, of_followed, summed
from flatout.statistics import median
from flatout.units import format_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._ops import OpOverload

    from flatout.sizing.training import Training

OPERATOR_SECONDS, OPERATOR_CALLS = 0.015, 2
"""Each operator is called at least so often and so long, in each pass."""
STEP_SECONDS, STEP_CALLS = 0.7, 3
FAR_APART = 3.0
"""Operators one by one do not take so many times as long as the step that calls them."""
PASSES = 2
"""Some seconds apart, of which the faster counts: other work on the machine slows one of them down."""
CALL_SECONDS = 6e-6
"""That Python, the dispatcher and the autograd engine take for one operator: seen on an Intel Xeon with steps of 1 ms,
which are little else."""
_SKIPPED = ("prim", "profiler")


class NotReplayableError(Exception):
    """Why a step cannot be timed operator by operator."""


@dataclass(frozen=True, kw_only=True)
class ReplayedTime:
    """Of a step that was not taken."""

    step_seconds: float
    present_seconds: float
    """Of the present step, as it was taken."""
    doubt: float
    """As a share: by how much what should be equal differed, the step in two passes, or it and its operators."""
    left_out: tuple[str, ...]
    """Operators that cannot be called by themselves."""


@dataclass(frozen=True)
class _TensorLike:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLike:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def size_bytes(self) -> int:
        return self._count * self.dtype.itemsize

    @property
    def _count(self) -> int:
        """Numbers in memory, of which an expanded tensor has fewer than it shows."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def make(self) -> Tensor:
        import torch

        count = self._count
        if self.dtype.is_floating_point or self.dtype.is_complex:
            flat = torch.rand(count).add_(0.5).to(self.dtype)  # no zeros, infinities or denormals on the way
        else:
            flat = torch.zeros(count, dtype=self.dtype)  # as an index, in range everywhere
        return flat.as_strided(self.shape, self.stride)


@dataclass
class _Call:
    operation: OpOverload[..., object]
    args: object
    kwargs: object
    count: int = 0
    seconds: float | None = None
    """Of one call, in the pass in which it was fastest; None: it cannot be called by itself."""

    @property
    def read_bytes(self) -> int:
        tensors = leaves_in((self.args, self.kwargs), "", _is_described)
        return sum(one.size_bytes for _, one in tensors)


def replayed(
    present: Training, other: Training, *, samples: int, other_samples: int, threads: int | None
) -> ReplayedTime:
    """The step of `other` with `other_samples` on so many threads (None: as now), from the present one with `samples`.

    Weights and all else of the user's are as before afterwards. Raises NotReplayableError for recurrent layers: their
    backward operator reads addresses from a workspace, which only their forward operator can fill.
    """
    import torch

    from flatout.torch_private.attributes import name_in_schema

    found, others = _calls(present, samples), _calls(other, other_samples)
    if any(operator_class(name_in_schema(one.operation)) == "recurrent" for one in (*found.values(), *others.values())):
        raise NotReplayableError("recurrent layers cannot be timed operator by operator")
    taken: list[float] = []
    before = torch.get_num_threads()
    same = {key: replace(call) for key, call in found.items()} if threads is not None else found
    present_calls, on_threads, calls = list(found.values()), list(same.values()), list(others.values())
    for _ in range(PASSES):
        taken.append(_measured(present))
        _time(present_calls)
        try:
            if threads is not None:
                torch.set_num_threads(threads)
                _time(on_threads)
            _time([call for key, call in others.items() if key not in same])
        finally:
            torch.set_num_threads(before)
    for key, call in others.items():  # what both steps call is timed once, so that noise cannot make it differ
        call.seconds = same[key].seconds if key in same else call.seconds
    measured, now, then = min(taken), _seconds(present_calls), _seconds(calls)
    if not now:
        raise NotReplayableError("none of the step's operators could be timed by itself")
    if now > FAR_APART * measured:
        raise NotReplayableError(
            f"the operators of the present step took {format_seconds(now)} one by one, and the step itself "
            f"{format_seconds(measured)}: other work on the machine slows them down; try again when it is idle"
        )
    launching = min(max(0.0, measured - now), CALL_SECONDS * _count(present_calls))
    rest = measured - now - launching
    if rest > 0:
        rest *= _read_bytes(calls) / max(1, _read_bytes(present_calls)) * _seconds(on_threads) / now
    else:  # replayed operators took longer than the step: other work slowed them down
        then *= (measured - launching) / now
        rest = 0.0
    return ReplayedTime(
        step_seconds=then + launching * _count(calls) / _count(present_calls) + rest,
        present_seconds=measured,
        doubt=max(max(taken) / measured, now / measured) - 1,
        left_out=tuple(dict.fromkeys(str(call.operation) for call in (*present_calls, *calls) if not call.seconds)),
    )


def _measured(training: Training) -> float:
    """The median of a few steps, after which everything is as it was."""
    with training.on_same_memory() as real:
        step = real.make_step()
        try:
            for _ in range(2):
                step(real.batch)
            taken: list[float] = []
            until = time.perf_counter() + STEP_SECONDS
            while len(taken) < STEP_CALLS or time.perf_counter() < until:
                began = time.perf_counter()
                step(real.batch)
                taken.append(time.perf_counter() - began)
        finally:
            step.close()
    return median(taken)


def _calls(training: Training, samples: int) -> dict[str, _Call]:
    """By operator and what it is given."""
    from flatout.sizing.forecasting import fake_step
    from flatout.torch_private.attributes import name_in_schema
    from flatout.torch_private.dispatch import ListeningMode

    found: dict[str, _Call] = {}

    class Recorder(ListeningMode):
        def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            name = name_in_schema(func)
            if not moves_no_data(name) and name.partition("::")[0] not in _SKIPPED:
                call = _Call(func, *map_tensors(_TensorLike.of, (args, kwargs)))
                found.setdefault(f"{func} {call.args} {call.kwargs}", call).count += 1
            return func(*args, **kwargs)

    with fake_step(training, samples) as (step, batch):
        step(batch)  # after which the optimizer has its state
        with Recorder():
            step(batch)
    return found


def _callable_arguments(call: _Call) -> tuple[Sequence[object], Mapping[str, object]]:
    """Tensors with which the operator was called once. On fake tensors statistics of norms in half precision are half
    too, which they are not on real ones."""
    args, kwargs = map_leaves(_TensorLike.make, (call.args, call.kwargs), _is_described)
    try:
        call.operation(*args, **kwargs)
    except RuntimeError:
        args = [*args[:2], *(_in_fp32(one) for one in args[2:])]
        call.operation(*args, **kwargs)
    return args, kwargs


def _in_fp32(value: object) -> object:
    import torch

    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _seconds(calls: Sequence[_Call]) -> float:
    return sum(call.count * call.seconds for call in calls if call.seconds is not None)


def _count(calls: Sequence[_Call]) -> int:
    return sum(call.count for call in calls)


def _read_bytes(calls: Sequence[_Call]) -> int:
    return sum(call.count * call.read_bytes for call in calls)


def _is_described(value: object) -> TypeGuard[_TensorLike]:
    return isinstance(value, _TensorLike)


def _time(calls: Sequence[_Call]) -> None:
    """One pass over all: the median of each, kept where it is the fastest yet."""
    import torch

    with torch.no_grad(), generators_kept():  # values are drawn here, and operators such as dropout draw too
        for call in calls:
            try:
                args, kwargs = _callable_arguments(call)
                taken: list[float] = []
                until = time.perf_counter() + OPERATOR_SECONDS
                while len(taken) < OPERATOR_CALLS or time.perf_counter() < until:
                    began = time.perf_counter()
                    call.operation(*args, **kwargs)
                    taken.append(time.perf_counter() - began)
            except Exception:  # it needs values that fit each other, or a state; the others go on
                continue
            call.seconds = median(taken) if call.seconds is None else min(call.seconds, median(taken))


# a step that is not taken: on fake tensors, which need neither memory nor time


def followed(training: Training, samples: int, *, as_on_cuda: bool) -> tuple[Operator, ...]:
    """Of the second step, with `samples` in its batch, on fake tensors. Nothing of the training is changed.

    as_on_cuda: with the kernels that CUDA has, and the optimizer's updates for all weights at once. Raises UsageError
    where not the whole step could be followed.
    """
    from flatout.profiling.following import OperatorFollower
    from flatout.sizing.forecasting import fake_step

    follower = OperatorFollower()
    with fake_step(training, samples, as_on_cuda=as_on_cuda) as (step, batch):
        step(batch)
        with follower:
            step(batch)
    if follower.incomplete:
        raise UsageError(
            f"not the whole step was followed: {follower.incomplete}", limit="a part of a step predicts no step"
        )
    return summed(of_followed(follower.operators))
