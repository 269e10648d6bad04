"""A preflight, as a screen for people."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.parallel.preflight import LEAST_RATIOS, Preflight, Slow
from flatout.parallel.rank_timings import CollectiveTiming, Fit, RankTiming
from flatout.statistics import iqr, median
from flatout.terminal import printable
from flatout.units import format_bytes, format_rate, format_seconds, labelled

RULE = (
    f"slow is called what takes {LEAST_RATIOS['compute']} times as long as the others (latency: "
    f"{LEAST_RATIOS['latency']:.0f}), outside of their spread"
)


def preflight_text(found: Preflight) -> str:
    """Ranks, links, collectives, then what stands out."""
    timings = found.timings
    rows = [("ranks", _ranks(timings.ranks, timings.backend)), ("product", _products(timings.ranks))]
    links = [
        f"{where}: {format_rate(link.bytes_per_second, 'B/s')}, latency {format_seconds(link.latency_seconds)}"
        for where, link in (("within a machine", found.within), ("between machines", found.between))
        if link is not None
    ]
    if timings.pairs and not links:
        links = ["not known: large messages took less than twice as long as small ones"]
    rows += labelled("links", links)
    for one in timings.collectives:
        rows.append((one.name, _collective(one, found.fits.get(one.name))))
    rows += labelled("slow", [_slow_text(one, timings.ranks) for one in found.slow] or ["none stands out"])
    rows.append(("", RULE))
    rows += labelled("unknown", found.not_judged)
    return "\n".join(f"{label:<16}{printable(text)}" for label, text in rows)


def _ranks(ranks: Sequence[RankTiming], backend: str) -> str:
    machines = len({one.machine for one in ranks})
    devices = ", ".join(sorted({one.device for one in ranks}))
    count = f"{len(ranks)} on {machines} machine{'s' * (machines != 1)}"
    return f"{count} · {devices}" + (f" · {backend}" if len(ranks) > 1 else "")


def _products(ranks: Sequence[RankTiming]) -> str:
    medians = {one.rank: median(one.product_seconds) for one in ranks}
    slowest = max(medians, key=lambda rank: medians[rank])
    threads = ranks[0].threads
    each = f"{threads} thread{'s' * (threads != 1)} each" if ranks[0].device == "cpu" else "one product each"
    own = median([*medians.values()])
    if len(ranks) == 1:
        return f"{format_seconds(own)} ({each})"
    return f"{format_seconds(own)} median of the ranks, {format_seconds(medians[slowest])} on rank {slowest} ({each})"


def _collective(timing: CollectiveTiming, fitted: Fit | None) -> str:
    if not timing.sizes:
        return timing.missing
    parts = []
    if fitted is not None:
        parts.append(
            f"{format_seconds(fitted.latency_seconds)} + bytes / {format_rate(fitted.bytes_per_second, 'B/s')}"
            f" (error {fitted.error:.0%})"
        )
    largest = timing.sizes[-1]
    spread = f" (middle half within {format_seconds(iqr(largest.samples_seconds))})"
    once = len(largest.samples_seconds) == 1
    parts.append(
        f"{format_bytes(largest.size_bytes)} in {format_seconds(largest.median_seconds)}{' once' if once else spread}"
    )
    return "; ".join([*parts, *([timing.missing] if timing.missing else [])])


def _slow_text(slow: Slow, ranks: Sequence[RankTiming]) -> str:
    by = "machine" if slow.kind == "machine" else "rank"
    hosts = {getattr(one, by): one.host for one in reversed(ranks)}
    who = " and ".join(f"{by} {number} ({hosts[number]})" for number in slow.numbers)
    who = f"the link between {who}" if slow.kind == "link" else who
    compared = f"{slow.ratio:.1f} times as long as the others: {format_seconds(slow.seconds)}"
    compared += f", theirs {format_seconds(slow.others_seconds)}"
    what = {"compute": "computes", "bandwidth": "sends large messages", "latency": "sends small messages"}[slow.what]
    return f"{who} {what} {compared}"
