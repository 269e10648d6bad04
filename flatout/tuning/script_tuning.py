"""`flatout tune`: search, prove the result in new processes, measure it against the plain script, make a plan.

found = tune_script(request, machine, progress=print)
found.plan, found.proof, found.speedup
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flatout.errors import TrialError, UsageError
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.plan_choices import ChoiceValue, Exactness
from flatout.script.entry import Target
from flatout.script.own_files import source_digests
from flatout.script.trial.fork_server import ForkServer
from flatout.script.trial.session import load_levers
from flatout.script.trial.setup import StartedScript, TrialSetup, terminal_size
from flatout.script.work_folder import work_folder
from flatout.search.deadline import Deadline
from flatout.search.search import Progress
from flatout.tuning.devices.choosing import DEVICES_SHARE, DevicesAsked, choose_devices
from flatout.tuning.devices.found import DevicesTuned, with_devices
from flatout.tuning.fitting import peak_afresh
from flatout.tuning.outcome import Found, plan_of, search_and_prove
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.ranks.script import ScriptRanks
from flatout.tuning.results import Tuned
from flatout.tuning.trials import Trials
from flatout.tuning.whole_run import WholeRun, own_start_seconds
from flatout.units import counted


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What to tune, within which limits."""

    target: Target
    budget_seconds: float = 600.0
    exactness: Exactness = "reduced"
    total_steps: int | None = None
    fit_bytes: int | None = None
    """Most memory that the tensors of a step may take; None: no limit."""
    levers: str = "flatout.levers.catalogue:LEVERS"
    only: tuple[tuple[str, ChoiceValue], ...] | None = None
    """Restrict the search to these (plan field, value) choices, to verify a plan from elsewhere."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    """Otherwise each trial has only a loopback interface of its own."""
    stdin_file: Path | None = None
    log_folder: Path | None = None
    devices: DevicesAsked | None = None
    """Compare training on several devices too; None: on one alone."""
    ranks: int | None = None
    """In how many ranks the script trains by itself, started as by torchrun; None: it is started by python alone."""
    starts_ranks: bool = False
    """Does the script, started by python, start these ranks itself?"""
    hang_floor_seconds: float = 30.0


def tune_script(
    request: TuneRequest, machine: Machine, progress: Progress = lambda text: None, deadline: Deadline | None = None
) -> Tuned:
    """Tune one script. Changes none of the user's files; the caller writes the plan.

    deadline: where part of the budget was spent before this call; None: all of it is left.
    """
    request.target.check()
    deadline = deadline or Deadline(request.budget_seconds)
    sources = source_digests(request.target)  # now: it may be edited during the tune
    with (
        work_folder() as folder,
        logs_kept(folder, request.log_folder, progress),
        ForkServer() as fork_server,
        StartedScript() as started,
    ):
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            levers=request.levers,
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=request.stdin_file,
            hang_floor_seconds=request.hang_floor_seconds,
            terminal_size=terminal_size(),
            fork_server=fork_server,
            started=started,
            deadline=deadline,
        )
        levers = load_levers(request.levers)
        trials: Trials = setup
        if request.ranks is not None:
            trials = ranks = ScriptRanks(setup=setup, count=request.ranks, own=request.starts_ranks)
            levers = ranks.levers_of(levers)
        wanted = request.devices if request.devices is not None and request.devices.most > 1 else None
        reserved = 0.0 if wanted is None else DEVICES_SHARE * deadline.budget_seconds
        limits = SearchLimits(
            deadline=deadline.reserving(reserved),
            exactness=request.exactness,
            total_steps=request.total_steps,
            only=request.only,
            fit_bytes=request.fit_bytes,
        )
        found = search_and_prove(trials, machine, levers, limits, progress)
        started.close()  # it takes memory
        whole, unknown = _whole_run(found, folder, deadline)
        if found.state.fit is not None:
            progress("measuring the memory of a step in a new process")
            planned_bytes = peak_afresh(trials, found.state.kept)
            found.state.fit = replace(found.state.fit, planned_bytes=planned_bytes)
        devices = None
        if wanted is not None:
            devices = choose_devices(found, setup, machine, wanted, deadline, progress)
        return Tuned(
            subject=request.target,
            machine=machine,
            state=found.state,
            plan=replace(_plan(found, machine, request, devices), sources=sources),
            proof=found.proof,
            final=found.final,
            whole=whole,
            devices=devices,
            ranks=request.ranks,
            budget_seconds=request.budget_seconds,
            seconds=deadline.elapsed_seconds,
            warnings=(
                *found.warnings,
                *unknown,
                *(() if devices is None else devices.warnings),
                *filter(None, [deadline.explanation]),
            ),
        )


def _whole_run(found: Found, folder: Path, deadline: Deadline) -> tuple[WholeRun | None, list[str]]:
    """(the plan's effect on a whole run, start-up included; why it is unknown). Nothing of both where nothing was
    kept."""
    state, final = found.state, found.final
    if final is None or not state.kept:
        return None, []
    try:
        with deadline.stage("timing the start of flatout run"):
            own_seconds = own_start_seconds(folder)
    except TrialError as error:
        return None, [f"the gain of a whole run is unknown, because {error}"]
    few = state.few_steps
    whole = WholeRun.of(
        final,
        own_start_seconds=own_seconds,
        script_start_seconds=state.startup_seconds or 0.0,
        steps=state.total_steps,
        steps_at_start=0 if few is None else few.steps - few.compared,
    )
    return whole, []


def _plan(found: Found, machine: Machine, request: TuneRequest, devices: DevicesTuned | None) -> Plan:
    plan = plan_of(found, machine)
    if request.ranks is not None:
        plan = replace(plan, warnings=(*plan.warnings, f"measured in {counted(request.ranks, 'rank')} of the script"))
    if devices is not None:
        plan = with_devices(plan, devices)
    return replace(plan, script=request.target.name, argv=request.target.arguments)


@contextlib.contextmanager
def logs_kept(folder: Path, wanted: Path | None, progress: Progress) -> Iterator[None]:
    """Copy the output of trials into `wanted` at the end, also of a tune that fails. UsageError, at once, where it is
    no folder that can be written to."""
    if wanted is None:
        yield
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError as error:
        raise UsageError(f"logs cannot be kept in {wanted}: {error.strerror}", remedy="name another folder") from error
    try:
        yield
    finally:
        try:
            for log in folder.glob("*/output.log"):
                shutil.copyfile(log, wanted / f"{log.parent.name}.log")
        except OSError as error:
            progress(f"not all logs were kept in {wanted}: {error.strerror}")
