"""Tune a TrainStep: the search, the proof and the last comparison of `flatout tune`, on copies in this process.

found = tune_step(step, train_batches)
print(found.summary())
step = TrainStep(model, optimizer, loss_fn, found.plan)
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatout.data.nested import map_tensors, tensors_in
from flatout.errors import UsageError
from flatout.generators import generators_kept
from flatout.levers.catalogue import LEVERS
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.script.trial.answers import TrialEnded
from flatout.search.deadline import Deadline
from flatout.search.lines import budget_argument, not_tried_lines, nothing_found, ratio_text, reach_lines, trial_lines
from flatout.statistics import Comparison
from flatout.train.ranks import ranks_of
from flatout.train.step import TrainStep
from flatout.tuning.outcome import plan_of, search_and_prove
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.results import Proof, SearchState, proof_lines
from flatout.tuning.step_trial import StepTrials
from flatout.tuning.windows import Pairing
from flatout.units import format_seconds, labelled

MOST_BATCHES = 64
BATCH_BYTES = 256 << 20
"""Of the batches that are kept: so many are read, at the most, and at least two."""
KEEPS = ("micro_batches", "nonfinite", "out_of_memory")
"""Choices of the step's own plan that its trials have too."""


@dataclass(frozen=True, kw_only=True)
class StepTuning:
    """The plan, and everything that speaks for and against it."""

    plan: Plan
    """To be given to TrainStep; what the step's own plan said of batches and loading is in it too."""
    model: str
    """Its class."""
    batches: int
    """How many were read and used again and again."""
    state: SearchState
    proof: Proof | None
    final: Pairing | None
    """A copy without the plan against one with it, in turns; None where nothing was kept."""
    budget_seconds: float
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def comparison(self) -> Comparison | None:
        """How many times as fast, with the interval; None where nothing was kept."""
        return None if self.final is None or not self.state.kept else self.final.comparison

    def summary(self) -> str:
        """One screen."""
        seen = self.state.first_observed
        step = "no step timed" if seen.step_seconds is None else f"step {format_seconds(seen.step_seconds)}"
        read = f"{self.batches} batch{'es' * (self.batches != 1)}, which stay in memory: loading is not tuned"
        rows = [("model", f"{self.model} on {seen.device} · {step} · {read}")]
        rows += labelled("tried", trial_lines(self.state.trials))
        rows += labelled("not tried", not_tried_lines(self.state.not_tried))
        rows += labelled(
            "result", [self._result(), *reach_lines(self.state, budget_argument), *proof_lines(self.proof)]
        )
        rows += [("note", text) for text in self.warnings]
        return "\n".join(f"{label:<10}{text}" for label, text in rows)

    def _result(self) -> str:
        if self.comparison is None or self.final is None:
            return nothing_found(self.state, self.budget_seconds, budget_argument)
        chosen = ", ".join(f"{choice.field} = {choice.value}" for choice in self.state.kept)
        times = f"{format_seconds(self.final.baseline_seconds)} -> {format_seconds(self.final.candidate_seconds)}"
        return (
            f"{ratio_text(self.comparison)} ({times}, {self.comparison.pairs} window pairs on fresh copies): {chosen}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the plan's reasons, which are the trials'."""
        return {
            "plan": self.plan.choices(),
            "exactness": self.plan.exactness,
            "speedup": self.plan.speedup,
            "model": self.model,
            "batches": self.batches,
            "observed": self.state.first_observed.to_json(),
            "trials": [trial.to_json() for trial in self.state.trials],
            "not_tried": [entry.to_json() for entry in self.state.not_tried],
            "proof": None if self.proof is None else self.proof.to_json(),
            "final": None if self.final is None else asdict(self.final),
            "budget_seconds": self.budget_seconds,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
        }


def tune_step(
    step: TrainStep,
    batches: Iterable[Any],
    *,
    exactness: Exactness,
    budget_seconds: float,
    steps: int | None,
    progress: Callable[[str], None],
) -> StepTuning:
    """See `flatout.tune`."""
    began, deadline = time.perf_counter(), Deadline(budget_seconds)
    _check(step)
    levers = [lever for lever in LEVERS if "step" in lever.declared.scopes]
    with (
        generators_kept(),
        warnings.catch_warnings(),
        TemporaryDirectory(prefix="flatout-tune-") as folder,
    ):
        kept = _read(batches)
        warnings.simplefilter("ignore")  # of a loss that is not finite, under a plan that is given up for it
        trials = StepTrials(step=step, batches=kept, work_folder=Path(folder))
        _check_runs(trials)
        machine = machine_with_ceilings(progress)
        limits = SearchLimits(deadline=deadline, exactness=exactness, total_steps=steps)
        found = search_and_prove(trials, machine, levers, limits, progress)
    return StepTuning(
        plan=_plan(step, plan_of(found, machine)),
        model=type(step.model).__name__,
        batches=len(kept),
        state=found.state,
        proof=found.proof,
        final=found.final,
        budget_seconds=budget_seconds,
        seconds=time.perf_counter() - began,
        warnings=(*found.warnings, *filter(None, [deadline.explanation])),
    )


def _check(step: TrainStep) -> None:
    own = [name for name in step.plan.part_for("step").choices() if name not in KEEPS]
    if own:
        names = ", ".join(repr(name) for name in own)
        raise UsageError(
            f"the step's plan makes choices already: {names}",
            limit="those are what is tried",
            remedy=f"tune a step made with plan.without({names})",
        )
    if ranks_of(step.model) > 1:
        raise UsageError(
            f"the model is one of {ranks_of(step.model)} ranks of DDP",
            limit="each rank would search for itself, and wait for the others in every step",
            remedy="tune the model in one process, and give all ranks the plan",
        )
    if step.model._compiled_call_impl is not None or hasattr(step.model, "_orig_mod"):
        raise UsageError(
            "the model is compiled already",
            limit="compiling is one of the things that are tried",
            remedy="make the step with the model as it is without torch.compile",
        )


def _read(batches: Iterable[Any]) -> list[Any]:
    """Copies of the first batches; a source that can say where it stands is put back there."""
    if isinstance(batches, torch.Tensor | tuple | dict | str | bytes) or not hasattr(batches, "__iter__"):
        raise UsageError(
            f"batches is {type(batches).__name__}",
            limit="it is an iterable of batches, each as the step takes it",
            remedy="for a single one: [batch]",
        )
    where: Any = batches.state_dict() if hasattr(batches, "state_dict") else None
    kept: list[Any] = []
    size = 0
    for batch in itertools.islice(batches, MOST_BATCHES):
        kept.append(map_tensors(lambda tensor: tensor.detach().clone(), batch))
        size += sum(tensor.nbytes for _, tensor in tensors_in(batch))
        if size > BATCH_BYTES and len(kept) > 1:
            break
    if where is not None:
        batches.load_state_dict(where)  # type: ignore[attr-defined]
    if not kept:
        raise UsageError("there are no batches", limit="steps are timed on them", remedy="give at least one")
    return kept


def _check_runs(trials: StepTrials) -> None:
    """What the step raises by itself is its own error, not a trial's."""
    try:
        with trials.trial() as trial:
            trial.start()
    except TrialEnded as end:
        cause = end.__cause__ or end
        raise cause from None


def _plan(step: TrainStep, found: Plan) -> Plan:
    """With what the step's own plan says."""
    own = step.plan.choices()
    reasons = {name: step.plan.reasons[name] for name in own if name in step.plan.reasons}
    return replace(found, **own, reasons={**reasons, **found.reasons})
