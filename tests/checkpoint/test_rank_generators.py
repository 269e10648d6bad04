"""Whose random states a rank goes on from; two ranks played by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from flatout.checkpoint import rank_generators
from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.errors import UsageError


class Ranks:
    """`here` says which of how many this process is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        self.here = 0, 1
        monkeypatch.setattr(rank_generators, "joined_rank", lambda: self.here[0])
        monkeypatch.setattr(rank_generators, "joined_ranks", lambda: self.here[1])
        monkeypatch.setattr("flatout.checkpoint.folder.joined_rank", lambda: self.here[0])
        monkeypatch.setattr(rank_generators, "default_store", lambda: store)


@pytest.fixture(params=["file", "tcp"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    if request.param == "tcp":
        return Ranks(monkeypatch, distributed.TCPStore("127.0.0.1", 0, is_master=True))
    return Ranks(monkeypatch, distributed.FileStore(str(tmp_path / "store"), 1))


def captured(ranks: Ranks, count: int) -> tuple[list[dict[str, Any]], list[float]]:
    """What each rank captures, and draws next; rank 0 the last, as it waits for the others."""
    states, draws = [], []
    for rank in reversed(range(count)):
        ranks.here = rank, count
        torch.manual_seed(rank)
        states.insert(0, capture())
        draws.insert(0, float(torch.rand(1)))
    return states, draws


def test_each_rank_goes_on_from_its_own(ranks: Ranks, tmp_path: Path) -> None:
    for _ in range(2):  # each capture by itself
        states, draws = captured(ranks, 3)
    for rank in range(3):
        ranks.here = rank, 3
        Checkpoints(tmp_path / "run").save(states[rank], step=1)  # rank 0 alone writes
        loaded = Checkpoints(tmp_path / "run").load()
        assert loaded is not None
        assert loaded.checkpoint.folder.name == "000001-step-1"
        restore(loaded)
        assert float(torch.rand(1)) == draws[rank]
        restore(states[rank])  # kept in memory by the rank itself
        assert float(torch.rand(1)) == draws[rank]


def test_further_ranks_get_states_of_their_own(ranks: Ranks) -> None:
    states, draws = captured(ranks, 2)
    found = []
    for rank in (0, 1, 2, 3, 3):
        ranks.here = rank, 4
        torch.manual_seed(99 + len(found))
        if rank == 0:
            with pytest.warns(UserWarning, match="states were saved: 2; ranks here: 4; the additional ones get"):
                restore(states[0])
        else:
            restore(states[0])
        found.append(float(torch.rand(1)))
    assert found[:2] == draws
    assert len(set(found)) == 4
    assert found[3] == found[4]


def test_the_states_of_one_further_rank_alone(ranks: Ranks) -> None:
    states, _ = captured(ranks, 2)
    ranks.here = 0, 2
    with pytest.warns(UserWarning, match="states are those of rank 1 alone, not of rank 0, which gets new ones"):
        restore(states[1])


def test_a_rank_that_does_not_capture_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_generators, "WAIT_SECONDS", 0.2)
    ranks.here = 0, 2
    with pytest.raises(UsageError, match=r"not on rank 1; .* every rank; call capture\(\) on all ranks"):
        capture()


def test_states_of_another_rank_that_do_not_fit(ranks: Ranks) -> None:
    states, _ = captured(ranks, 2)
    states[0]["generators"]["other_ranks"] = [{"torch": 1}]
    ranks.here = 1, 2
    with pytest.raises(UsageError, match="generators=False"):
        restore(states[0])


def test_a_run_on_a_gpu_of_another_number_has_that_ones_state(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["first GPU", "second GPU"]
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["as it is here"])
    saved = {"cuda": gpus, "cuda_device": 1}
    expected = {0: ["second GPU", "first GPU"], 1: gpus}
    for here, states in expected.items():
        monkeypatch.setattr(rank_generators, "_gpu_of", lambda model, here=here: here)
        assert rank_generators._on_this_gpu(saved, None)["cuda"] == states
    alone = {"cuda": ["its GPU"], "cuda_device": 0}
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["as it is here", "as this one is"])
    assert rank_generators._on_this_gpu(alone, None)["cuda"] == ["as this one is", "its GPU"]
    for unknown in ({}, {"cuda": gpus}, {"cuda": gpus, "cuda_device": None}, {"cuda": gpus, "cuda_device": 7}):
        assert rank_generators._on_this_gpu(unknown, None) is unknown
