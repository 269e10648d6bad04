"""A forecast from small real steps, where control flow depends on the data and no fake run can follow it.

Steps of three sizes are measured, and their differences are extrapolated to the size asked for; the stated uncertainty
is as wide as so few samples demand. A branch of the program that none of them took is in no forecast.

A dimension that is constant, or grows by whole numbers with the samples, is exact at any size, and so are products of
such dimensions, as the square of a batch. Others depend on the data, for example on a mask: they are taken to be the
same share of the samples.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flatout.data.nested import map_tensors, slice_batch
from flatout.errors import UsageError, describe_error
from flatout.generators import generators_kept
from flatout.levers.low_bit import copied_codes
from flatout.memory.forecast import MemoryForecast, Target, forecast_of
from flatout.memory.timeline import Allocation, Timeline
from flatout.memory.tracking import Tracker
from flatout.memory.workspace import WorkspaceOf
from flatout.parameters import copy_own_attributes
from flatout.sizing.training import Training, cannot_be_copied, carried_out, follow_steps, never_captured
from flatout.torch_private.tensors import clear_cublas_workspaces
from flatout.train.placement import join_recurrent_weights
from flatout.train.split import batch_coupled_layers
from flatout.units import counted

UNCERTAINTY_EXTENDED = 0.15
UNCERTAINTY_OTHER_BRANCH = 0.3
"""Where the sizes did not run through the same operations, or where there were only two of them."""
SIZES = 3
SMALLEST_SHARE = 6
"""The smallest is that part of the size asked for, so that the largest is half of it."""

DEVIATIONS = 2.0
NONE_SEEN = 3.0
"""How far a share of few samples may be off, by counting: 2 standard deviations of k events are 2 / sqrt(k) of them,
and where none was seen, up to 3 may have been expected."""

_FIXED = ("weights", "gradients", "optimizer", "workspaces")
"""The same for any batch size; where two runs differ in them, one of them skipped a part of the model."""


def forecast_from_real_steps(
    training: Training,
    target: Target,
    batch_size: int,
    error: Exception,
    *,
    uncertainty: float,
    not_covered: list[str],
    workspace_of: WorkspaceOf | None,
) -> MemoryForecast:
    """`error`: why there was no fake run. `uncertainty`: of a fake run. UsageError for a batch of one sample."""
    sizes = _sizes(training, batch_size, error)
    steps = [_real_steps(training, size, workspace_of) for size in sizes]
    timelines = [one.timeline for one in steps]

    def of(timeline: Timeline) -> MemoryForecast:
        return forecast_of(timeline, target, batch_size=batch_size, uncertainty=uncertainty, not_covered=not_covered)

    found = extended(timelines, Sizes(taken=sizes, wanted=batch_size, parts=training.plan.micro_batches or 1))
    if found is not None:
        made, high = of(found[0]), of(found[1]).peak_bytes
        least = UNCERTAINTY_EXTENDED if len(sizes) == SIZES else UNCERTAINTY_OTHER_BRANCH
    else:
        made, high = _extended_by_sums([of(one) for one in timelines], sizes, batch_size)
        least = UNCERTAINTY_OTHER_BRANCH
    apart = high / made.peak_bytes - 1
    made = _with_unseen(made, [one.unseen_bytes for one in steps], sizes, batch_size)
    return replace(
        made,
        uncertainty=max(least, uncertainty, apart),
        not_in_force=steps[-1].not_in_force,
        method=f"real steps of {' and '.join(map(str, sizes))} samples, extrapolated",
        not_covered=(
            *made.not_covered,
            f"a fake run was impossible: {describe_error(error)}",
            "a branch of the program that none of these steps took",
        ),
    )


def _sizes(training: Training, batch_size: int, error: Exception) -> list[int]:
    """The smallest and its multiples, as far as the example batch has samples."""
    least = 2 if batch_coupled_layers(training.model) else 1  # batch norm has no statistics of one sample
    if training.samples < 2 * least:
        raise UsageError(
            f"a fake run is impossible: {describe_error(error)}",
            limit=f"real steps of {least} and {2 * least} samples would be measured, and the example batch has "
            f"{counted(training.samples, 'sample')}",
            remedy=f"give an example batch of at least {2 * least} samples, better of as many as you train with",
        ) from error
    parts = training.plan.micro_batches or 1  # fewer samples would be split into fewer parts
    count = min(SIZES, training.samples // least)
    small = max(least, min(training.samples // count, max(parts, batch_size // SMALLEST_SHARE)))
    return [small * number for number in range(1, count + 1)]


@dataclass(frozen=True, kw_only=True)
class RealSteps:
    """What steps of one size held."""

    timeline: Timeline
    unseen_bytes: int
    """CUDA: how much more the allocator held at its peak than the timeline knows: inside cuDNN's recurrent layers."""
    not_in_force: tuple[tuple[str, str], ...]


