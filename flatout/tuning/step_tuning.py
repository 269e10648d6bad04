"""Tune a TrainStep: the search, the proof and the last comparison of `flatout tune`, on copies in this process.

found = tune_step(step, train_batches, exactness="reduced", budget_seconds=60.0, steps=None, progress=print)
step = TrainStep(model, optimizer, loss_fn, found.plan)

Each trial trains copies of its model, optimizer and loss in this process, on kept batches.

    trials = StepTrials(step, batches, folder)
    with trials.trial() as trial:
        trial.start()
        trial.window([choice], settle=2, steps=20)

In each window a step is built with the plan under test, as the user will build it, and closed at the end: between
windows nothing is on, so two trials can alternate. The random generators start from the same state in every trial, and
each trial's state is restored before it continues. The learning rate's schedule is left out: trials run past its end.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.data.given_orders import samplers_in
from flatout.data.nested import map_tensors, tensors_in
from flatout.errors import TrialError, UsageError
from flatout.generators import generator_states, generators_kept, seed_generators, set_generators
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.levers.low_bit import copied_codes
from flatout.levers.observed import Observed, StepWork
from flatout.levers.subject import Subject
from flatout.machine.process_memory import minor_faults, peak_resident_bytes, resident_bytes
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.parameters import copy_own_attributes
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.replaced import overlaid
from flatout.script.describe import observe
from flatout.script.device_calls import device_name, device_of
from flatout.script.numerics import NumericsAnswer, NumericsRecorder, NumericsRequest
from flatout.script.spans import StepRow
from flatout.script.step_memory import follow_memory
from flatout.script.step_work import follow_step
from flatout.script.trial.answers import PEAK_STEPS, Peak, TrialEnded, Window, most_of
from flatout.script.trial.commands import raise_if_off
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.temporary_folders import temporary_folder
from flatout.torch_private.attributes import COMPILED_CALL, ORIGINAL_MODULE
from flatout.train.loss import LossFn
from flatout.train.loss_variables import with_own_variables
from flatout.train.placement import join_recurrent_weights
from flatout.train.step import TrainStep
from flatout.tuning.outcome import plan_of, search_and_prove
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.results import StepSubject, Tuned

MOST_BATCHES = 64
BATCH_BYTES = 256 << 20
"""Of the batches that are kept: reading stops there, after at least two."""
KEEPS = ("micro_batches", "nonfinite", "out_of_memory")
"""Choices of the step's own plan that its trials keep."""


def tune_step(
    step: TrainStep,
    batches: Iterable[object],
    *,
    exactness: Exactness,
    budget_seconds: float,
    steps: int | None,
    progress: Callable[[str], None],
) -> Tuned:
    """See `flatout.tune`."""
    deadline = Deadline(budget_seconds)
    _check(step)
    levers = [lever for lever in LEVERS if "step" in lever.declared.scopes and lever.switch != "process"]
    with generators_kept(), warnings.catch_warnings(), temporary_folder("tune") as folder:
        kept = _read(batches)
        warnings.simplefilter("ignore")  # about a loss that is not finite, under a plan that is rejected for it
        trials = StepTrials(step=step, batches=kept, shared_folder=folder)
        _check_runs(trials)
        machine = machine_with_ceilings(progress)
        limits = SearchLimits(deadline=deadline, exactness=exactness, total_steps=steps)
        found = search_and_prove(trials, machine, levers, limits, progress)
    return Tuned(
        plan=_plan(step, plan_of(found, machine)),
        subject=StepSubject(model=type(step.model).__name__, batches=len(kept)),
        machine=machine,
        state=found.state,
        proof=found.proof,
        final=found.final,
        budget_seconds=budget_seconds,
        seconds=deadline.elapsed_seconds,
        warnings=(*found.warnings, *filter(None, [deadline.explanation])),
    )


def _check(step: TrainStep) -> None:
    own = [name for name in step.plan.part_for("step").choices() if name not in KEEPS]
    if own:
        names = ", ".join(repr(name) for name in own)
        raise UsageError(
            f"the step's plan already sets {names}",
            limit="those are what a tune tries",
            remedy=f"tune a step made with plan.without({names})",
        )
    if step.together is not None:
        raise UsageError(
            f"the model is trained by {step.together.size()} ranks",
            limit="each rank would search on its own, while every step waits for the others",
            remedy="tune the model in one process, and use the plan on all ranks",
        )
    if getattr(step.model, COMPILED_CALL) is not None or hasattr(step.model, ORIGINAL_MODULE):
        raise UsageError(
            "the model is already compiled",
            limit="torch.compile is one of the things a tune tries",
            remedy="build the step with the model before torch.compile",
        )


