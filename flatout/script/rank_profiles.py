"""The profiles of ranks, side by side, from what each has left for the parent of the trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.profiling.profile import Profile
from flatout.script.process_record import ProcessRecord, process_names
from flatout.script.rank_answers import RankAnswer


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


def rank_profiles(answers: Sequence[RankAnswer]) -> tuple[RankProfile, ...]:
    """Of all that answered, the first rank first."""
    records = [ProcessRecord.from_json(one["record"]) for one in answers]
    return tuple(
        RankProfile(name=name, record=record, profile=_profile(one), fault=one["fault"])
        for name, record, one in zip(process_names(records), records, answers, strict=True)
    )


def _profile(answer: RankAnswer) -> Profile | None:
    given = answer["profile"].get("profile")
    return None if given is None else Profile.from_json(given)
