"""`flatout profile`: one trial that times, follows and profiles a few steps of a script.

watched = watch_profile(ProfileRequest(target=Target.from_command(["train.py"])))
watched.profile.parts, watched.observed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from flatout.levers.observed import Observed
from flatout.profiling.profile import Profile
from flatout.script.behaviour_seen import Behaviour
from flatout.script.entry import Target
from flatout.script.process_record import ProcessRecord, process_names
from flatout.script.rank_answers import RankAnswer
from flatout.script.trial.messages import Command, ProfileAnswer
from flatout.script.watched_trial import WatchRequest, watched_trial

STEPS = 5
WARM_UP_STEPS = 3
LEAST_TIMED_STEPS, MOST_TIMED_STEPS, TIMED_SECONDS = 5, 50, 0.5
TRACE_NAME = "trace.json"


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(WatchRequest):
    """What to profile, and how many steps after the warm-up."""

    steps: int = STEPS
    trace_folder: Path | None = None
    """An empty folder for the Chrome trace; None: none is written."""
    stdin_file: Path | None = None
    """What the script reads; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Of one rank, side by side with the others."""

    name: str
    """'rank 1'."""
    record: ProcessRecord
    """By the steps that were timed without the profiler."""
    profile: Profile | None
    """Without ceilings; None: it had no step to profile, or could not be profiled."""
    fault: str = ""
    """Why it could not."""


def rank_profiles(answers: Sequence[RankAnswer]) -> tuple[RankProfile, ...]:
    """Of all that answered, the first rank first."""
    records = [ProcessRecord.from_json(one["record"]) for one in answers]
    return tuple(
        RankProfile(name=name, record=record, profile=_profile(one["profile"]), fault=one["fault"])
        for name, record, one in zip(process_names(records), records, answers, strict=True)
    )


def _profile(answer: ProfileAnswer) -> Profile | None:
    given = answer.get("profile")
    return None if given is None else Profile.from_json(given)


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
    """How many steps each window takes: see `Command`."""

    warm_up: int
    timed: int
    timed_seconds: float
    follow: bool
    settle: int
    """Under the profiler, whose first step is slower, before those that count."""
    steps: int
    """That are profiled."""


def full(steps: int) -> Schedule:
    return Schedule(
        warm_up=WARM_UP_STEPS,
        timed=min(max(LEAST_TIMED_STEPS, steps), MOST_TIMED_STEPS),
        timed_seconds=TIMED_SECONDS,
        follow=True,
        settle=1,
        steps=steps,
    )


BEHAVIOUR_ALONE = Schedule(warm_up=1, timed=0, timed_seconds=0.0, follow=False, settle=0, steps=0)
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
    return Schedule(warm_up=warm_up, timed=timed, timed_seconds=0.0, follow=follow, settle=settle, steps=profiled)


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
    folder = request.trace_folder
    trace = folder / TRACE_NAME if folder is not None else None
    found = watched_trial(
        request,
        command_of(schedule, trace),
        "profiled",
        shared=() if folder is None else (folder,),
        stdin_file=request.stdin_file,
    )
    watched = watched_of(request, found.answer, found.ranks, trace=trace)
    return replace(
        watched,
        status=found.status if found.status is not None else watched.status,
        errors=found.shown_errors,
        rank_notes=found.rank_notes,
    )


def command_of(schedule: Schedule, trace: Path | None) -> Command:
    told = {"do": "profile", **asdict(schedule), "trace": "" if trace is None else str(trace)}
    return cast("Command", told)


def watched_of(
    request: ProfileRequest, own: ProfileAnswer | None, ranks: Sequence[RankAnswer], *, trace: Path | None = None
) -> ProfileWatched:
    """own: of the script's own process; where that does not train, the first rank's stands in its place."""
    answer: ProfileAnswer = own or {"event": "profile", "ended": False, "steps": 0}
    if ranks and not answer["steps"]:
        answer = ranks[0]["profile"]
    observed, behaviour = answer.get("observed"), answer.get("behaviour")
    return ProfileWatched(
        target=request.target,
        status=0 if answer["ended"] else None,
        step_kind=answer.get("step_kind"),
        steps=answer["steps"],
        profile=_profile(answer),
        observed=Observed.from_json(observed) if observed is not None else None,
        behaviour=Behaviour.from_json(behaviour) if behaviour is not None else None,
        tf32=answer.get("tf32", False),
        trace=trace if answer.get("has_trace") else None,
        errors="",
        ranks=rank_profiles(ranks),
    )
