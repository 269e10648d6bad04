"""`largest_batch`: the most samples that fit in one step, found by forecast and proved by real steps.

A forecast takes no memory, so any size can be forecast; a size is returned only after real steps of it, training and
evaluation (of a loss that can be evaluated without gradients), stayed under the limit. Weights, optimizer, random
states and statistics are restored bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flatout.arguments import as_bytes, as_whole_number
from flatout.data.nested import batch_length, repeat_batch, slice_batch, tensors_in
from flatout.errors import FlatoutError, MachineError, UsageError, describe_error
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.memory.real_run import LimitedRun
from flatout.memory.tracking import plain_tensors
from flatout.notebook_tables import ShownAsText
from flatout.plan import Plan
from flatout.sizing.forecasting import forecast_training
from flatout.sizing.target import available_bytes, find_target
from flatout.sizing.training import Training, for_a_try, tell_terminal
from flatout.train.split import batch_coupled_layers
from flatout.train.step import TrainStep
from flatout.units import format_bytes

MOST_TRIES = 5
MOST_FORECASTS = 24
STEPS_A_TRY = 2
SMALL_FORECAST_MISS = 1.02
LARGEST_SIZE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Try:
    """One size that really ran, or did not."""

    batch_size: int
    peak_bytes: int
    fitted: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class LargestBatch(ShownAsText):
    """The answer with its evidence. `plan` is the given one, with accumulation where a global batch was asked for."""

    batch_size: int
    peak_bytes: int
    """Measured in the try of that size."""
    limit_bytes: int
    plan: Plan
    tries: tuple[Try, ...]
    forecasts: tuple[tuple[int, int], ...]
    """(batch size, forecast bytes), in the order in which they were made."""

    def __str__(self) -> str:
        more = next((one for one in self.tries if not one.fitted), None)
        above = f"; {more.batch_size} took more" if more else ""
        return (
            f"batch {self.batch_size}: {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)} measured "
            f"in {len(self.tries)} real {'try' if len(self.tries) == 1 else 'tries'}{above}"
        )


def largest_batch(
    step: TrainStep,
    batch: object,
    *,
    limit: int | str | None = None,
    at_most: int | None = None,
    multiple_of: int = 1,
    global_batch: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> LargestBatch:
    """The largest batch for which a call of `step`, and evaluation, stay under `limit` on the model's device.

    batch: the longest samples that may come; its tensors are repeated to other sizes. limit: of tensors on the CPU, of
    reserved memory on CUDA, a number of bytes or a text such as "2 GiB"; None: what is available now, on the CPU 90 %
    of it. at_most: a size that is large enough. multiple_of: sizes to choose from. global_batch: samples of one
    optimizer step; the returned plan then splits such a batch into micro-batches of the size found. Tries then hold the
    whole of it and accumulate over two parts; later ones hold what the second does. progress: called with a line before
    each forecast and try; None: lines on a terminal's standard error.

    `step` stays as it is, bit for bit: its model, optimizer, counters, levers and the random generators. A further
    model that its loss function holds (a discriminator) takes part in real tries, with its gradients and statistics.

    Raises MachineError where not even the smallest size fits, UsageError for what is no TrainStep, or a batch without
    tensors.
    """
    training = Training.of(step, batch)
    limit_bytes = as_bytes(limit, "limit") if limit is not None else None
    _check_sizes(at_most, multiple_of, global_batch)
    tell = progress or tell_terminal
    if limit_bytes is None:
        limit_bytes = available_bytes(step.model)
    cap = min(at_most or LARGEST_SIZE, global_batch or LARGEST_SIZE) // multiple_of
    search = _Search(training, limit_bytes, multiple_of, global_batch, tell)
    found = search.run(max(1, cap))
    plan = training.plan
    if global_batch is not None:
        reason = f"{found.batch_size} samples are the most that fit in one part"
        if coupled := batch_coupled_layers(training.model):
            reason += f"; not exact, as {coupled[0]} mixes the samples of a batch"
        plan = plan.with_choice("micro_batches", -(-global_batch // found.batch_size), reason)
    return LargestBatch(
        batch_size=found.batch_size,
        peak_bytes=found.peak_bytes,
        limit_bytes=limit_bytes,
        plan=plan,
        tries=tuple(search.tries),
        forecasts=tuple(search.forecasts.items()),
    )


class _Search:
    """Sizes are counted in units of `multiple_of` samples. With a global batch they are those of its parts."""

    def __init__(
        self, training: Training, limit: int, unit: int, global_batch: int | None, tell: Callable[[str], None]
    ) -> None:
        self.training, self.limit, self.unit, self.global_batch, self.tell = training, limit, unit, global_batch, tell
        self.target = find_target(None, training.model)
        self.tries: list[Try] = []
        self.forecasts: dict[int, int] = {}
        self.too_few = ""
        """Why a step of a single sample fails; '' where it does not, or was not tried."""

    def run(self, cap: int) -> Try:
        """Start where the forecast says; move by what the tries measure, until n fits and n + 1 does not."""
        size = self._by_forecast(cap)
        fits: Try | None = None
        too_large = cap + 1
        while len(self.tries) < MOST_TRIES and (fits is None or too_large - fits.batch_size // self.unit > 1):
            tried = self._try(size)
            if tried.fitted:
                fits = tried
            else:
                too_large = size
                if size == 1:
                    break
            low = fits.batch_size // self.unit if fits is not None else 0
            size = self._next(size, tried, low, too_large)
        if fits is None:
            fits = self._try_small(too_large)
        return fits

    def _try_small(self, too_large: int) -> Try:
        """The forecast was far off: halve until something fits."""
        while too_large > 1:
            too_large //= 2
            tried = self._try(too_large)
            if tried.fitted:
                return tried
        least = f"a batch of {2 if self.too_few else self.unit} takes more than {format_bytes(self.limit)}"
        raise MachineError(
            least + (f", and one of a single sample fails: {self.too_few}" if self.too_few else ""),
            limit=f"that is all there is for tensors on {self.target.name}",
            remedy="flatout.fit_to_memory(...) finds a plan that needs less",
        )

    # forecast

    def _forecast(self, size: int) -> float:
        """Infinite for a single sample where layers mix samples and cannot do without others."""
        samples = size * self.unit
        if samples not in self.forecasts:
            self.tell(f"forecasting batch {samples}")
            run = self._samples_run(samples)
            try:
                made = forecast_training(self._in_parts(samples), self.target, run)
            except Exception as error:
                if not self._is_too_few(run, error):
                    raise
                return math.inf
            self.forecasts[samples] = made.peak_bytes + self._waiting_bytes(run)
        return self.forecasts[samples]

    def _is_too_few(self, samples: int, error: Exception) -> bool:
        """Is that batch norm, which has no statistics of one sample?"""
        if samples > 1 or isinstance(error, FlatoutError) or not batch_coupled_layers(self.training.model):
            return False
        self.too_few = describe_error(error)
        return True

    def _by_forecast(self, cap: int) -> int:
        """The largest size whose forecast is under the limit: a straight line first, then halving what is left."""
        low, high = 0, cap + 1
        size = min(cap, max(1, self.training.samples // self.unit))
        for _ in range(MOST_FORECASTS):
            if self._forecast(size) <= self.limit:
                low = size
            else:
                high = size
            if high - low <= 1:
                break
            size = self._guess(low, high)
        return max(1, low)

    def _guess(self, low: int, high: int) -> int:
        """Where the line through two forecasts crosses the limit, between the bounds: one on each side if known."""
        known = sorted((samples // self.unit, size) for samples, size in self.forecasts.items())
        below = [pair for pair in known if pair[0] <= low]
        above = [pair for pair in known if pair[0] >= high]
        points = [below[-1], above[0]] if below and above else below[-2:] or above[:2]
        guess = 2 * low if low else high // 2
        if len(points) == 2 and points[1][1] > points[0][1]:
            (a, bytes_a), (b, bytes_b) = points
            guess = int(a + (self.limit - bytes_a) * (b - a) / (bytes_b - bytes_a))
        return min(high - 1, max(low + 1, guess))

    # of a global batch

    def _samples_run(self, samples: int) -> int:
        """Of a step with parts of that size: at most two of them, as later ones hold what the second does."""
        return samples if self.global_batch is None else min(self.global_batch, 2 * samples)

    def _in_parts(self, samples: int) -> Training:
        if self.global_batch is None:
            return self.training
        parts = min(2, -(-self.global_batch // samples))
        return self.training.under(self.training.plan.with_choice("micro_batches", parts, "a try of two parts"))

    def _waiting_bytes(self, run: int) -> int:
        """Of the global batch's samples that are in none of these parts."""
        if self.global_batch is None:
            return 0
        given = sum(one.nbytes for _, one in tensors_in(self.training.batch))
        return given * (self.global_batch - run) // self.training.samples

    # real tries

    def _try(self, size: int) -> Try:
        samples = size * self.unit
        self.tell(f"trying batch {samples}: {STEPS_A_TRY} steps and an evaluation")
        run = LimitedRun(self.target.name, self.limit)
        tried = self._in_parts(samples)
        with tried.under(for_a_try(tried.plan)).on_same_memory() as own:
            try:
                with run:
                    run.hold(own.held())
                    batch = repeat_batch(own.batch, self.global_batch or samples)
                    run.hold(one for _, one in tensors_in(batch))
                    _take_steps(own, batch, self._samples_run(samples), samples, self.tell)
                fitted = True
            except Exception as error:
                if not (is_out_of_memory(error) or self._is_too_few(samples, error)):
                    raise
                fitted = False
        self.tries.append(Try(batch_size=samples, peak_bytes=run.peak_bytes, fitted=fitted))
        return self.tries[-1]

    def _next(self, size: int, tried: Try, low: int, too_large: int) -> int:
        """The neighbour, where the forecast was right; else where the line through what was measured says."""
        miss = tried.peak_bytes / max(1, self._forecast(size))
        guess = size + 1 if tried.fitted else size - 1
        if not 1 / SMALL_FORECAST_MISS < miss < SMALL_FORECAST_MISS:
            guess = size + math.floor((self.limit - tried.peak_bytes) / self._bytes_a_unit(size, tried))
            guess = max(size + 1, guess) if tried.fitted else min(size - 1, guess)
        return min(too_large - 1, max(low + 1, guess))

    def _bytes_a_unit(self, size: int, tried: Try) -> float:
        """By how much a larger batch takes more: between two tries that ran to their end, or above what is fixed."""
        ended = [(one.batch_size // self.unit, one.peak_bytes) for one in self.tries if one.fitted]
        if len(ended) >= 2 and ended[-1][1] != ended[-2][1]:  # CUDA reserves whole segments: neighbours take the same
            (a, bytes_a), (b, bytes_b) = ended[-2:]
            return max(1.0, (bytes_b - bytes_a) / (b - a))
        held = (inner for one in self.training.held() for inner in plain_tensors(one))
        fixed: int = sum(one.untyped_storage().nbytes() for one in held)
        return max(1.0, (tried.peak_bytes - fixed) / size)


def _take_steps(own: Training, batch: object, trained: int, evaluated: int, tell: Callable[[str], None]) -> None:
    """On the first samples of the batch. A loss that needs gradients itself, as of a penalty, is not evaluated."""
    with contextlib.closing(own.make_step()) as step:
        for _ in range(STEPS_A_TRY):
            step(_first(batch, trained))
        own.model.eval()
        try:
            with torch.no_grad():
                own.loss_fn(own.model, _first(batch, evaluated))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            tell(f"its loss cannot be evaluated without gradients, so only training was tried: {describe_error(error)}")


def _first(batch: object, samples: int) -> object:
    return batch if batch_length(batch) == samples else slice_batch(batch, 0, samples)


def _check_sizes(at_most: int | None, multiple_of: int, global_batch: int | None) -> None:
    given = {"at_most": at_most, "global_batch": global_batch}
    as_whole_number(multiple_of, "multiple_of")
    for name, value in given.items():
        if value is None:
            continue
        if as_whole_number(value, name) < multiple_of:
            raise UsageError(f"{name} is {value}", limit=f"multiple_of is {multiple_of}", remedy="make one of them fit")