def _real_steps(training: Training, size: int, workspace_of: WorkspaceOf | None) -> RealSteps:
    counter = _AllocatorPeak(next(training.model.parameters()).device) if training.device_type == "cuda" else None
    memo: dict[int, object] = {**copied_codes(training.optimizer)}
    try:
        model, optimizer, loss_fn = copy.deepcopy((training.model, training.optimizer, training.loss_fn), memo)
        copy_own_attributes(training.optimizer, optimizer, memo)
    except Exception as error:
        raise cannot_be_copied(error) from error
    join_recurrent_weights(model)
    never_captured(optimizer)
    batch = map_tensors(lambda one: one.clone(), slice_batch(training.batch, 0, size))  # a slice holds the whole
    small = training.under(carried_out(training.plan)).on_copies(model, optimizer, loss_fn, batch, size)
    with (
        generators_kept(),
        contextlib.ExitStack() as closing,
        Tracker(workspace_of=workspace_of) as tracker,
    ):
        step = follow_steps(tracker, small, closing)
        timeline = tracker.timeline()
        held = counter.peak_bytes() if counter is not None else 0
    return RealSteps(
        timeline=timeline,
        unseen_bytes=max(0, held - timeline.peak("cuda").size_bytes),
        not_in_force=tuple(step.rolled_back),
    )


class _AllocatorPeak:
    """The most that torch's CUDA allocator holds from now on, beyond what it holds now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # cuBLAS's workspaces are allocated again, so that they are both in the timeline and in this peak.
        clear_cublas_workspaces()
        torch.cuda.reset_peak_memory_stats(device)
        self._before = int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.memory_stats(self._device)["requested_bytes.all.peak"]) - self._before


def _with_unseen(made: MemoryForecast, unseen: list[int], sizes: list[int], wanted: int) -> MemoryForecast:
    """Extrapolated linearly, but at least what was seen: what a library allocates for itself may not grow at all."""
    slope = (unseen[-1] - unseen[0]) / (sizes[-1] - sizes[0])
    extra = max(*unseen, round(unseen[-1] + slope * (wanted - sizes[-1])))
    if not extra:
        return made
    return replace(
        made,
        peak_bytes=made.peak_bytes + extra,
        tensor_bytes=made.tensor_bytes + extra,
        categories={**made.categories, "workspaces": made.categories["workspaces"] + extra},
    )


# from the timelines of a few small steps to that of a large one, dimension by dimension of every tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Samples of the steps that were taken, and of the one wanted. `parts`: that each step splits its batch into."""

    taken: Sequence[int]
    wanted: int
    parts: int = 1


def extended(timelines: Sequence[Timeline], sizes: Sizes) -> tuple[Timeline, Timeline] | None:
    """The timeline that is expected, and the one if everything that depends on the data turns out high.

    None where they do not allocate and free for the same operations in the same order. Sizes ascend."""
    last = timelines[-1]
    if any(one.events != last.events or len(one.allocations) != len(last.allocations) for one in timelines):
        return None
    expected: list[Allocation] = []
    high: list[Allocation] = []
    for ones in zip(*(timeline.allocations for timeline in timelines), strict=True):
        if any(one.operation != ones[-1].operation or len(one.shape) != len(ones[-1].shape) for one in ones):
            return None
        size_bytes, high_bytes = _extended_bytes(ones, sizes)
        expected.append(replace(ones[-1], size_bytes=size_bytes))
        high.append(replace(ones[-1], size_bytes=high_bytes))
    return Timeline(expected, last.events), Timeline(high, last.events)