def _read(batches: Iterable[object]) -> list[object]:
    """Copies of the first batches; a source with a state_dict, and a loader's own generators, are restored to where
    they were."""
    if isinstance(batches, torch.Tensor | tuple | Mapping | str | bytes) or not hasattr(batches, "__iter__"):
        raise UsageError(
            f"batches is {type(batches).__name__}",
            limit="it is an iterable of batches as the step takes them",
            remedy="for a single one: [batch]",
        )
    kept: list[object] = []
    size = 0
    with contextlib.ExitStack() as restoring:
        for one in (*samplers_in(batches), *samplers_in(getattr(batches, "batch_sampler", None))):
            if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                restoring.callback(generator.set_state, generator.get_state())
        if hasattr(batches, "state_dict"):
            restoring.callback(batches.load_state_dict, batches.state_dict())  # type: ignore[attr-defined]
        for batch in itertools.islice(batches, MOST_BATCHES):
            kept.append(map_tensors(lambda tensor: tensor.detach().clone(), batch))
            size += sum(tensor.nbytes for _, tensor in tensors_in(batch))
            if size > BATCH_BYTES and len(kept) > 1:
                break
    if not kept:
        raise UsageError("there are no batches", limit="steps are timed on them", remedy="give at least one")
    return kept


def _check_runs(trials: StepTrials) -> None:
    """Raise an error of the step itself as it is, not as a trial's."""
    try:
        with trials.trial() as trial:
            trial.start()
    except TrialEnded as end:
        cause = end.__cause__ or end
        raise cause from None


def _plan(step: TrainStep, found: Plan) -> Plan:
    """The plan, with what the step's own plan says."""
    own = step.plan.choices()
    reasons = {name: step.plan.reasons[name] for name in own if name in step.plan.reasons}
    return replace(found, **own, reasons={**reasons, **found.reasons})


# the trials

Copies = tuple[nn.Module, Optimizer, LossFn]

SEED = 20_261_122
FIRST_STEPS = 2
"""Steps that pass before a trial takes commands: the optimizer creates its state in the first."""
LONG_FIRST_SECONDS = 1.0
"""First steps that take longer are made once, and later trials start from a copy of what they led to."""


class Begun(NamedTuple):
    """A copy after the first steps, and the generators."""

    copies: Copies
    generators: Mapping[str, object]
    seconds: float
    """What that took."""


@dataclass(frozen=True, kw_only=True)
class StepTrials:
    """A step, and the batches that its trials train on, repeatedly."""

    step: TrainStep
    batches: Sequence[object]
    shared_folder: Path
    name: str = "the step"
    kind: str = "step"
    afresh: str = "on new copies"
    starts_overlap: bool = False
    """Copies are made one at a time."""
    begun: list[Begun] = field(default_factory=list, repr=False)
    """What the plain step is after its first steps, once a trial has made them and they took long: later trials start
    from there."""

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> StepTrial:
        return StepTrial(self, choices)

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        return 0.0 if choices or not self.begun else self.begun[0].seconds

    def from_the_start(self) -> StepTrials:
        return self  # a trial that fails does so without the others as well

    def in_new_processes(self) -> StepTrials:
        return self  # there is only this process


