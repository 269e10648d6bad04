"""`fit_to_memory`: the plan whose training step stays below a memory limit, at the least cost in time.

Memory comes from forecasts, which need no room. Time comes from real steps, measure by measure, on as many samples as
fit; where not even one fits here, or another GPU is meant, from the operations that a fake run counts. Combinations
are considered from the fastest predicted on, until some fit; the finalists are timed against each other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from flatout.arguments import as_bytes, as_exactness
from flatout.data.nested import repeat_batch
from flatout.errors import MachineError, UsageError
from flatout.levers.compile import repeated_blocks
from flatout.memory.forecast import MemoryForecast, Target
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.notebook_tables import ShownAsText
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.sizing.forecasting import count_operations, forecast_training
from flatout.sizing.measures import (
    Choices,
    Key,
    contradict,
    exactness_of,
    key_of,
    label_of,
    left_out,
    measures_of,
    strongest,
)
from flatout.sizing.target import find_target, transfer_time
from flatout.sizing.training import Training, for_a_try, tell_terminal
from flatout.train.split import batch_coupled_layers
from flatout.train.step import TrainStep
from flatout.units import format_bytes, format_seconds

FINALISTS = 8
FINALISTS_OF_A_KIND = 2
"""Of those that differ only in the degree of a measure: a product of ratios may be wrong for all of them alike."""
FORECASTS_AFTER_THE_FIRST = 24
PREDICTION_MISS = 1.25
"""A combination predicted to be slower than the first that fits by more than this factor is not considered."""
ROUNDS = 3
TIMED_SECONDS, TIMED_STEPS = 0.1, 2
"""Steps are timed for at least this long, and at least this many."""
MOST_FORECASTS = 120
TIMING_SAMPLES = 32
"""Samples of the steps that are timed, where the example batch has more: shares hardly change with it."""


@dataclass(frozen=True, kw_only=True)
class Considered:
    """One combination of measures."""

    choices: Choices
    """Plan fields that it adds; empty: the plan as given."""
    exactness: Exactness
    """What these measures do to the numbers."""
    peak_bytes: int
    fits: bool
    predicted_ratio: float | None
    """Time of a step over that of the plan as given, the product of the measures' own ratios; None: unknown."""
    step_seconds: float | None = None
    """Of real steps, for the finalists: the median of the quickest of some rounds."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FitToMemory(ShownAsText):
    """The plan with its evidence. To continue under it: `step = step.with_plan(found.plan)`."""

    plan: Plan
    """That of the step, and what it takes to stay below the limit."""
    forecast: MemoryForecast
    """Of a step under `plan`."""
    limit_bytes: int
    considered: tuple[Considered, ...]
    timed_by: str
    """'real steps of n samples', or 'operations counted in a fake run'; and how transfers were, if there are any."""
    left_out: tuple[str, ...] = ()
    """Measures that were not considered, and why."""

    def __str__(self) -> str:
        lines = [f"limit {format_bytes(self.limit_bytes)} · time from {self.timed_by}"]
        for one in self.considered:
            label = ", ".join(f"{name} {value}" for name, value in one.choices.items()) or "as given"
            took = f" · {format_seconds(one.step_seconds)} a step" if one.step_seconds is not None else ""
            verdict = "fits" if one.fits else "too large"
            ratio = f"x{one.predicted_ratio:.2f} time" if one.predicted_ratio is not None else "time unknown"
            lines.append(f"{label}: {format_bytes(one.peak_bytes)} ({verdict}), {one.exactness}, {ratio}{took}")
        lines += [f"not considered: {line}" for line in self.left_out]
        lines.append(f"chosen: {', '.join(self.plan.choices()) or 'as given'}")
        return "\n".join(lines)


def fit_to_memory(
    limit: int | str,
    step: TrainStep,
    batch: object,
    *,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    exactness: Exactness = "reduced",
    progress: Callable[[str], None] | None = None,
) -> FitToMemory:
    """The plan under which `step` stays below `limit` (bytes, or a text such as "2 GiB") and loses the least time.

    It adds to the step's own plan: activation checkpointing (block or selective, of all blocks or of some), updates in
    backward, activations that wait in the host's memory (CUDA); where `exactness` allows 'rounding', accumulation over
    smaller parts (with batch norms, which then see smaller batches: 'reduced') and cross-entropy in chunks
    (`loss = "chunked"`); where it allows 'reduced', bf16 and Adam's moments in 8 bits (with torchao). The rest of the
    arguments: as for `forecast`.

    `step` stays as it is, bit for bit. To continue under the plan that was found: `step = step.with_plan(found.plan)`.

    Raises MachineError, with the least that is possible, where no combination fits; UsageError where the weights and
    the optimizer's state alone are more than the limit.
    """
    limit_bytes = as_bytes(limit, "limit")
    training = Training.of(step, batch)
    samples = training.samples_wanted(batch_size)
    as_exactness(exactness)
    tell = progress or tell_terminal
    target = find_target(device, step.model)
    problem = _Problem(training, target, samples, limit_bytes, tell)
    given = problem.forecast({})
    kinds = measures_of(training, target, problem.samples, exactness)
    _check_limit(limit_bytes, given, lower_state=any("optimizer_state" in kind[0] for kind in kinds))
    if given.peak_bytes <= limit_bytes:
        as_given = Considered(
            choices={}, exactness="bit-identical", peak_bytes=given.peak_bytes, fits=True, predicted_ratio=1.0
        )
        return FitToMemory(
            plan=training.plan,
            forecast=given,
            limit_bytes=limit_bytes,
            considered=(as_given,),
            timed_by="nothing: it fits",
        )
    problem.keep_what_runs(kinds)
    problem.refuse_the_impossible()
    problem.find_ratios()
    best = problem.run_against_each_other(problem.cheapest_that_fit())
    chosen = training.plan
    for name, value in best.items():
        chosen = chosen.with_choice(name, value, f"to stay below {format_bytes(limit_bytes)}")
    return FitToMemory(
        plan=chosen,
        forecast=problem.forecast(best),
        limit_bytes=limit_bytes,
        considered=tuple(problem.considered.values()),
        timed_by=problem.timed_by,
        left_out=(*left_out(training, target, exactness), *problem.unknown),
    )


class _Problem:
    def __init__(
        self, training: Training, target: Target, samples: int, limit_bytes: int, tell: Callable[[str], None]
    ) -> None:
        self.training, self.target, self.samples, self.tell = training, target, samples, tell
        self.limit_bytes = limit_bytes
        self.considered: dict[Key, Considered] = {}
        self.timed_by = ""
        self.unknown: list[str] = []
        self._forecasts: dict[Key, MemoryForecast] = {}
        self._kinds: list[list[Choices]] = []
        self._ratios: dict[Key, float] = {}
        self._mixes_samples = bool(batch_coupled_layers(training.model))

    def forecast(self, choices: Choices) -> MemoryForecast:
        key = key_of(choices)
        if key not in self._forecasts:
            self.tell(f"forecasting {label_of(choices)}")
            self._forecasts[key] = forecast_training(self._with(choices), self.target, self.samples)
        return self._forecasts[key]

    def _with(self, choices: Choices) -> Training:
        plan = self.training.plan
        for name, value in choices.items():
            plan = plan.with_choice(name, value, "tried")
        return self.training.under(plan)

    def _runs(self, choices: Choices) -> bool:
        """Does the model run with that measure? Batch norm fails on a part of one sample, a cache under recomputation.

        Where the loss needs its scores whole, `loss` has no effect.
        """
        whole = {name: value for name, value in choices.items() if name != "checkpointed_blocks"}
        made = self._forecast_or_none(whole)
        if made is None:
            return False
        if "loss" in choices and made.not_in_force:
            self.unknown.append(f"loss chunked: {made.not_in_force[0][1]}")
            return False
        return True

    def _forecast_or_none(self, choices: Choices) -> MemoryForecast | None:
        try:
            return self.forecast(choices)
        except Exception as error:  # the step as given ran: it is this measure
            self.tell(f"left out {label_of(choices)}: {type(error).__name__}")
            return None

    def keep_what_runs(self, kinds: list[list[Choices]]) -> None:
        """Only these are considered."""
        self._kinds = [[one for one in kind if self._runs(one)] for kind in kinds]

    def refuse_the_impossible(self) -> None:
        """Check first whether the strongest measures together are enough: timing them all may take long."""
        seen: list[MemoryForecast] = []
        for choices in strongest(self._kinds, self.training.plan):
            made = self._forecast_or_none(choices)
            if made is not None:
                seen.append(made)
                if made.peak_bytes <= self.limit_bytes:
                    return
        if seen:  # where none of them runs, some with fewer measures may
            self._refuse(min(seen, key=lambda one: one.peak_bytes))

    # time

    def find_ratios(self) -> None:
        """The time of each measure alone over the time without any."""
        alone = [choices for kind in self._kinds for choices in kind]
        size = self._size_to_time()
        if size is None:
            self.timed_by = "operations counted in a fake run"
            base = self._operations({})
            self._ratios = {key_of(one): self._operations(one) / base for one in alone}
            away: Choices = {"activation_offload": True}
            if away in alone:
                self._ratios[key_of(away)] = self._transfer_ratio(away, base)
            return
        self.timed_by = f"real steps of {size} samples"
        ends = [one for one in alone if "checkpointed_blocks" not in one]
        seconds = self._interleaved([{}, *ends], size)
        self._ratios = {key_of(one): took / seconds[0] for one, took in zip(ends, seconds[1:], strict=True)}
        blocks = len(repeated_blocks(self.training.model))
        for one in alone:  # the cost of checkpointing some of the blocks is in proportion to their number
            count = one.get("checkpointed_blocks")
            if isinstance(count, int):
                whole = self._ratios[key_of({"activation_checkpointing": one["activation_checkpointing"]})]
                self._ratios[key_of(one)] = 1 + (whole - 1) * count / blocks

    def _operations(self, choices: Choices) -> float:
        self.tell(f"counting operations of {label_of(choices)}")
        return count_operations(self._with(choices))

    def _transfer_ratio(self, away: Choices, operations: float) -> float:
        """Infinite where it is not known: such a combination is considered last."""
        moved = self.forecast(away).offloaded_bytes
        operations *= self.samples / self.training.samples
        ratio, how = transfer_time(self.target, self.training.plan, moved, operations)
        if ratio is None:
            self.unknown.append(f"the time of activation_offload is {how}; it is taken where nothing else fits")
            return math.inf
        self.timed_by += f"; {how}"
        return ratio

    def _size_to_time(self) -> int | None:
        """As many samples as really run here; None where the target is not here."""
        if self.target.name != find_target(None, self.training.model).name:
            return None
        size = min(self.samples, TIMING_SAMPLES)
        while size >= 1:
            self.tell(f"trying whether {size} samples run here")
            if self._seconds({}, size, timed_seconds=0.0) is not None:
                return size
            size //= 2
        return None

    def _interleaved(self, all_choices: list[Choices], size: int) -> list[float]:
        """Seconds of a step of each, interleaved in rounds: the quickest round, as disturbances only add to a time."""
        taken: list[list[float]] = [[] for _ in all_choices]
        for number in range(ROUNDS):
            for index, choices in enumerate(all_choices):
                self.tell(f"timing {label_of(choices)}, round {number + 1} of {ROUNDS}")
                seconds = self._seconds(choices, size, timed_seconds=TIMED_SECONDS)
                taken[index].append(seconds if seconds is not None else float("inf"))
        return [min(one) for one in taken]

    def _seconds(self, choices: Choices, size: int, *, timed_seconds: float) -> float | None:
        """Median of real steps after a first; None where they do not fit. The user's state is restored."""
        parts = choices.get("micro_batches")
        if isinstance(parts, int):
            size = max(size, parts)
        tried = self._with(choices)
        tried = tried.under(for_a_try(tried.plan))
        batch = repeat_batch(tried.batch, size)
        seconds: list[float] = []
        with tried.on_same_memory() as own, contextlib.closing(own.make_step()) as step:
            try:
                while len(seconds) < 1 + TIMED_STEPS or sum(seconds[1:]) < timed_seconds:
                    began = time.perf_counter()
                    step(batch)
                    if own.device_type == "cuda":
                        torch.cuda.synchronize(self.target.name)
                    seconds.append(time.perf_counter() - began)
            except Exception as error:
                if not (choices or is_out_of_memory(error) or isinstance(error, MachineError)):
                    raise
                return None
        return statistics.median(seconds[1:])

    # memory

    def _ranked(self) -> list[tuple[float, Choices]]:
        """Every combination of one or no measure of each kind, the fastest predicted first."""
        ranked = []
        for parts in itertools.product(*([{}, *kind] for kind in self._kinds)):
            choices: Choices = {name: value for part in parts for name, value in part.items()}
            if not choices or contradict(choices, self.training.plan):
                continue
            ratio = 1.0
            for part in parts:
                ratio *= self._ratios[key_of(part)] if part else 1.0
            ranked.append((ratio, choices))
        return sorted(ranked, key=lambda pair: pair[0])

    def cheapest_that_fit(self) -> list[Choices]:
        fitting: list[Choices] = []
        least: MemoryForecast | None = None
        first, looked = None, 0
        for ratio, choices in self._ranked()[:MOST_FORECASTS]:
            made = self._forecast_or_none(choices)
            if made is None:
                continue
            fits = made.peak_bytes <= self.limit_bytes
            kinds = frozenset(choices)
            self.considered[key_of(choices)] = Considered(
                choices=choices,
                exactness=exactness_of(choices, mixes_samples=self._mixes_samples),
                peak_bytes=made.peak_bytes,
                fits=fits,
                predicted_ratio=ratio if math.isfinite(ratio) else None,
            )
            least = made if least is None or made.peak_bytes < least.peak_bytes else least
            if fits and sum(frozenset(one) == kinds for one in fitting) < FINALISTS_OF_A_KIND:
                fitting.append(choices)
                first = ratio if first is None else first
            looked += first is not None
            if len(fitting) == FINALISTS or looked == FORECASTS_AFTER_THE_FIRST:
                break
            if first is not None and ratio > PREDICTION_MISS * first:
                break
        if not fitting:
            self._refuse(least)
        return fitting

    def _refuse(self, least: MemoryForecast | None) -> NoReturn:
        lowest = f"{format_bytes(least.peak_bytes)} is the least" if least else "no measure applies to this model"
        raise MachineError(
            f"no measures bring a step of {self.samples} samples below {format_bytes(self.limit_bytes)}",
            limit=lowest,
            remedy="use a smaller batch, a smaller model or an optimizer with less state",
        )

    def run_against_each_other(self, fitting: list[Choices]) -> Choices:
        size = self._size_to_time() if self.timed_by.startswith("real") and len(fitting) > 1 else None
        if size is None:
            return fitting[0]
        seconds = self._interleaved(fitting, size)
        for choices, took in zip(fitting, seconds, strict=True):
            key = key_of(choices)
            self.considered[key] = replace(self.considered[key], step_seconds=took)
        return fitting[seconds.index(min(seconds))]


def _check_limit(limit_bytes: int, given: MemoryForecast, *, lower_state: bool) -> None:
    """`lower_state`: may the optimizer's state become smaller?"""
    fixed = given.categories["weights"] + (0 if lower_state else given.categories["optimizer"])
    if fixed > limit_bytes:
        what = "the weights" if lower_state else "weights and the optimizer's state"
        raise UsageError(
            f"the limit is {format_bytes(limit_bytes)}",
            limit=f"{what} alone are {format_bytes(fixed)}",
            remedy="raise the limit, or use a smaller model, or an optimizer with less state (SGD, Adafactor)",
        )
