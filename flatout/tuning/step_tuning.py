"""Tune a TrainStep: the search, the proof and the last comparison of `flatout tune`, on copies in this process.

found = tune_step(step, train_batches, exactness="reduced", budget_seconds=60.0, steps=None, progress=print)
step = TrainStep(model, optimizer, loss_fn, found.plan)
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flatout.data.given_orders import samplers_in
from flatout.data.nested import map_tensors, tensors_in
from flatout.errors import UsageError
from flatout.generators import generators_kept
from flatout.levers.catalogue import LEVERS
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.script.trial.answers import TrialEnded
from flatout.search.deadline import Deadline
from flatout.torch_private.attributes import COMPILED_CALL, ORIGINAL_MODULE
from flatout.train.step import TrainStep
from flatout.tuning.outcome import plan_of, search_and_prove
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.results import StepSubject, Tuned
from flatout.tuning.step_trial import StepTrials

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
    with (
        generators_kept(),
        warnings.catch_warnings(),
        TemporaryDirectory(prefix="flatout-tune-") as folder,
    ):
        kept = _read(batches)
        warnings.simplefilter("ignore")  # about a loss that is not finite, under a plan that is rejected for it
        trials = StepTrials(step=step, batches=kept, work_folder=Path(folder))
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
