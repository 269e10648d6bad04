"""What collectives take between ranks that are not here, by known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.parallel.cluster import Cluster, Link, sent_bytes

WITHIN, BETWEEN = (
    Link(latency_seconds=1e-6, bytes_per_second=400.0),
    Link(latency_seconds=1e-3, bytes_per_second=10.0),
)
SIXTEEN = Cluster(ranks=16, ranks_per_machine=8, flops_per_second=1.0, memory_bytes=1, within=WITHIN, between=BETWEEN)


def test_each_of_n_ranks_sends_all_but_its_own_part() -> None:
    assert sent_bytes(4, 1000) == 750
    assert sent_bytes(1, 1000) == 0


def test_a_ring_in_one_machine() -> None:
    group = SIXTEEN.part_of_a_machine(8)
    assert group.all_gather_seconds(800) == pytest.approx(7e-6 + 700 / 400)
    assert group.reduce_scatter_seconds(800) == pytest.approx(group.all_gather_seconds(800))
    assert group.broadcast_seconds(800) == pytest.approx(7e-6 + 800 / 400)
    assert group.all_reduce_seconds(800) == pytest.approx(14e-6 + 1400 / 400)


def test_rings_between_machines_use_the_links_of_all_their_ranks() -> None:
    group = SIXTEEN.group()
    assert group.ranks == 16
    assert group.bytes_per_second == 80
    assert group.all_gather_seconds(1600) == pytest.approx(14e-6 + 1e-3 + 1500 / 80)
    assert SIXTEEN.group(every=8).bytes_per_second == 10, "of each machine one rank"
    fast = replace(SIXTEEN, between=Link(latency_seconds=0, bytes_per_second=1e6))
    assert fast.group().bytes_per_second == 400, "the links within a machine are the narrower ones"


def test_small_tensors_are_reduced_along_a_tree() -> None:
    large = replace(SIXTEEN, ranks=8 * 64)
    one_byte = large.group().all_reduce_seconds(1)
    assert one_byte == pytest.approx(2 * (7e-6 + 6e-3) + 2 / 80)
    assert one_byte < 2 * large.group().all_gather_seconds(1)


def test_a_rank_alone_sends_nothing() -> None:
    alone = Cluster(ranks=1, ranks_per_machine=8, flops_per_second=1.0, memory_bytes=1, start_seconds=5.0)
    group = alone.group()
    assert [group.all_reduce_seconds(9), group.all_gather_seconds(9), group.broadcast_seconds(9)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": 0}, "ranks is 0; it is a whole number of at least 1"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": 12}, "12 ranks, 8 on a machine; every machine has as many; describe 8 ranks"),
        ({"flops_per_second": 0}, "flops_per_second is 0; it is a finite number above 0"),
        ({"flops_per_second": float("nan")}, "flops_per_second is nan"),
        ({"memory_bytes": 0.5}, "memory_bytes is 0.5"),
        ({"memory_bytes_per_second": -1}, "memory_bytes_per_second is -1"),
        ({"start_seconds": float("inf")}, "start_seconds is inf; it is a finite number of at least 0"),
        ({"between": None}, "2 machines, and no link between them"),
        ({"within": None}, "several ranks on a machine, and no link within it"),
    ],
)
def test_impossible_clusters_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(SIXTEEN, **changes)


def test_impossible_links_are_refused() -> None:
    with pytest.raises(UsageError, match="bytes_per_second is 0; it is a finite number above 0"):
        Link(latency_seconds=0, bytes_per_second=0)
    with pytest.raises(UsageError, match="latency_seconds is -1"):
        Link(latency_seconds=-1, bytes_per_second=1)
