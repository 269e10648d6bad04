"""The ranks of a run that goes on, in words: a line for each, those in trouble first where there is no room for all."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose.live_ranks import LiveRank, LiveRanks
from flatout.report.step_text import PARTS, percent
from flatout.units import format_bytes, format_seconds

MOST_ROWS = 16
LABEL_CELLS = 9
PART_SHOWN_SHARE = 0.05
WORDS = {"communication": "waits"}
"""In a line that is short."""


def ranks_parts(found: LiveRanks) -> list[str]:
    """'2 ranks', 'step 1,234', ...: of all together."""
    ranks = found.ranks
    steps = [one.record.steps for one in ranks]
    counted = f"step {max(steps):,}" if min(steps) == max(steps) else f"steps {min(steps):,} to {max(steps):,}"
    parts = [f"{len(ranks)} rank{'s' * (len(ranks) > 1)}", counted]
    if seconds := [one.record.recent_seconds for one in ranks if one.record.recent_seconds]:
        parts.append(f"{format_seconds(max(seconds))} a step")
    parts += [f"{count} {what}" for what, count in _troubles(ranks)]
    balance = found.balance
    if balance is not None and balance.step_seconds:
        parts.append(f"communication exposed {percent(balance.exposed_seconds / balance.step_seconds)}")
    return parts


def _troubles(ranks: Sequence[LiveRank]) -> list[tuple[str, int]]:
    gone = sum(one.condition == "killed" for one in ranks)
    silent = sum(one.silent_seconds is not None for one in ranks)
    return [(what, count) for what, count in (("gone", gone), ("silent", silent)) if count]


def rank_lines(found: LiveRanks, most: int) -> list[str]:
    """At most so many; where one is too few for all, the last says how many are not shown."""
    if most < 1:
        return []
    ranks = list(found.ranks)
    left = max(0, len(ranks) - most)
    if left:
        worst = sorted(ranks, key=_calm)[: most - 1]
        left = len(ranks) - len(worst)
        ranks = [one for one in ranks if one in worst]
    wide = max((len(one.name) for one in ranks), default=0)
    lines = [f"{one.name:<{wide}}  {' · '.join(_parts(one))}" for one in ranks]
    return [*lines, f"and {left} more"] if left else lines


def rank_rows(found: LiveRanks) -> list[tuple[str, str]]:
    """(label, text), for a page or `flatout watch`."""
    if not found:
        return []
    rows = [("ranks", " · ".join(ranks_parts(found)))]
    ranks = sorted(found.ranks, key=_calm)[:MOST_ROWS]
    for one in (one for one in found.ranks if one in ranks):
        short = len(one.name) <= LABEL_CELLS
        rows.append((one.name if short else "", " · ".join(_parts(one) if short else [one.name, *_parts(one)])))
    left = len(found.ranks) - len(ranks)
    return [*rows, ("", f"and {left} more")] if left else rows


def _calm(one: LiveRank) -> tuple[bool, bool, bool]:
    """Sorts those in trouble first."""
    return one.condition != "killed", one.silent_seconds is None, one.holds_up_seconds is None


def _parts(one: LiveRank) -> list[str]:
    """What is wrong with it stands first: a line may be cut."""
    record = one.record
    seconds = record.recent_seconds or record.step_seconds
    memory = record.peak_device_bytes if record.peak_device_bytes is not None else record.peak_resident_bytes
    parts = _said(one)
    parts.append(f"step {record.steps:,}")
    parts += [format_seconds(seconds)] if seconds else []
    parts += [shares] if (shares := _shares(one)) else []
    return [*parts, format_bytes(memory)]


def _said(one: LiveRank) -> list[str]:
    said = []
    if one.condition == "killed":
        said.append("GONE: its process died unexpectedly")
    elif one.condition in ("ended", "stopped"):
        said.append(one.condition)
    if one.silent_seconds is not None:
        said.append(f"SILENT: last step {format_seconds(round(one.silent_seconds))} ago")
    if one.holds_up_seconds is not None:
        said.append(f"the others wait {format_seconds(one.holds_up_seconds)} of each step for it")
    if one.record.fault is not None:
        said.append(one.record.fault)
    return said


def _shares(one: LiveRank) -> str:
    parts = {name: seconds for name, seconds in one.record.parts.items() if name != "evaluation"}
    total = sum(parts.values())
    if not total:
        return ""
    shown = [(name, parts.get(name, 0.0) / total) for name in PARTS]
    return ", ".join(f"{WORDS.get(name, name)} {share:.0%}" for name, share in shown if share > PART_SHOWN_SHARE)
