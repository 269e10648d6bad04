"""`flatout.tune`: find the fastest honest way to run a script, or a training step of your own loop.

found = flatout.tune("train.py", seconds=60)
found.plan, found.speedup, found.trials
print(found.summary())
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from flatout import environment
from flatout.application.run import as_target
from flatout.arguments import as_bytes, as_exactness, as_seconds, as_whole_number, wrong
from flatout.errors import UsageError
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.notebook_tables import ShownAsText
from flatout.parallel.launching.rank_count import count_ranks
from flatout.plan_choices import Exactness
from flatout.report.html.verdicts import verdict_html
from flatout.report.tune_text import tune_payload, tune_text
from flatout.script.replicas.settings import Settings
from flatout.script.replicas.starting import device_count
from flatout.script.trial.process import in_ranks
from flatout.script.work_folder import require_linux
from flatout.search.deadline import Deadline
from flatout.search.search import Progress
from flatout.train.step import TrainStep
from flatout.tuning.devices.choosing import DevicesAsked
from flatout.tuning.results import Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script
from flatout.tuning.step_tuning import tune_step


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(ShownAsText, Tuned):
    """What `flatout.tune` found: the plan, its speedup, what was tried, and the proof that the numbers are right."""

    def summary(self) -> str:
        """The whole result on one screen."""
        return tune_text(self)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, the choices of the plan, and what makes the result doubtful."""
        choices = ((name, str(value)) for name, value in self.plan.choices().items())
        cautions = (("caution", warning) for warning in self.warnings)
        return verdict_html("tune", tune_payload(self), (*choices, *cautions))

    def to_json(self, *, include_private: bool = False) -> dict[str, object]:
        """Everything, in values that JSON knows; the script's arguments and home directories only where they are asked
        for."""
        return tune_payload(self, include_private=include_private)


LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start a script in ranks."""


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
    devices: int | str | None = ...,
    nproc_per_node: int | str | None = ...,
    own_ranks: int | None = ...,
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
    devices: int | str | None = None,
    nproc_per_node: int | str | None = None,
    own_ranks: int | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """Try what may make training faster, keep what is faster and right, and return a plan with the evidence.

    subject: a TrainStep, with `batches` as it takes them; or the path of a script, with its `arguments`. exactness:
    what may be tried: "bit-identical", "rounding" (another order of summation), "reduced" (fewer bits). seconds: for
    all of it, the proof included. steps: how many the real training has, so that what does not pay off in so many is
    left out; None: unknown. fit: what the tensors of a script's step may take at most, in bytes or as "12 GiB";
    `fits` of the result says whether the plan is within it. devices: compare training a script on up to so many GPUs of
    this machine, or in so many processes on its CPU, with one; "auto": all GPUs. nproc_per_node: the script trains in
    so many ranks, and is started as by torchrun; "auto": a rank for each GPU. own_ranks: it trains in so many processes
    that it starts itself, as by mp.spawn. progress: called with a line of text.

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
    way = one_of_ways({"devices": devices, "nproc_per_node": nproc_per_node, "own_ranks": own_ranks})
    if isinstance(subject, TrainStep):
        if batches is None:
            raise UsageError("batches is None", limit="steps are timed on them", remedy="flatout.tune(step, batches)")
        if fit is not None:
            raise wrong("fit", fit, "it is for a script", "for a step of your own: flatout.fit_to_memory")
        if arguments:
            raise wrong("arguments", arguments, "they are a script's", "tune a step without them")
        if way is not None:
            raise wrong(*way, "it is for a script", "for a step of your own: plan.parallel")
        found = tune_step(subject, batches, exactness=exactness, budget_seconds=seconds, steps=steps, progress=say)
        return TuneResult(**vars(found))
    if not isinstance(subject, str | os.PathLike):
        raise wrong("subject", subject, "it is a TrainStep or the path of a script", "for a model: tune_inference")
    if batches is not None:
        raise wrong("batches", batches, "they are a TrainStep's: a script has its own", "tune a script without them")
    target = as_target(subject, arguments)
    ranks = None if way is None or devices is not None else ranks_of_script(way[1], way[0])
    request = TuneRequest(
        target=target,
        budget_seconds=seconds,
        exactness=exactness,
        total_steps=steps,
        fit_bytes=None if fit is None else as_bytes(fit, "fit"),
        devices=None if devices is None else devices_asked(str(devices), exactness=exactness, fits=fit is not None),
        ranks=ranks,
        starts_ranks=own_ranks is not None,
    )
    require_linux()
    target.check()
    return tune_requested(request, say)


def devices_asked(
    devices: str,
    *,
    exactness: Exactness = "reduced",
    fits: bool = False,
    on_cpu: bool = False,
    settings: Settings | None = None,
) -> DevicesAsked:
    """For '2' or 'auto'. UsageError where there are not so many, and where something else that is asked for excludes
    it."""
    if exactness == "bit-identical":
        raise UsageError(
            f"devices is {devices}, and exactness bit-identical",
            limit="several devices add gradients up in another order",
            remedy="allow rounding, or tune on one device",
        )
    if fits:
        raise UsageError(
            f"devices is {devices}, and a memory limit (fit)",
            limit="the memory of a step is measured on one device",
            remedy="tune with one of the two",
        )
    if environment.rank() is not None:
        raise in_ranks()
    most, visible = device_count(devices, on_cpu=on_cpu)
    return DevicesAsked(most=most, settings=replace(settings or Settings(), visible=visible))


def one_of_ways(asked: Mapping[str, int | str | None]) -> tuple[str, str] | None:
    """Of the ways to train in several processes, the one that is asked for: what the user calls it, and of how many.
    None: in one process. UsageError for two of them."""
    given = [(name, str(value)) for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise UsageError(
            " and ".join(name for name, _ in given),
            limit="a script is started in ranks, or starts them itself, or trains on one device",
            remedy="use one of them",
        )
    return given[0] if given else None


def ranks_of_script(asked: str, option: str = "--nproc-per-node") -> int:
    """For '2' or 'auto'; option: what the user calls it. UsageError for anything else, where there are not so many
    GPUs, and in a process that is a rank itself."""
    if environment.rank() is not None:
        raise in_ranks()
    return count_ranks(asked, option=option).ranks


def tune_requested(request: TuneRequest, progress: Progress) -> TuneResult:
    """A script, with all that can be asked for. Measuring this machine's ceilings is part of the budget."""
    launcher = request.target.module in LAUNCHERS or os.path.basename(request.target.path or "") == "torchrun"
    if launcher and not request.starts_ranks:
        raise UsageError(
            f"{request.target.name} starts ranks",
            limit="each of them takes part in a trial, so Flatout starts them",
            remedy="flatout tune --nproc-per-node 2 train.py",
        )
    deadline = Deadline(request.budget_seconds)
    with deadline.stage("measuring this machine"):
        machine = machine_with_ceilings(progress)
    return TuneResult(**vars(tune_script(request, machine, progress, deadline)))
