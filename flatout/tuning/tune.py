"""`flatout.tune`: find the fastest honest way to run a script, or a training step of your own loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from flatout.arguments import as_budget_seconds, as_bytes, as_exactness, as_whole_number, wrong
from flatout.errors import UsageError
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.plan_choices import Exactness
from flatout.script.entry import Target
from flatout.script.work_folder import require_linux
from flatout.train.step import TrainStep
from flatout.tuning.script_tuning import TuneRequest, TuneResult, tune_script
from flatout.tuning.step_tuning import StepTuning, tune_step


@overload
def tune(
    subject: TrainStep,
    batches: Iterable[Any],
    *,
    exactness: Exactness = ...,
    budget_seconds: float = ...,
    steps: int | None = ...,
    progress: Callable[[str], None] | None = ...,
) -> StepTuning: ...


@overload
def tune(
    subject: str | os.PathLike[str],
    *,
    arguments: Sequence[str] = ...,
    exactness: Exactness = ...,
    budget_seconds: float = ...,
    steps: int | None = ...,
    fit: int | str | None = ...,
    progress: Callable[[str], None] | None = ...,
) -> TuneResult: ...


def tune(
    subject: Any,
    batches: Iterable[Any] | None = None,
    *,
    arguments: Sequence[str] = (),
    exactness: Exactness = "reduced",
    budget_seconds: float = 300.0,
    steps: int | None = None,
    fit: int | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepTuning | TuneResult:
    """Try what may make training faster, keep what is faster and right, and return a plan with the evidence.

    subject: a TrainStep, with `batches` as it takes them; or the path of a script, with its `arguments`. exactness:
    what may be tried: "bit-identical", "rounding" (another order of summation), "reduced" (fewer bits). budget_seconds:
    for all of it, the proof included. steps: how many the real training has, so that what does not pay off in so many
    is left out; None: unknown. fit: what the tensors of a script's step may take at the most, in bytes or as "12 GiB";
    whether the plan is within it says `state.fit.holds` of the result. progress: called with a line.

    A step is tried on copies of its model, optimizer and loss, without its schedule: they stay as they are, and so do
    the generators of random numbers. Of `batches` the first 64 are read (or 256 MiB of them), and trained on again and
    again, so that loading is not part of it. A script runs in trials that change none of its files. What earlier tunes
    measured on this machine decides what is tried first, and this one adds to it (not with FLATOUT_NO_HISTORY=1).

    Returns a StepTuning or a TuneResult, both with `plan`, `proof` and the trials. Raises UsageError for what cannot be
    tuned, and what the step or the script raises by itself.
    """
    as_exactness(exactness)
    as_budget_seconds(budget_seconds)
    if steps is not None:
        as_whole_number(steps, "steps")
    say = progress or (lambda text: None)
    if isinstance(subject, TrainStep):
        if batches is None:
            raise UsageError("batches is None", limit="steps are timed on them", remedy="flatout.tune(step, batches)")
        if fit is not None:
            raise wrong("fit", fit, "it is for a script", "for a step of your own: flatout.fit_to_memory")
        if arguments:
            raise wrong("arguments", arguments, "they are a script's", "tune a step without them")
        return tune_step(
            subject, batches, exactness=exactness, budget_seconds=budget_seconds, steps=steps, progress=say
        )
    if not isinstance(subject, str | os.PathLike):
        raise wrong("subject", subject, "it is a TrainStep or the path of a script", "for a model: tune_inference")
    if batches is not None:
        raise wrong("batches", batches, "they are a TrainStep's: a script has its own", "tune a script without them")
    if isinstance(arguments, str):
        raise wrong("arguments", arguments, "it is a list of words", 'for example ["--lr", "0.1"]')
    target = Target(path=os.fspath(subject), arguments=tuple(arguments))
    request = TuneRequest(
        target=target,
        budget_seconds=budget_seconds,
        exactness=exactness,
        total_steps=steps,
        fit_bytes=None if fit is None else as_bytes(fit, "fit"),
    )
    require_linux()
    target.check()
    return tune_script(request, machine_with_ceilings(say), say)
