"""`flatout profile`: one trial that times, follows and profiles a few steps of a script.

watched = watch_profile(ProfileRequest(target=Target.from_command(["train.py"])))
watched.profile.parts, watched.observed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flatout.errors import TrialError
from flatout.levers.observed import Observed
from flatout.profiling.profile import Profile
from flatout.script.behaviour_seen import Behaviour
from flatout.script.entry import Target
from flatout.script.rank_answers import RankWatch, names_text, write_settings
from flatout.script.rank_profiles import RankProfile, RankProfiles, rank_profiles
from flatout.script.trial.answers import TrialDied, TrialEnded, TrialFault, TrialHangs, TrialSettled
from flatout.script.trial.messages import Command, ProfileAnswer, TargetSettings
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup, terminal_size
from flatout.script.work_folder import work_folder
from flatout.units import format_seconds

STEPS = 5
WARM_UP_STEPS = 3
LEAST_TIMED_STEPS, MOST_TIMED_STEPS, TIMED_SECONDS = 5, 50, 0.5
PATIENCE_SECONDS = 1800.0
TRACE_NAME = "trace.json"
PROFILERS_LOG = "USDT:"


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What to profile, and how many steps after the warm-up."""

    target: Target
    steps: int = STEPS
    patience_seconds: float = PATIENCE_SECONDS
    """Timeout of each trial, for a script that never steps or hangs."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    trace_folder: Path | None = None
    """An empty folder for the Chrome trace; None: none is written."""
    stdin_file: Path | None = None
    """What the script reads; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class ProfileWatched:
    """The result of the trial."""

    target: Target
    status: int | None
    """The script's exit code where it ended by itself; None: it was stopped after its steps."""
    step_kind: str | None
    steps: int
    """That were seen."""
    profile: Profile | None
    """Without ceilings; None: there was no step to profile."""
    observed: Observed | None
    behaviour: Behaviour | None
    """None: the script ended before it was watched."""
    tf32: bool
    trace: Path | None
    errors: str
    """What the script wrote to stderr, where it failed."""
    ranks: tuple[RankProfile, ...] = ()
    """Of the processes that train together, or that the script started: the first is the one of `profile`."""
    rank_notes: tuple[str, ...] = ()
    devices: int | None = None
    """On so many devices Flatout ran a script for one; None: the script itself says on how many."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many steps each window takes."""

    warm_up: int
    timed: int
    timed_seconds: float
    follow: bool
    settle: int
    """Under the profiler, whose first step is slower, before those that count."""
    profiled: int


def full(steps: int) -> Schedule:
    return Schedule(
        warm_up=WARM_UP_STEPS,
        timed=min(max(LEAST_TIMED_STEPS, steps), MOST_TIMED_STEPS),
        timed_seconds=TIMED_SECONDS,
        follow=True,
        settle=1,
        profiled=steps,
    )


BEHAVIOUR_ALONE = Schedule(warm_up=1, timed=0, timed_seconds=0.0, follow=False, settle=0, profiled=0)
LEAST_FOLLOWED_STEPS = 40
"""With fewer, a script that ends by itself is run again, to be followed from its first steps on."""


