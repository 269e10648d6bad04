"""What machine 0 knows of the ranks, from one start to the next: which have ended, which failed first, which hang."""

from __future__ import annotations

import time

from flatout.parallel.launching.failure import TOGETHER_SECONDS, RankEnd, first_failure
from flatout.parallel.launching.messages import AllEnded, Beats, Ended, Message, RankBeat

SETTLE_SECONDS = 0.3
"""After the first failure, until it is decided which was first."""
FAILING_SECONDS = 5.0
"""The same, while that one seems to follow from another, or a rank that has printed a traceback is about to end."""
STARTING_SECONDS = 30.0
"""For so long nothing is said of ranks that have completed no step: they may still be starting."""


class Attempt:
    """One start of all ranks."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.beats: dict[int, tuple[RankBeat, float]] = {}
        """With the time at which it arrived."""
        self.gone: set[int] = set()
        """Machines with nothing left."""
        self._ends: dict[int, tuple[RankEnd, float]] = {}
        self._failing: dict[int, tuple[int, ...]] = {}
        self._first_seen: float | None = None
        self._began = time.monotonic()
        self._told_unjudged = False

    def note(self, machine: int, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Ended() if message.attempt == self.number:
                self._ends[message.end.rank] = (message.end, now - message.end.seconds_ago)
                self.beats.pop(message.end.rank, None)
                if message.end.failed and self._first_seen is None:
                    self._first_seen = now
            case Beats() if message.attempt == self.number:
                self._failing[machine] = message.failing
                for one in message.ranks:
                    if one.rank not in self._ends:
                        self.beats[one.rank] = (one, now)
            case AllEnded() if message.attempt == self.number:
                self.gone.add(machine)

    @property
    def patience_seconds(self) -> float:
        return 1.0 if self._first_seen is None else 0.05

    @property
    def ended_count(self) -> int:
        return len(self._ends)

    @property
    def all_ended(self) -> bool:
        return len(self._ends) == self.count

    @property
    def anything_failed(self) -> bool:
        return self._first_seen is not None

    def failed(self) -> RankEnd | None:
        """The first that failed, once it can be told; None: none has, or it cannot yet."""
        if self._first_seen is None:
            return None
        waited = time.monotonic() - self._first_seen
        failures = [one for one in self._ends.values() if one[0].failed]
        first = first_failure(failures)
        about_to = any(rank not in self._ends for ranks in self._failing.values() for rank in ranks)
        patience = FAILING_SECONDS if about_to or first.may_follow_from_another else SETTLE_SECONDS
        return first if self.all_ended or waited >= patience else None

    def left_early(self, failed: RankEnd) -> tuple[int, ...]:
        """The ranks that ended without a failure, for which one waited in vain; none if it failed by itself.

        A rank takes a moment to end, and its connections are closed before: the one that waits may be seen first.
        """
        if not failed.in_collective:
            return ()
        latest = self._ends[failed.rank][1] + TOGETHER_SECONDS
        return tuple(sorted(rank for rank, (end, at) in self._ends.items() if not end.failed and at < latest))

    # hanging

    def _ages(self) -> dict[int, float]:
        now = time.monotonic()
        return {rank: one.age_seconds + now - at for rank, (one, at) in self.beats.items() if one.beats}

    def hangs(self, limit_seconds: float) -> bool:
        """Has a rank that trained completed no step for so long? 0: no limit."""
        return bool(limit_seconds) and any(age > limit_seconds for age in self._ages().values())

    def unjudged_seconds(self, limit_seconds: float) -> float | None:
        """Once, when ranks have run for longer than the limit and none has completed a step; else None."""
        waited = time.monotonic() - self._began
        if not limit_seconds or self._told_unjudged or waited < max(limit_seconds, STARTING_SECONDS) or self._ages():
            return None
        self._told_unjudged = True
        return waited

    def silent_seconds(self) -> float:
        return max(self._ages().values())

    def slowest(self) -> tuple[int, ...]:
        """The ranks with the fewest steps; of these, those that are between two steps while others are inside one."""
        known = {rank: self.beats[rank][0] for rank in self._ages()}
        least = min(one.beats for one in known.values())
        behind = [rank for rank, one in known.items() if one.beats == least]
        outside = [rank for rank in behind if not known[rank].inside]
        return tuple(sorted(outside if outside and len(outside) < len(known) else behind))
