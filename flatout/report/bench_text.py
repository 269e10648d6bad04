"""The bench's table and the guides' claims, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flatout.bench.claim import Case, ClaimResult, ClaimsResult
from flatout.bench.results import BenchResult, Row, Speedup, WorkloadResult
from flatout.report.machine_text import machine_line
from flatout.report.step_text import percent
from flatout.units import format_bytes

BAR = 16
"""Characters of the fastest contender's bar."""
_COLUMNS = ("", "{unit}/s", "", "against plain torch", "ceiling", "memory", "")


def bench_text(found: BenchResult) -> str:
    """A table for each workload, under the machine and the versions."""
    lines = _head(machine_line(found.machine), found.versions, found.contended)
    for workload in found.workloads:
        lines += ["", *_workload(found, workload)]
    return "\n".join(lines)


def _head(machine: str, versions: Mapping[str, str | None], contended: bool | None) -> list[str]:
    installed = [f"{name} {version}" for name, version in versions.items() if version is not None]
    missing = [name for name, version in versions.items() if version is None]
    lines = [f"machine   {machine}", f"versions  {', '.join(installed)}"]
    lines += [f"missing   {', '.join(missing)}: not installed, so not in the tables"] if missing else []
    lines += ["caution   others kept the processor busy meanwhile"] if contended else []
    return lines


def _workload(found: BenchResult, workload: WorkloadResult) -> list[str]:
    fastest = max(map(workload.items_per_second, workload.rows), default=0.0)
    header = [column.format(unit=workload.unit) for column in _COLUMNS]
    rows = [header, *(_row(found, workload, row, fastest) for row in workload.rows)]
    lines = [f"{workload.title}: {workload.size}", *(_aligned(rows) if workload.rows else [])]
    if (against := workload.against_peer()) is not None:
        ours, peer = workload.ours(), workload.peer()
        assert ours is not None
        assert peer is not None
        lines.append(f"  {ours.name} against the fastest peer ({peer.name}): {speedup_text(against)}")
    lines += [f"  {row.name} has other numbers: {row.other_numbers}" for row in workload.rows if row.other_numbers]
    lines += [f"  left out  {name}: {reason}" for name, reason in workload.left_out.items()]
    return [*lines, f"  guides    {workload.guides}"] if workload.guides else lines


def _row(found: BenchResult, workload: WorkloadResult, row: Row, fastest: float) -> list[str]:
    rate, share = workload.items_per_second(row), found.share_of_ceiling(workload, row)
    against = workload.against_plain(row)
    how = [row.how, _difference(workload, row)]
    return [
        row.name,
        _rate(rate),
        "█" * max(1, round(BAR * rate / fastest)),
        "" if against is None else speedup_text(against),
        "unknown" if share is None else percent(share),
        "unknown" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "; ".join(filter(None, how)),
    ]


def _difference(workload: WorkloadResult, row: Row) -> str:
    if row.difference is None:
        return ""
    if workload.compared == "tokens":
        return f"{1 - row.difference:.0%} of the tokens as plain torch"
    return f"off by {percent(row.difference)}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right; a column that is empty in every row is left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = (1, 4, 5)
    return [
        ("  " + "  ".join(f"{text:{'>' if at in right else '<'}{widths[at]}}" for at, text in enumerate(row))).rstrip()
        for row in rows
    ]


def _rate(per_second: float) -> str:
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 10 else f"{per_second:.2f}"


def speedup_text(found: Speedup) -> str:
    """'x1.32 (1.28 to 1.36)', or the number of pairs where they are too few for an interval."""
    if found.low is None or found.high is None:
        return f"x{found.ratio:.2f} ({found.pairs} pairs)"
    return f"x{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


# claims


def claims_text(found: ClaimsResult) -> str:
    """Each claim with its verdict, and its cases under it; then how many hold."""
    lines = _head(machine_line(found.machine), found.versions, found.contended)
    for claim in found.claims:
        lines += ["", *_claim(claim)]
    return "\n".join([*lines, "", _sum(found.claims)])


def _claim(claim: ClaimResult) -> list[str]:
    lines = [f"{claim.verdict:<20}  {claim.says}", f"{'':<20}  source: {'; '.join(claim.guides)}"]
    lines += [f"{'':<20}  {claim.reason}"] if claim.reason else []
    for case in claim.cases:
        note = f" ({case.note})" if case.note else ""
        lines.append(f"  {_MARKS[claim.answer(case)]:<18}  {measured_text(claim, case)}  {case.condition}{note}")
    return lines


_MARKS = {"yes": "yes", "more": "yes, more", "no": "no", "undecided": "undecided"}


def measured_text(claim: ClaimResult, case: Case) -> str:
    """'x1.15 (1.10 to 1.22)', '9.07 images/s': in the claim's quantity."""
    found = case.measured
    if claim.quantity == "rate":
        return f"{_rate(found.ratio)} {claim.unit}/s"
    if claim.quantity == "share":
        return f"{found.ratio:.1%}"
    words = {"memory": "less memory", "slowdown": "as long"}.get(claim.quantity, "")
    interval = "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"
    return " ".join(filter(None, [f"x{found.ratio:.2f}{interval}", words]))


def _sum(claims: Iterable[ClaimResult]) -> str:
    verdicts = [claim.verdict for claim in claims]
    counted = [
        f"{verdicts.count(one)} {word}"
        for one, word in (
            ("holds", "hold"),
            ("holds in part", "hold in part"),
            ("undecided", "are undecided"),
            ("does not hold", "do not hold"),
            ("not measurable here", "cannot be measured here"),
        )
        if one in verdicts
    ]
    return f"{len(verdicts)} claims: {', '.join(counted)}"
