"""The processes of a run that trained, as rows of a screen, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.profiling.profile import Profile
from flatout.report.step_text import percent
from flatout.script.process_record import ProcessRecord, RankSpread, own_spread, process_names, step_spread
from flatout.script.rank_balance import RankBalance, balance_unknown_because, rank_balance
from flatout.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from flatout.script.profile_trial import RankProfile

COLUMNS = ("data", "forward", "backward", "optimizer")
EXPOSED = "waits"
MOST_COLLECTIVES = 3
TURNS_WORTH_SAYING = 0.02
SPREAD_WORTH_A_LINE = 0.1
"""As a share of the fastest rank's step."""
PART_TEXTS = {"data": "waiting for data", "transfer": "copies to the device", "other": "the script's own Python"}


def process_rows(processes: Sequence[ProcessRecord]) -> list[tuple[str, str]]:
    """A row for each process that trained, then what they wait for, and which is the slowest."""
    if not processes:
        return []
    names = process_names(processes)
    wide = max(map(len, names))
    head = "".join(f"{name:>11}" for name in ("steps", "step", *COLUMNS, EXPOSED, "memory"))
    rows = [("ranks", " " * wide + head)]
    rows += [("", f"{name:<{wide}}{_process_text(one)}") for name, one in zip(names, processes, strict=True)]
    balance = rank_balance(processes)
    if balance is not None:
        return [*rows, *(("", text) for text in balance_texts(balance))]
    whole, outside = step_spread(processes), own_spread(processes)
    spreads = (_spread_text(whole, "a step", whole), _spread_text(outside, "of a step outside backward", whole))
    rows += [("", text) for text in spreads if text]
    if unknown := balance_unknown_because(processes):
        rows.append(("", f"waits for other ranks: {unknown}"))
    return rows


def profiled_rank_rows(ranks: Sequence[RankProfile], notes: Sequence[str]) -> list[tuple[str, str]]:
    """The same of ranks that were profiled, with what they exchanged."""
    rows = process_rows([one.record for one in ranks])
    rows += [("", f"{one.name} exchanges {text}") for one in ranks if (text := _exchanged(one.profile))]
    rows += [("", f"{one.name} could not be profiled: {one.fault}") for one in ranks if one.fault]
    return [*rows, *(("note", note) for note in notes)]


def _exchanged(profile: Profile | None) -> str:
    """'28 ms of a step: 27 exposed, 1 overlapped (gloo:all_reduce 1 x 28 ms)'; '' where nothing was recorded."""
    found = profile.communication if profile is not None else None
    if found is None:
        return ""
    parts = "how much of it is overlapped is unknown"
    if found.exposed_seconds is not None and found.overlapped_seconds is not None:
        exposed, hidden = format_seconds(found.exposed_seconds), format_seconds(found.overlapped_seconds)
        parts = f"{exposed} exposed, {hidden} overlapped"
    calls = ", ".join(f"{one.calls:.3g} x {one.name}" for one in found.collectives[:MOST_COLLECTIVES])
    return f"for {format_seconds(found.total_seconds)} of a profiled step: {parts} ({calls})"


def rank_fields(ranks: Sequence[RankProfile], notes: Sequence[str]) -> dict[str, object]:
    """Of a profile's document; none where one process trained alone."""
    if not ranks:
        return {}
    records = [one.record for one in ranks]
    return {
        "processes": [{"name": one.name, **one.record.to_json()} for one in ranks],
        "rank_profiles": [
            {
                "name": one.name,
                "profile": None if one.profile is None else one.profile.to_json(),
                "fault": one.fault or None,
            }
            for one in ranks
        ],
        "rank_notes": list(notes),
        **balance_fields(records),
    }


def balance_fields(records: Sequence[ProcessRecord]) -> dict[str, object]:
    balance = rank_balance(records)
    return {
        "rank_balance": None if balance is None else balance.to_json(),
        "rank_balance_unknown_because": balance_unknown_because(records),
    }


def balance_texts(balance: RankBalance) -> list[str]:
    """Which rank the others wait for, and what communication costs."""
    step = balance.step_seconds or 1.0
    exposed = balance.exposed_seconds
    texts = [f"communication that nothing overlaps: {format_seconds(exposed)} of a step ({percent(exposed / step)})"]
    if balance.turns_seconds is not None and balance.turns_seconds >= TURNS_WORTH_SAYING * step:
        turns = balance.turns_seconds
        texts[0] += f"; {format_seconds(turns)} more, as now one rank is late, now another ({percent(turns / step)})"
    if not balance.certain:
        return [*texts, "no rank is slower than the others beyond what steps vary by"]
    excess = balance.excess_seconds
    text = f"the others wait for {balance.straggler}: {format_seconds(excess)} of a step ({percent(excess / step)})"
    where = PART_TEXTS.get(balance.part, balance.part)
    more = f"{format_seconds(balance.part_excess_seconds)} more than the others in: {where}"
    return [*texts, text, f"{more}; its own work is {balance.imbalance:.2f} times the ranks' mean"]


def _spread_text(spread: RankSpread | None, what: str, whole: RankSpread | None) -> str:
    """'' where it is not known, or too little to tell."""
    if whole is None or spread is None:
        return ""
    if spread.slowest_seconds - spread.fastest_seconds < SPREAD_WORTH_A_LINE * whole.fastest_seconds:
        return ""
    slow, fast = format_seconds(spread.slowest_seconds), format_seconds(spread.fastest_seconds)
    return f"slowest: {spread.slowest}, {slow} {what}; fastest: {spread.fastest}, {fast}"


def _process_text(one: ProcessRecord) -> str:
    memory = one.peak_device_bytes if one.peak_device_bytes is not None else one.peak_resident_bytes
    seconds = [one.step_seconds, *(one.parts.get(name) for name in COLUMNS), one.exposed_seconds]
    cells = [f"{one.steps:,}", *("-" if s is None else format_seconds(s) for s in seconds), format_bytes(memory)]
    said = [] if one.ended else ["not completed: it was killed, or still runs"]
    said += [one.fault] if one.fault is not None else []
    return "".join(f"{cell:>11}" for cell in cells) + "".join(f"  ({text})" for text in said)