class WatchedStep:
    """What NumericsRecorder and `observe` need, for a step whose parts are known."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.step_kind = "optimizer"
        self.at_backward: list[Callable[[tuple[Tensor, ...]], None]] = []
        self.before_optimizer: list[Callable[[Optimizer], None]] = []
        self.inside_optimizer = False
        self.saw_autocast = self.saw_scaler = self.saw_compile = self.saw_create_graph = False
        self.gradients_zeroed: bool | None = None


class StepTrial:
    """One copy. Exceptions of the step are raised as TrialEnded, which names them."""

    expected_step_seconds: float | None = None
    first_steps_seconds = 0.0
    interruptible = False
    deadline: Deadline | None = None
    waiting_seconds = 0.0
    """Everything it needs is in memory already."""

    def __init__(self, trials: StepTrials, choices: Sequence[Choice]) -> None:
        self._trials, self._from_start = trials, list(choices)
        self._copies: Copies | None = None
        self._generators: Mapping[str, object] = {}
        self._steps = 0
        self._at = self._window_at = 0
        """The next batch, and the first of the latest windows."""
        self._windows: set[tuple[object, ...]] = set()
        """Those that have begun there."""
        self.isolation: dict[str, object] = {}
        self.startup_seconds: float | None = None
        self.start_seconds: float | None = None

    def __enter__(self) -> StepTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._copies is not None

    def spawn(self) -> None:
        """Nothing can be done in advance."""

    def start(self, timeout_seconds: float = 0.0) -> None:
        began = time.perf_counter()
        step, begun = self._trials.step, None if self._from_start else next(iter(self._trials.begun), None)
        copied = (step.model, step.optimizer, step.loss_fn) if begun is None else begun.copies
        self._copies = model, optimizer, _ = copies_of(*copied)
        self._subject = Subject()
        self._subject.modules.add(model)
        self._subject.optimizers.add(optimizer)
        self._watch, self._device = WatchedStep(self._subject), device_of(self._subject)
        if begun is None:
            self._make_first_steps(began)
        else:
            self._generators, self._steps = begun.generators, FIRST_STEPS
            self._at = FIRST_STEPS
        self.startup_seconds = self.start_seconds = time.perf_counter() - began

    def _make_first_steps(self, started_at: float) -> None:
        began = time.perf_counter()
        with generators_kept():
            seed_generators(SEED)
            self._generators = generator_states()
        with self._running(()) as take:
            for _ in range(FIRST_STEPS):
                take()
        before = time.perf_counter()
        if self._from_start or self._device.kind != "cpu" or before - began < LONG_FIRST_SECONDS:
            return  # a GPU rarely has room for one more copy
        with contextlib.suppress(TrialError):  # too little memory for one more copy: every trial makes these steps
            copies = copies_of(*self._copies_or_fail())
            self._trials.begun[:] = [Begun(copies, self._generators, before - started_at)]

    def close(self) -> None:
        self._copies = None

    # for the search

    def describe(self) -> Observed:
        return self._observed(())

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        self._share_batches(choices, settle, steps)
        before = time.perf_counter()
        with self._running(choices) as take:
            self._device.synchronize()
            applied = time.perf_counter() - before
            marks = [self._device.mark()]
            for _ in range(settle + steps):
                take()
                marks.append(self._device.mark())
            self._device.synchronize()
            seconds = [self._device.elapsed_seconds(a, b) for a, b in itertools.pairwise(marks)]
        return Window(
            seconds=tuple(seconds[settle:]),
            settle_seconds=tuple(seconds[:settle]),
            apply_seconds=applied,
            resident_bytes=resident_bytes(),
            rolled_back=self._rolled_back,
        )

    def breakdown(self, choices: Sequence[Choice], *, steps: int) -> Observed:
        rows, parts = [], dict.fromkeys(("forward", "optimizer"), 0.0)

        @contextlib.contextmanager
        def timed(kind: str) -> Iterator[None]:
            self._device.synchronize()
            began = time.perf_counter()
            try:
                yield
            finally:
                self._device.synchronize()
                parts[kind] += time.perf_counter() - began

        with self._running(choices, timed) as take:
            for _ in range(steps):
                parts.update(forward=0.0, optimizer=0.0)
                faults, began = minor_faults(), time.perf_counter()
                take()
                self._device.synchronize()
                seconds, faults = time.perf_counter() - began, minor_faults() - faults
                rest = {"backward": seconds - sum(parts.values())}
                rows.append(StepRow(seconds, {**parts, **rest}, page_faults=faults))
        return self._observed(rows)

    def work(self) -> StepWork:
        with self._running(()) as take:
            finish = follow_step()
            try:
                take()
            finally:
                found = finish()
        return found

    def peak(self, choices: Sequence[Choice], *, steps: int = PEAK_STEPS) -> Peak:
        peaks = []
        with self._running(choices) as take:
            take()
            self._device.reset_peak()
            for _ in range(steps):
                finish = follow_memory(self._subject, device_name(self._subject))
                try:
                    take()
                finally:  # it follows every operation until then
                    sample = finish(self._steps)
                peaks.append(sample.peak_bytes if sample is not None else None)
            held = most_of(peaks) if self._device.kind == "cpu" else self._device.memory_peak_bytes()
        return Peak(peak_bytes=held, resident_bytes=peak_resident_bytes(), incidents=self._rolled_back)

    def numerics(self, choices: Sequence[Choice], request: NumericsRequest) -> NumericsAnswer:
        with self._running(choices, watched=True) as take:
            recorder = NumericsRecorder(self._watch, request)
            try:
                while recorder.steps < request.steps:
                    loss = take()
                    for listener in self._watch.at_backward:
                        listener((loss,))
                    recorder.step_ended()
            finally:
                found = recorder.finish()
        off = self._rolled_back
        raise_if_off({one: off[one.lever.name] for one in choices if one.lever.name in off})
        return {**found, "ended": False, "unseeded": [], "peak_resident_bytes": None}

    # inside

    def _share_batches(self, choices: Sequence[Choice], settle: int, steps: int) -> None:
        """A window begins with the batch that the one before began with, unless that had the same choices: both windows
        of a turn are of the same batches, as the lengths of batches may differ."""
        window = (*choices, settle, steps)
        if window in self._windows or not self._windows:
            self._windows, self._window_at = {window}, self._at
        else:
            self._windows.add(window)
            self._at = self._window_at

    def _copies_or_fail(self) -> Copies:
        assert self._copies is not None, "start it first"
        return self._copies

    @contextlib.contextmanager
    def _running(
        self,
        choices: Sequence[Choice],
        timed: Callable[[str], contextlib.ContextDecorator] | None = None,
        *,
        watched: bool = False,
    ) -> Iterator[Callable[[], Tensor]]:
        """A function that takes one step under these choices. The step's exceptions are raised as TrialEnded.

        timed: wraps the loss and the optimizer's step. watched: `before_optimizer` is called, before any lever's hook.
        """
        model, optimizer, loss_fn = self._copies_or_fail()
        steps = 0
        with generators_kept(), contextlib.ExitStack() as closing:
            set_generators(self._generators)
            try:
                if watched:
                    closing.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
                original = self._trials.step
                chosen = {choice.field: choice.value for choice in (*self._from_start, *choices)}
                plan = replace(original.plan, **chosen)
                step = original.for_copies(plan, model, optimizer, timed("forward")(loss_fn) if timed else loss_fn)
                closing.callback(step.close)
                if timed is not None:
                    closing.enter_context(overlaid(optimizer, "step", timed("optimizer")(optimizer.step)))

                def take() -> Tensor:
                    if self.interruptible and self.deadline is not None and self.deadline.grace_seconds_left <= 0:
                        raise BudgetSpent(self.deadline)
                    batch = self._trials.batches[self._at % len(self._trials.batches)]
                    self._at += 1
                    loss: Tensor = step(batch)
                    nonlocal steps
                    steps += 1
                    return loss

                yield take
                step.finish()
                names = {choice.label: choice.lever.name for choice in choices}
                self._rolled_back = {names.get(label, label): why for label, why in step.rolled_back}
            except BudgetSpent:
                raise
            except Exception as error:
                raise TrialEnded(1, "".join(traceback.format_exception(error)), self._steps + steps) from error
            finally:
                self._steps += steps
                self._generators = generator_states()

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        for listener in self._watch.before_optimizer:
            listener(optimizer)

    def _observed(self, rows: Sequence[StepRow]) -> Observed:
        seen = observe(self._watch, threads_at_start=None, rows=rows, loaders=False)
        # What the site of its update says is of the loop here, which is not the user's.
        update_obstacle = "it saves memory, no time worth a trial here: flatout.fit_to_memory tries it"
        return replace(seen, names_device=True, update_obstacle=update_obstacle)


def copies_of(model: nn.Module, optimizer: Optimizer, loss_fn: LossFn) -> Copies:
    """Copies of model, optimizer and loss that refer to one another; UsageError where they cannot be copied."""
    try:
        memo: dict[int, object] = {**copied_codes(optimizer)}
        copies = copy.deepcopy((model, optimizer, loss_fn), memo)
        copy_own_attributes(optimizer, copies[1], memo)
    except Exception as error:
        if is_out_of_memory(error):
            remedy = "tune a smaller model or batch, or on a device with more memory"
            raise TrialError("there is no memory for copies of the model and its optimizer", remedy=remedy) from error
        raise UsageError(
            f"the model, its optimizer or the loss cannot be copied: {type(error).__name__}: {error}",
            limit="trials run on copies, so that yours stay unchanged",
            remedy="keep what copy.deepcopy cannot copy out of the modules",
        ) from error
    model, optimizer, loss_fn = copies
    join_recurrent_weights(model)
    return model, optimizer, with_own_variables(loss_fn)
