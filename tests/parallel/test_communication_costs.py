"""What collectives take between ranks, and what of that is exposed in a step, by known answers."""

from __future__ import annotations

import pytest

from flatout.parallel.communication_costs import Group, Link, RankStep, exchange, sent_bytes, where_time_goes


def test_each_of_n_ranks_sends_all_but_its_own_part() -> None:
    assert sent_bytes(4, 1000) == 750
    assert sent_bytes(1, 1000) == 0


def test_a_ring() -> None:
    group = Group(ranks=8, link=Link(latency_seconds=1e-6, bytes_per_second=400.0))
    assert group.all_gather_seconds(800) == pytest.approx(7e-6 + 700 / 400)
    assert group.reduce_scatter_seconds(800) == pytest.approx(group.all_gather_seconds(800))
    assert group.broadcast_seconds(800) == pytest.approx(7e-6 + 800 / 400)
    assert group.all_reduce_seconds(800) == pytest.approx(14e-6 + 1400 / 400)
    assert group.all_gather_seconds(0) == 0, "nothing is sent"


def test_what_is_exposed_of_a_step() -> None:
    """With links that take a second for what each rank sends of the gradients, beside a backward pass of two."""
    group = Group(ranks=2, link=Link(latency_seconds=0, bytes_per_second=4e8))
    step = RankStep(parameters=1e8, blocks=4, block_parameters=1e8, forward_seconds=1, backward_seconds=2)
    ddp, zero1, fsdp = (exchange(sharing, step, group) for sharing in ("ddp", "zero1", "fsdp"))
    assert ddp == pytest.approx((1, 1 / 16)), "the last of 16 buckets"
    assert zero1 == pytest.approx((2, 1 / 16 + 1)), "a broadcast carries all of it"
    assert fsdp == pytest.approx((1.5, 3 / 8))


def test_where_the_time_of_a_step_goes() -> None:
    assert where_time_goes(3, 1.0, 0.25) == "compute 3 s, 250 ms of communication exposed (75% hidden)"
    assert where_time_goes(3, 0.0, 0.0) == "compute 3 s"
