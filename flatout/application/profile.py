"""`flatout.profile` and `flatout.measure`: where the time of a callable goes, and how long it takes.

found = flatout.profile(lambda: train_step(batch))
found.operators_by("line")[0].line
flatout.measure(lambda: train_step(batch)).median_seconds
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.arguments import as_function, as_path, as_seconds, as_whole_number
from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts, RunFacts
from flatout.diagnose.finding import Finding
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.device import wait_for_gpus
from flatout.machine.kept_ceilings import load_ceilings
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.notebook_tables import ShownAsText
from flatout.precision.matmul import current_matmul_precision
from flatout.profiling.exports import check_trace, write_trace
from flatout.profiling.profile import GroupBy, Profile, SortBy
from flatout.profiling.roofline import matrix_units, roofline
from flatout.report.profile_text import ScriptProfile, profile_text
from flatout.script.profile_trial import TRACE_NAME, ProfileRequest, ProfileWatched, watch_profile
from flatout.script.source_facts import read_source
from flatout.temporary_folders import temporary_folder
from flatout.timing import Load, LoadWatch, Measurement, contention
from flatout.timing import measure as timed


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfileResult(ShownAsText, Profile):
    """What `flatout.profile` found, per call: `parts`, `operators_by()`, `modules`, `lines`, `roofline`, `overhead`."""

    def summary(self, *, by: GroupBy = "name", sort: SortBy = "time") -> str:
        """What `flatout profile` prints, on one screen."""
        return profile_text(self, by=by, sort=sort)

    def __str__(self) -> str:
        return self.summary()


def profile(
    function: Callable[[], object], *, steps: int = 5, name: str = "", trace: str | os.PathLike[str] | None = None
) -> ProfileResult:
    """Call a function without arguments a dozen times or more, and say where its time goes.

    It is called to warm up, then timed for half a second, then followed operator by operator, then `steps` times under
    torch's profiler; so it may change what it works on, such as weights. trace: where to write a Chrome trace, as
    "trace.json" or "trace.json.gz". Ceilings are those that `flatout check --measure` has kept; without them shares of
    a ceiling are unknown.

    Returns a ProfileResult: `parts`, `operators_by()`, `modules`, `lines`, `roofline`, `overhead`, `summary()`. Raises
    what the function raises, and UsageError for options that mean nothing.
    """
    limit = "it is called without arguments"
    as_function(function, "function", 0, limit=limit, remedy="for a script: flatout profile train.py")
    as_whole_number(steps, "steps")
    target = as_path(trace, "trace").absolute() if trace is not None else None  # the function may change the folder
    if target is not None:
        check_trace(target)
    from flatout.profiling.callables import profile_callable

    called = name or getattr(function, "__name__", type(function).__name__)
    watch = LoadWatch()
    with temporary_folder("profile") as folder:
        recorded = folder / TRACE_NAME if target is not None else None
        found = profile_callable(function, steps=steps, name=called, folder=os.getcwd(), trace=recorded)
        if target is not None and recorded is not None:
            if recorded.exists():
                write_trace(recorded, target)
            else:
                why = found.reasons.get("operators", "nothing was recorded").removeprefix("unknown, because ")
                found = replace(found, notes=(*found.notes, f"no trace was written: {why}"))
    found = _with_load(found, watch.read())
    machine = detect()
    ceilings = load_ceilings(machine, found.device)
    tf32 = current_matmul_precision() != "highest"
    return ProfileResult(**vars(against_ceilings(found, machine.with_ceilings(ceilings), tf32=tf32)))


def measure(
    function: Callable[[], object], *, name: str = "", warmup: int = 3, min_samples: int = 10, max_seconds: float = 10.0
) -> Measurement:
    """Time a function without arguments: warmed up, with the GPU awaited before and after, enough samples to be sure.

    The function is called until there are `min_samples` samples over at least 0.2 s, or `max_seconds` have passed; a
    quick one is called several times for each sample. Returns a Measurement: `median_seconds`, `interval_seconds` (the
    95 % confidence interval of the median), `samples_seconds`, and `warnings` that say what makes it doubtful. Raises
    what the function raises.
    """
    limit = "it is called without arguments"
    as_function(function, "function", 0, limit=limit, remedy="flatout.measure(lambda: step(batch))")
    return timed(
        function,
        name=name,
        synchronize=wait_for_gpus,
        warmup=as_whole_number(warmup, "warmup", least=0),
        min_samples=as_whole_number(min_samples, "min_samples"),
        max_seconds=as_seconds(max_seconds, "max_seconds"),
        machine_fingerprint=detect().fingerprint,
    )


def profile_script(
    request: ProfileRequest,
    progress: Callable[[str], None],
    watching: Callable[[ProfileRequest], ProfileWatched] = watch_profile,
) -> ScriptProfile:
    """Measures this machine's ceilings quickly where none are known. watching: runs the trial. Raises TrialError where
    it failed."""
    machine = machine_with_ceilings(progress)
    progress("profiling")
    watch = LoadWatch()
    watched = watching(request)
    found, load = watched.profile, watch.read()
    if found is not None:
        found = _with_load(found, load)
        ceilings = load_ceilings(machine, found.device) or machine.ceilings
        found = against_ceilings(found, machine.with_ceilings(ceilings), tf32=watched.tf32)
    return ScriptProfile(
        watched=watched, profile=found, machine=machine, findings=findings_of(watched, found, machine, load)
    )


def findings_of(
    watched: ProfileWatched, profile: Profile | None, machine: Machine, load: Load | None = None
) -> tuple[Finding, ...]:
    """What the checks find. profile: with ceilings. load: of the processor meanwhile; None: not known."""
    behaviour = watched.behaviour
    files = behaviour.files if behaviour is not None else ()
    ceilings = load_ceilings(machine, "cpu")
    cpu = ceilings.gemm_flops_per_second.get("fp32") if ceilings is not None else None
    run = RunFacts(
        steps=watched.steps,
        processes=len(watched.ranks),
        ranks=tuple(one.record for one in watched.ranks),
        devices=watched.devices,
    )
    facts = Facts(
        command=shlex.join(watched.target.command),
        observed=watched.observed,
        profile=None if profile is None else profile.at_plain_speed(),
        behaviour=behaviour,
        source=read_source(files, watched.target.folder) if files else None,
        run=run if watched.status in (None, 0) else None,
        machine=machine,
        gpus=tuple(gpu.name for gpu in machine.usable_gpus),
        cpu_flops_per_second=None if cpu is None else cpu.value,
        contended=load is not None and load.contended,
    )
    return check_facts(facts)


def against_ceilings(found: Profile, machine: Machine, *, tf32: bool) -> Profile:
    """With roofline and share of products on matrix units. tf32: may fp32 products be computed in fewer bits?"""
    on_gpu = found.device != "cpu"
    return replace(
        found,
        roofline=roofline(found.operators, machine.ceilings, device=found.device, tf32=tf32 and on_gpu),
        matrix_units=matrix_units(found.operators, found.kernels, machine, device=found.device, tf32=tf32),
    )


def _with_load(found: Profile, load: Load | None) -> Profile:
    """With a note where others kept the processor busy."""
    warning = contention(load)
    return found if warning is None else replace(found, notes=(warning, *found.notes))
