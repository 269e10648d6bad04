"""What stands out among timings that are made up, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations

import pytest

from flatout.decoding import decode
from flatout.parallel.preflight import Preflight, Slow, judged
from flatout.parallel.rank_timings import CollectiveTiming, PairTiming, RankTiming, SizeTiming, Timings
from flatout.report.preflight_text import preflight_text

SPREAD = (0.95, 0.98, 1.0, 1.0, 1.02, 1.1, 3.0)
"""A disturbed sample among them."""
SIZES = tuple(1024 * 4**power for power in range(9))
Factor = Callable[[int, int], float]


def samples(seconds: float) -> tuple[float, ...]:
    return tuple(seconds * one for one in SPREAD)


def timings(
    count: int,
    *,
    per_machine: int = 8,
    compute: Callable[[int], float] = lambda rank: 1.0,
    large: Factor = lambda a, b: 1.0,
    small: Factor = lambda a, b: 1.0,
) -> Timings:
    """Of so many ranks; the functions give how many times as long a rank or a pair takes."""

    def between(a: int, b: int) -> float:
        return 1.0 if a // per_machine == b // per_machine else 10.0

    return Timings(
        backend="gloo",
        ranks=tuple(
            RankTiming(
                rank=rank,
                machine=rank // per_machine,
                host=f"host-{rank // per_machine}",
                device="cpu",
                threads=1,
                product_seconds=samples(0.002 * compute(rank)),
            )
            for rank in range(count)
        ),
        collectives=tuple(
            CollectiveTiming(
                name=name,
                sizes=tuple(SizeTiming(size_bytes=size, samples_seconds=samples(1e-4 + size / 1e9)) for size in SIZES),
            )
            for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        ),
        pairs=tuple(
            PairTiming(
                ranks=(a, b),
                small_bytes=1024,
                small_seconds=samples(1e-4 * between(a, b) * small(a, b)),
                large_bytes=1 << 20,
                large_seconds=samples(1e-3 * between(a, b) * large(a, b)),
            )
            for a, b in combinations(range(count), 2)
        ),
        seconds=9.0,
    )


def named(found: Preflight) -> list[tuple[str, tuple[int, ...], str]]:
    return [(one.kind, one.numbers, one.what) for one in found.slow]


def test_equal_ranks_have_none_that_stands_out() -> None:
    found = judged(timings(8))
    assert found.slow == ()
    assert found.not_judged == ()
    assert "slow            none stands out" in preflight_text(found)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slow_rank_is_named(count: int) -> None:
    found = judged(timings(count, compute=lambda rank: 1.6 if rank == 1 else 1.0))
    assert named(found) == [("rank", (1,), "compute")]
    assert found.slow[0].ratio == pytest.approx(1.6)
    assert "rank 1 (host-0) computes 1.6 times as long as the others: 3.2 ms, theirs 2 ms" in preflight_text(found)


def test_a_rank_that_is_a_little_slower_is_not_named() -> None:
    assert judged(timings(8, compute=lambda rank: 1.25 if rank == 1 else 1.0)).slow == ()


def test_a_rank_within_the_spread_of_the_others_is_not_named() -> None:
    wide = timings(4, compute=lambda rank: (1.0, 1.0, 4.0, 1.9)[rank])
    found = [slow.numbers for slow in judged(wide).slow]
    assert found == [(2,)], "rank 3 takes as long as some of what rank 2 is among"


def test_a_slow_link_is_named() -> None:
    found = judged(timings(5, large=lambda a, b: 3.0 if (a, b) == (1, 3) else 1.0))
    assert named(found) == [("link", (1, 3), "bandwidth")]
    said = "the link between rank 1 (host-0) and rank 3 (host-0) sends large messages 3.0 times as long"
    assert said in preflight_text(found)


def test_a_rank_whose_every_link_is_slow_is_named_and_not_its_links() -> None:
    found = judged(timings(5, large=lambda a, b: 3.0 if 2 in (a, b) else 1.0))
    assert named(found) == [("rank", (2,), "bandwidth")]


def test_a_machine_whose_every_link_is_slow_is_named_and_not_its_ranks() -> None:
    slow = timings(8, per_machine=2, large=lambda a, b: 4.0 if a // 2 != b // 2 and 3 in (a // 2, b // 2) else 1.0)
    found = judged(slow)
    assert named(found) == [("machine", (3,), "bandwidth")]
    assert "machine 3 (host-3) sends large messages 4.0 times as long" in preflight_text(found)


def test_links_between_machines_are_not_compared_with_those_within() -> None:
    assert judged(timings(8, per_machine=2)).slow == ()


def test_latency_has_to_be_three_times_as_long() -> None:
    assert judged(timings(5, small=lambda a, b: 2.7 if (a, b) == (0, 4) else 1.0)).slow == ()
    found = judged(timings(5, small=lambda a, b: 5.0 if (a, b) == (0, 4) else 1.0))
    assert named(found) == [("link", (0, 4), "latency")]


def test_what_cannot_be_compared_says_why() -> None:
    found = judged(timings(2))
    assert found.not_judged == ("links within a machine: 1, and one stands out among 3 or more",)
    assert "unknown         links within a machine: 1" in preflight_text(found)
    assert judged(timings(1)).not_judged == ("ranks and links: there is one rank",)
    assert judged(timings(3, per_machine=1)).slow == ()


def test_links_for_a_plan() -> None:
    found = judged(timings(16))
    assert found.within is not None
    assert found.between is not None
    slope = 9e-4 / ((1 << 20) - 1024)
    assert found.within.bytes_per_second == pytest.approx(1 / slope)
    assert found.within.latency_seconds == pytest.approx(1e-4 - 1024 * slope)
    assert found.between.bytes_per_second == pytest.approx(found.within.bytes_per_second / 10)
    assert judged(timings(8)).between is None
    alike = judged(timings(3, small=lambda a, b: 9.0))
    assert alike.within is None
    assert "links           not known: large messages took less than twice as long" in preflight_text(alike)


def test_collectives_are_fitted() -> None:
    found = judged(timings(4)).fits["all_gather"]
    assert found is not None
    assert found.bytes_per_second == pytest.approx(1e9)
    assert found.latency_seconds == pytest.approx(1e-4)


def test_a_preflight_is_one_screen_and_a_document() -> None:
    found = judged(timings(16))
    assert 8 <= len(preflight_text(found).splitlines()) <= 20
    written = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert judged(decode(Timings, written["timings"])) == found
    slow = Slow(kind="link", numbers=(0, 1), what="latency", seconds=2.0, others_seconds=1.0)
    assert slow.to_json()["ratio"] == 2
