"""Strategies for ranks that need not be here, as a table for people."""

from __future__ import annotations

from flatout.parallel.planning import Ranking
from flatout.units import format_bytes, format_rate, format_seconds

SHOWN = 5


def ranking_text(found: Ranking) -> str:
    """The fastest strategies with their reasons, then why the others were left out."""
    cluster = found.cluster
    machines = f"{cluster.machines} machine{'s' * (cluster.machines != 1)}"
    head = (
        f"{found.workload.name} · {cluster.ranks} ranks on {machines} · {found.batch_size} samples a step · estimated"
    )
    lines = [head]
    for number, one in enumerate(found.fitting[:SHOWN], start=1):
        figures = (
            f"{format_seconds(one.step_seconds):>8} a step  {format_rate(one.samples_per_second, 'samples/s'):>16}"
        )
        lines.append(f"{number}  {one.name:18}{figures}  {format_bytes(one.peak_bytes):>8} a rank  {one.reason}")
    if not found.fitting:
        lines.append("none fits")
    slower = len(found.fitting) - SHOWN
    if slower > 0:
        lines.append(f"   and {slower} slower: {', '.join(one.name for one in found.fitting[SHOWN:])}")
    reasons: dict[str, list[str]] = {}
    for left in found.left_out:
        reasons.setdefault(left.reason, []).append(left.name)
    lines += [f"left out  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [f"assumed   {assumption}" for assumption in found.assumptions]
    return "\n".join(lines)