def _extended_bytes(ones: Sequence[Allocation], sizes: Sizes) -> tuple[int, int]:
    """(expected, high) of one allocation."""
    measured = [one.size_bytes for one in ones]
    if len(set(measured)) == 1:
        return measured[-1], measured[-1]
    per_element = max((one.size_bytes / math.prod(one.shape) for one in ones if math.prod(one.shape)), default=0.0)
    if not per_element or not ones[-1].shape:  # as a workspace: its bytes are all that is known
        at = _dimension(measured, sizes)
        return round(at[0]), round(at[1])
    dimensions = [_dimension(values, sizes) for values in zip(*(one.shape for one in ones), strict=True)]
    expected, high = (math.prod(one[which] for one in dimensions) for which in (0, 1))
    return round(per_element * expected), round(per_element * high)


def _dimension(values: Sequence[int], sizes: Sizes) -> tuple[float, float]:
    """(expected, high) at the size that is asked for."""
    if len(set(values)) == 1:
        return values[-1], values[-1]
    first, last = sizes.taken[0], sizes.taken[-1]
    slope = (values[-1] - values[0]) / (last - first)
    on_a_line = all(
        value == values[0] + slope * (size - first) for value, size in zip(values, sizes.taken, strict=True)
    )
    if on_a_line and slope > 0 and (slope * sizes.parts).is_integer():
        exact = values[-1] + slope * (sizes.wanted - last)
        return exact, exact
    share = values[-1] / last
    expected = share * sizes.wanted
    high = _highest_share(values, sizes.taken) * sizes.wanted
    if all(value <= size for value, size in zip(values, sizes.taken, strict=True)):
        high = min(high, sizes.wanted)  # a choice among the samples
    return expected, high


def _highest_share(values: Sequence[int], taken: Sequence[int]) -> float:
    count, samples = values[-1], taken[-1]
    if not count:
        return NONE_SEEN / samples
    by_counting = DEVIATIONS / math.sqrt(count)
    share = count / samples
    apart = max(abs(value / size / share - 1) for value, size in zip(values, taken, strict=True))
    return share * (1 + max(by_counting, apart))


# where their timelines differ


def _extended_by_sums(ones: list[MemoryForecast], sizes: list[int], wanted: int) -> tuple[MemoryForecast, int]:
    """The runs took different branches: only their totals can be extrapolated, which misses a peak elsewhere.

    Returns the forecast, and the highest that any two of the sizes lead to.
    """
    made = [
        _on_a_line(ones[i], ones[j], (wanted - sizes[i]) / (sizes[j] - sizes[i]))
        for i, j in itertools.combinations(range(len(sizes)), 2)
    ]
    longest = _on_a_line(ones[0], ones[-1], (wanted - sizes[0]) / (sizes[-1] - sizes[0]))
    return longest, max(one.peak_bytes for one in made)


def _on_a_line(one: MemoryForecast, other: MemoryForecast, scale: float) -> MemoryForecast:
    def extend(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * scale))

    categories = {
        name: max(size, other.categories[name]) if name in _FIXED else extend(size, other.categories[name])
        for name, size in one.categories.items()
    }
    tensors = sum(categories.values())
    around = extend(one.peak_bytes - one.tensor_bytes, other.peak_bytes - other.tensor_bytes)
    return replace(
        other,
        peak_bytes=tensors + around,
        tensor_bytes=tensors,
        rounding_bytes=extend(one.rounding_bytes, other.rounding_bytes),
        cached_bytes=extend(one.cached_bytes, other.cached_bytes),
        between_steps_bytes=extend(one.between_steps_bytes, other.between_steps_bytes),
        categories=categories,
        largest=(),
    )
