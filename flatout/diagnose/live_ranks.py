"""The ranks of a run while it goes on: each with its last record, whether it is still there, and whom the others wait
for. Read by whoever shows them, never by the ranks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.diagnose.seen_run import Condition, condition_of
from flatout.script.process_record import ProcessRecord, in_order, process_names
from flatout.script.rank_balance import RankBalance, rank_balance
from flatout.script.record_file import WRITE_EVERY_SECONDS

LATE_STEPS, LATE_SECONDS = 10.0, 5.0 + WRITE_EVERY_SECONDS
"""A rank is silent when its last step ended so many usual ones ago, and so long: it writes its record at a step's
end."""


@dataclass(frozen=True, kw_only=True)
class LiveRank:
    """One process that trains."""

    name: str
    record: ProcessRecord
    condition: Condition
    silent_seconds: float | None = None
    """Since its last step, where that is unusually long ago."""
    holds_up_seconds: float | None = None
    """Of a step, which the others wait for it; None: they do not, or it is not known."""


@dataclass(frozen=True, kw_only=True)
class LiveRanks:
    """In their order."""

    ranks: tuple[LiveRank, ...] = ()
    balance: RankBalance | None = None

    def __bool__(self) -> bool:
        return bool(self.ranks)

    def to_json(self) -> list[dict[str, object]]:
        return [{**vars(one), "record": one.record.to_json()} for one in self.ranks]


def live_ranks(records: Sequence[ProcessRecord], clock_seconds: float) -> LiveRanks:
    """clock_seconds: time.monotonic() now. Of processes that had the same rank one after the other, the last."""
    newest = in_order(_newest(records))
    balance = rank_balance(newest)
    straggler = balance.straggler if balance is not None and balance.certain else None
    ranks = []
    for name, one in zip(process_names(newest), newest, strict=True):
        condition = condition_of(one)
        ranks.append(
            LiveRank(
                name=name,
                record=one,
                condition=condition,
                silent_seconds=_silent(one, clock_seconds) if condition in ("running", "unknown") else None,
                holds_up_seconds=balance.excess_seconds if balance is not None and name == straggler else None,
            )
        )
    return LiveRanks(ranks=tuple(ranks), balance=balance)


def _newest(records: Sequence[ProcessRecord]) -> list[ProcessRecord]:
    found: dict[object, ProcessRecord] = {}
    for one in sorted(records, key=lambda one: one.started_at):
        found[one.rank if one.rank is not None else (one.pid, one.started_at)] = one
    return list(found.values())


def _silent(one: ProcessRecord, clock_seconds: float) -> float | None:
    if one.last_step_clock is None:
        return None
    ago = clock_seconds - one.last_step_clock
    return ago if ago > max(LATE_SECONDS, LATE_STEPS * (one.step_seconds or 0.0)) else None
