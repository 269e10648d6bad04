"""The costs of strategies, by known answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.parallel.estimates import Cluster, Workload, estimate
from flatout.errors import UsageError
from flatout.parallel.communication_costs import BUCKET_BYTES, Link

MILLION = 1_000_000
BLOCKS_ONLY = Workload(
    name="blocks",
    parameters=100 * MILLION,
    blocks=10,
    block_parameters=100 * MILLION,
    flops_per_sample=6e12,
    activation_bytes_per_sample=1e9,
    hidden_bytes_per_sample=1e6,
    heads=8,
)
FREE = Link(latency_seconds=0, bytes_per_second=1e30)
CLUSTER = Cluster(
    ranks=16,
    ranks_per_machine=8,
    flops_per_second=1e12,
    memory_bytes=40 * 10**9,
    within=Link(latency_seconds=1e-6, bytes_per_second=100e9),
    between=Link(latency_seconds=10e-6, bytes_per_second=10e9),
)
PARAMETER_BYTES = 400 * MILLION


def test_what_is_sent() -> None:
    """2 (n-1)/n of the gradients; with zero1 the parameters too; with fsdp parameters twice and gradients once."""
    share = 15 / 16
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp").communication_bytes == 2 * share * PARAMETER_BYTES
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "zero1").communication_bytes == 3 * share * PARAMETER_BYTES
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "fsdp").communication_bytes == 3 * share * PARAMETER_BYTES
    half = replace(BLOCKS_ONLY, gathered_bytes=2, compute_bytes=2)
    assert estimate(half, CLUSTER, 32, "fsdp").communication_bytes == 2 * share * PARAMETER_BYTES


def test_what_is_outside_of_blocks_is_gathered_once() -> None:
    outside = replace(BLOCKS_ONLY, parameters=150 * MILLION)
    expected = 15 / 16 * (3 * PARAMETER_BYTES + 2 * PARAMETER_BYTES / 2)
    assert estimate(outside, CLUSTER, 32, "fsdp").communication_bytes == expected


def test_tensor_parallel_ranks_exchange_hidden_states_beside_a_part_of_the_gradients() -> None:
    found = estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp", tensor_ranks=8)
    hidden = 10 * 4 * 2 * 7 / 8 * (16 * 1e6)
    assert (found.replicas, found.samples_per_replica) == (2, 16)
    assert found.communication_bytes == hidden + 2 * 1 / 2 * PARAMETER_BYTES / 8


@pytest.mark.parametrize("sharing", ["ddp", "zero1", "fsdp"])
def test_free_communication_leaves_compute(sharing: Any) -> None:
    found = estimate(BLOCKS_ONLY, replace(CLUSTER, within=FREE, between=FREE), 32, sharing)
    assert found.compute_seconds == pytest.approx(2 * 6.0)
    assert found.step_seconds == pytest.approx(12.0)
    assert found.samples_per_second == pytest.approx(32 / 12)


def test_what_is_computed_again_takes_its_time() -> None:
    again = replace(BLOCKS_ONLY, recomputed_flops_per_sample=2e12)
    assert estimate(again, CLUSTER, 32, "ddp").compute_seconds == pytest.approx(2 * 8.0)


def test_all_but_the_last_bucket_is_hidden_behind_a_long_backward_pass() -> None:
    found = estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp")
    buckets = -(-PARAMETER_BYTES // BUCKET_BYTES)
    last = CLUSTER.group().all_reduce_seconds(PARAMETER_BYTES / buckets)
    assert found.communication_seconds == pytest.approx(buckets * last)
    assert found.exposed_seconds == pytest.approx(last)


def test_communication_that_takes_longer_than_compute_is_exposed() -> None:
    slow = Link(latency_seconds=0, bytes_per_second=1e6)
    found = estimate(BLOCKS_ONLY, replace(CLUSTER, within=slow, between=slow), 32, "ddp")
    buckets = -(-PARAMETER_BYTES // BUCKET_BYTES)
    assert found.communication_seconds == pytest.approx(2 * 15 / 16 * 400)
    hidden = 8.0 * (buckets - 1) / buckets  # two samples' backward pass, but for its first bucket
    assert found.exposed_seconds == pytest.approx(found.communication_seconds - hidden)


def test_fsdp_exposes_the_first_gathers_and_the_last_scatter() -> None:
    group = CLUSTER.group()
    one = group.all_gather_seconds(PARAMETER_BYTES / 10)
    found = estimate(BLOCKS_ONLY, CLUSTER, 32, "fsdp")
    assert found.communication_seconds == pytest.approx(10 * 3 * one)
    assert found.exposed_seconds == pytest.approx(3 * one)


def test_fsdp_with_a_slow_network_takes_its_time() -> None:
    slow = Link(latency_seconds=0, bytes_per_second=1e6)
    found = estimate(BLOCKS_ONLY, replace(CLUSTER, within=slow, between=slow), 32, "fsdp")
    gather = 15 / 16 * 40
    # Beside each of 9 blocks forward a gather, beside 8 backward two transfers, beside the outer two backward one.
    hidden = 9 * 0.4 + 10 * 0.8
    assert found.communication_seconds == pytest.approx(30 * gather)
    assert found.exposed_seconds == pytest.approx(30 * gather - hidden)


def test_the_update_reads_and_writes_what_a_rank_keeps() -> None:
    with_memory = replace(CLUSTER, memory_bytes_per_second=1e9)
    assert estimate(BLOCKS_ONLY, with_memory, 32, "ddp").update_seconds == pytest.approx(0.1 * (2 * 12 + 4))
    assert estimate(BLOCKS_ONLY, with_memory, 32, "zero1").update_seconds == pytest.approx(0.1 * 28 / 16)
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp").update_seconds == 0


def test_memory_by_category() -> None:
    gradients, moments = PARAMETER_BYTES, 2 * PARAMETER_BYTES
    expected = {"weights": PARAMETER_BYTES, "gradients": gradients, "activations": 2e9, "temporaries": 0}
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp").memory == {**expected, "optimizer": moments}
    assert estimate(BLOCKS_ONLY, CLUSTER, 32, "zero1").memory == {**expected, "optimizer": moments / 16}
    sharded = estimate(BLOCKS_ONLY, CLUSTER, 32, "fsdp")
    assert sharded.peak_at == "the start of the backward pass"
    assert sharded.memory == {
        "weights": PARAMETER_BYTES / 16,
        "optimizer": moments / 16,
        "activations": 2e9,
        "temporaries": 0,
        "gathered": 2 * PARAMETER_BYTES / 10,
    }
    few = replace(BLOCKS_ONLY, activation_bytes_per_sample=0)
    assert estimate(few, CLUSTER, 32, "fsdp").peak_at == "the end of the backward pass"


def test_autocast_keeps_a_copy() -> None:
    cast = estimate(replace(BLOCKS_ONLY, compute_bytes=2), CLUSTER, 32, "ddp")
    assert cast.memory["temporaries"] == PARAMETER_BYTES / 2
    gathered = replace(BLOCKS_ONLY, compute_bytes=2, gathered_bytes=2)
    assert estimate(gathered, CLUSTER, 32, "fsdp").memory["temporaries"] == 0


def test_what_does_not_fit_says_what_it_needs() -> None:
    small = replace(CLUSTER, memory_bytes=3 * 2**30)
    found = estimate(BLOCKS_ONLY, small, 32, "ddp")
    assert not found.fits
    assert found.reason == "needs 3.35 GiB of 3 GiB, 1.86 GiB of it for activations"
    assert estimate(BLOCKS_ONLY, small, 32, "fsdp").fits
    json.dumps(found.to_json(), allow_nan=False)


def test_one_rank_sends_nothing() -> None:
    alone = Cluster(ranks=1, ranks_per_machine=1, flops_per_second=1e12, memory_bytes=40 * 10**9)
    found = estimate(BLOCKS_ONLY, alone, 1, "ddp")
    assert found.communication_seconds == 0
    assert found.reason == "compute 6 s"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": 0}, "parameters is 0; it is a whole number of at least 1"),
        ({"blocks": 0}, "blocks is 0"),
        ({"block_parameters": 200 * MILLION}, "block_parameters is 200000000; the model has 100000000 parameters"),
        ({"flops_per_sample": 0.0}, "flops_per_sample is 0.0; it is above 0, and finite"),
        ({"flops_per_sample": float("nan")}, "flops_per_sample is nan"),
        ({"activation_bytes_per_sample": -1.0}, "activation_bytes_per_sample is -1.0; it is 0 or more, and finite"),
        ({"heads": 0}, "heads is 0"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(BLOCKS_ONLY, **changes)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 17 is not divisible by 16 replicas"):
        estimate(BLOCKS_ONLY, CLUSTER, 17, "ddp")
    with pytest.raises(UsageError, match="3 does not divide the 8 ranks of a machine"):
        estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp", tensor_ranks=3)
    with pytest.raises(UsageError, match="0 does not divide"):
        estimate(BLOCKS_ONLY, CLUSTER, 32, "ddp", tensor_ranks=0)
    with pytest.raises(UsageError, match="8 does not divide the model's 4 heads"):
        estimate(replace(BLOCKS_ONLY, heads=4), CLUSTER, 24, "ddp", tensor_ranks=8)
    with pytest.raises(UsageError, match="it is not known how the model's layers are split"):
        estimate(replace(BLOCKS_ONLY, hidden_bytes_per_sample=None), CLUSTER, 32, "ddp", tensor_ranks=8)
    with pytest.raises(UsageError, match="batch_size is 0"):
        estimate(BLOCKS_ONLY, CLUSTER, 0, "ddp")


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
        ({"within": Link(latency_seconds=-1, bytes_per_second=1)}, "latency_seconds is -1"),
        (
            {"within": Link(latency_seconds=0, bytes_per_second=0)},
            "bytes_per_second is 0; it is a finite number above 0",
        ),
        ({"within": None}, "several ranks on a machine, and no link within it"),
    ],
)
def test_impossible_clusters_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(SIXTEEN, **changes)


# clusters

WITHIN, BETWEEN = (
    Link(latency_seconds=1e-6, bytes_per_second=400.0),
    Link(latency_seconds=1e-3, bytes_per_second=10.0),
)
SIXTEEN = Cluster(ranks=16, ranks_per_machine=8, flops_per_second=1.0, memory_bytes=1, within=WITHIN, between=BETWEEN)


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
