"""`flatout.tune`: find the fastest honest way to run a script, or a training step of your own loop.

found = flatout.tune("train.py", seconds=60)
found.plan, found.speedup, found.trials
print(found.summary())
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import overload

from flatout.application.target import as_target
from flatout.arguments import as_bytes, as_exactness, as_seconds, as_whole_number, wrong
from flatout.errors import UsageError
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.plan_choices import Exactness
from flatout.report.html.notebook import verdict_html
from flatout.report.tune_text import tune_payload, tune_text
from flatout.script.work_folder import require_linux
from flatout.search.deadline import Deadline
from flatout.train.step import TrainStep
from flatout.tuning.results import Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script
from flatout.tuning.step_tuning import tune_step

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneResult(Tuned):
    """What `flatout.tune` found: the plan, its speedup, what was tried, and the proof that the numbers are right."""

    @classmethod
    def of(cls, found: Tuned) -> TuneResult:
        return cls(**{one.name: getattr(found, one.name) for one in fields(found)})

    def summary(self) -> str:
        """The whole result on one screen."""
        return tune_text(self)

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, and the choices of the plan."""
        rows = tuple((name, str(value)) for name, value in self.plan.choices().items())
        return verdict_html("tune", tune_payload(self), rows)

    def to_json(self, *, include_private: bool = False) -> dict[str, object]:
        """Everything, in values that JSON knows; the script's arguments and home directories only where they are asked
        for."""
        return tune_payload(self, include_private=include_private)


@overload
def tune(
    subject: TrainStep,
    batches: Iterable[object],
    *,
    exactness: Exactness = ...,
    seconds: float = ...,
    steps: int | None = ...,
    progress: Progress | None = ...,
) -> TuneResult: ...


@overload
def tune(
    subject: str | os.PathLike[str],
    *,
    arguments: Sequence[str] = ...,
    exactness: Exactness = ...,
    seconds: float = ...,
    steps: int | None = ...,
    fit: int | str | None = ...,
    progress: Progress | None = ...,
) -> TuneResult: ...


def tune(
    subject: TrainStep | str | os.PathLike[str],
    batches: Iterable[object] | None = None,
    *,
    arguments: Sequence[str] = (),
    exactness: Exactness = "reduced",
    seconds: float = 300.0,
    steps: int | None = None,
    fit: int | str | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """Try what may make training faster, keep what is faster and right, and return a plan with the evidence.

    subject: a TrainStep, with `batches` as it takes them; or the path of a script, with its `arguments`. exactness:
    what may be tried: "bit-identical", "rounding" (another order of summation), "reduced" (fewer bits). seconds: for
    all of it, the proof included. steps: how many the real training has, so that what does not pay off in so many is
    left out; None: unknown. fit: what the tensors of a script's step may take at most, in bytes or as "12 GiB";
    `fits` of the result says whether the plan is within it. progress: called with a line of text.

    A step is tried on copies of its model, optimizer and loss, without its schedule: they stay as they are, and so do
    the generators of random numbers. Of `batches` the first 64 are read (or 256 MiB of them), and trained on again and
    again, so that loading is not part of it. A script runs in trials that change none of its files. What earlier tunes
    measured on this machine decides what is tried first, and this one adds to it (not with FLATOUT_NO_HISTORY=1).

    Returns a TuneResult: `plan`, `speedup` (None where nothing helped; `reason` says why), `trials`, `proof`,
    `summary()`. Raises UsageError for what cannot be tuned, ScriptError where the script fails by itself, and what the
    step raises by itself.
    """
    as_exactness(exactness)
    as_seconds(seconds)
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
        found = tune_step(subject, batches, exactness=exactness, budget_seconds=seconds, steps=steps, progress=say)
        return TuneResult.of(found)
    if not isinstance(subject, str | os.PathLike):
        raise wrong("subject", subject, "it is a TrainStep or the path of a script", "for a model: tune_inference")
    if batches is not None:
        raise wrong("batches", batches, "they are a TrainStep's: a script has its own", "tune a script without them")
    target = as_target(subject, arguments)
    request = TuneRequest(
        target=target,
        budget_seconds=seconds,
        exactness=exactness,
        total_steps=steps,
        fit_bytes=None if fit is None else as_bytes(fit, "fit"),
    )
    require_linux()
    target.check()
    return tune_requested(request, say)


def tune_requested(request: TuneRequest, progress: Progress) -> TuneResult:
    """A script, with all that can be asked for. Measuring this machine's ceilings is part of the budget."""
    deadline = Deadline(request.budget_seconds)
    with deadline.stage("measuring this machine"):
        machine = machine_with_ceilings(progress)
    return TuneResult.of(tune_script(request, machine, progress, deadline))