def fitting(seen: int, steps: int) -> Schedule | None:
    """For a script that has so many steps from the first recognized one, which no window can hold. None: too few."""
    left = seen - 1
    if left < 1:
        return None
    follow = left >= 3
    left -= follow
    warm_up, settle = (1, 0) if left < 6 else (2, 1)
    left -= warm_up - 1 + settle
    profiled = min(steps, max(1, left // 2))
    timed = min(left - profiled, max(LEAST_TIMED_STEPS, steps))
    return Schedule(warm_up=warm_up, timed=timed, timed_seconds=0.0, follow=follow, settle=settle, profiled=profiled)


def watch_profile(request: ProfileRequest) -> ProfileWatched:
    """Run the script as a trial; a second time, with fewer steps, where it ends before the profile does, and once more
    where it ends before enough was seen of what it does.

    Raises TrialError where it could not be watched.
    """
    request.target.check()
    watched = watch_with(request, lambda schedule: _watch_once(request, schedule))
    seen = watched.behaviour.steps if watched.behaviour is not None else 0
    if watched.status != 0 or seen >= LEAST_FOLLOWED_STEPS or watched.steps - 2 <= seen:
        return watched
    return replace(watched, behaviour=_watch_once(request, BEHAVIOUR_ALONE).behaviour)


def watch_with(request: ProfileRequest, once: Callable[[Schedule], ProfileWatched]) -> ProfileWatched:
    """Run the script by `once`; a second time, with fewer steps, where it ends before the profile does."""
    watched = once(full(request.steps))
    ended_well = watched.status == 0 and not (watched.profile is not None and watched.profile.steps)
    if not ended_well or (fewer := fitting(watched.steps, request.steps)) is None:
        return watched
    again = once(fewer)
    if again.profile is None or again.profile.steps >= request.steps:
        return again
    note = (
        f"the script ends after {watched.steps} steps: {again.profile.steps} of the {request.steps} asked for were "
        "profiled, in a second run of it"
    )
    return replace(again, profile=replace(again.profile, notes=(note, *again.profile.notes)))


def _watch_once(request: ProfileRequest, schedule: Schedule) -> ProfileWatched:
    trace = request.trace_folder / TRACE_NAME if request.trace_folder is not None else None
    with work_folder() as folder, work_folder() as ranks:
        command = command_of(schedule, trace, ranks)
        write_settings(ranks, {"command": command, "target": target_settings(request.target)})
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            shared=(ranks, *([request.trace_folder] if request.trace_folder is not None else [])),
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=request.stdin_file,
            terminal_size=terminal_size() if request.stdin_file is None else None,
            errors_apart=True,
        )
        watch = RankWatch(ranks)
        with TrialProcess(setup, label="profile") as trial:
            answer: ProfileAnswer = {"event": "profile", "ended": False, "steps": 0}
            end: TrialEnded | None = None
            try:
                answer, end = trial.watch(command, request.patience_seconds, watch.settled)
            except TrialSettled:
                pass
            except TrialError as error:
                if not watch.answers():
                    raise _explained(error, request, trial.errors) from None
            found = rank_profiles(watch)
            if found.first is None and watch.dead and end is None:
                raise _died(watch, trial.errors)
            return watched_of(request, answer, found, end=end, errors=trial.errors, trace=trace)


def command_of(schedule: Schedule, trace: Path | None, ranks: Path) -> Command:
    """ranks: the folder for the profiles of processes that train together."""
    return {
        "do": "profile",
        "steps": schedule.profiled,
        "warm_up": schedule.warm_up,
        "timed": schedule.timed,
        "timed_seconds": schedule.timed_seconds,
        "follow": schedule.follow,
        "settle": schedule.settle,
        "trace": str(trace) if trace is not None else "",
        "ranks": str(ranks),
    }


def target_settings(target: Target) -> TargetSettings:
    return {"path": target.path, "module": target.module, "arguments": list(target.arguments)}


def watched_of(
    request: ProfileRequest,
    answer: ProfileAnswer,
    found: RankProfiles,
    *,
    end: TrialEnded | None = None,
    errors: str = "",
    trace: Path | None = None,
) -> ProfileWatched:
    """answer: of the script's own process; where that does not train, the first rank's stands in its place."""
    note = f"{end.note}\n" if end is not None and end.note else ""
    status = end.status if end is not None else None
    if found.first is not None and not answer["steps"]:
        answer = found.first["profile"]
    if status is None and answer["ended"]:
        status = 0
    profile, observed, behaviour = answer.get("profile"), answer.get("observed"), answer.get("behaviour")
    return ProfileWatched(
        target=request.target,
        status=status,
        step_kind=answer.get("step_kind"),
        steps=answer["steps"],
        profile=Profile.from_json(profile) if profile is not None else None,
        observed=Observed.from_json(observed) if observed is not None else None,
        behaviour=Behaviour.from_json(behaviour) if behaviour is not None else None,
        tf32=answer.get("tf32", False),
        trace=trace if answer.get("has_trace") else None,
        errors=of_the_script(errors) + note if end is not None and end.status else "",
        ranks=found.ranks,
        rank_notes=found.notes,
    )


def _died(watch: RankWatch, errors: str) -> TrialError:
    tail = of_the_script(errors).strip()
    return TrialError(
        f"{names_text(watch.dead)}, which the script started to train in, died before being profiled",
        limit="the others wait for it",
        remedy="find out why it dies, without Flatout" + (f"\n{tail}" if tail else ""),
    )


def of_the_script(errors: str) -> str:
    """Without what torch's profiler logs of itself."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith(PROFILERS_LOG))


def patience_over(request: ProfileRequest) -> TrialError:
    return TrialError(
        f"the script did not take the steps of a profile in {format_seconds(request.patience_seconds)}",
        limit="that is the timeout",
        remedy="allow more with --patience 2h, or ask for fewer --steps, if it trains at all",
    )


def _explained(error: TrialError, request: ProfileRequest, errors: str) -> TrialError:
    """The error in terms of `flatout profile`, with the script's stderr; for a signal with a shell's exit code."""
    what, limit, remedy = error.what, error.limit, error.remedy
    if isinstance(error, TrialHangs):
        over = patience_over(request)
        what, limit, remedy = over.what, over.limit, over.remedy
    elif isinstance(error, TrialFault):
        what = f"the script could not be profiled: {what}"
    elif isinstance(error, TrialDied):
        what = (
            f"the script died of {error.signal_name}"
            if error.signal_name
            else (f"the script exited with code {error.code} without Python's normal shutdown")
        )
    tail = of_the_script(errors).strip() if isinstance(error, TrialHangs | TrialDied) else ""
    explained = TrialError(what, limit=limit, remedy=remedy + (f"\n{tail}" if tail else ""))
    if isinstance(error, TrialDied) and error.signal_name:
        explained.exit_code = 128 - error.code
    return explained
