"""The profiles of ranks, side by side, from what each has left for the parent of the trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.profiling.profile import Profile
from flatout.script.process_record import ProcessRecord, process_names
from flatout.script.rank_answers import RankAnswer, RankWatch, names_text


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Of one rank."""

    name: str
    """'rank 1'."""
    record: ProcessRecord
    """By the steps that were timed without the profiler."""
    profile: Profile | None
    """Without ceilings; None: it had no step to profile, or could not be profiled."""
    fault: str = ""
    """Why it could not."""


@dataclass(frozen=True, kw_only=True)
class RankProfiles:
    """Of all that answered, the first rank first."""

    ranks: tuple[RankProfile, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing, and why."""
    first: RankAnswer | None = None
    """What the profile of the script as a whole is made of: the first rank's; None: there is none."""


def rank_profiles(watch: RankWatch) -> RankProfiles:
    """What there is now."""
    answers = watch.answers()
    records = [ProcessRecord.from_json(one["record"]) for one in answers]
    ranks = tuple(
        RankProfile(name=name, record=record, profile=_profile(one), fault=one["fault"])
        for name, record, one in zip(process_names(records), records, answers, strict=True)
    )
    return RankProfiles(ranks=ranks, notes=_notes(watch, answers), first=answers[0] if answers else None)


def _profile(answer: RankAnswer) -> Profile | None:
    given = answer["profile"].get("profile")
    return None if given is None else Profile.from_json(given)


def _notes(watch: RankWatch, answers: Sequence[RankAnswer]) -> tuple[str, ...]:
    notes = [f"{names_text(watch.dead)} died before being profiled"] if watch.dead else []
    known = max((one["ranks"] or 0 for one in answers), default=0)
    if known > len(answers):
        notes.append(f"{len(answers)} of {known} ranks were profiled")
    return tuple(notes)
