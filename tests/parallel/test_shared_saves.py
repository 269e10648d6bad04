"""A checkpoint of parameters that are spread over ranks: each rank writes its parts, and it is whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from flatout.checkpoint import folder, shared_saves
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.parts import Box, Part, part_of, read_parts
from flatout.checkpoint.saved import open_checkpoint, write_parts
from flatout.checkpoint.shared_saves import SharedSave
from flatout.errors import MachineError, UsageError
from flatout.machine.ranks import pretended_ranks
from tests.train.conftest import RunRanks

SAVE = """
import pathlib
from flatout import Checkpoints, Plan, TrainStep, capture, restore
from flatout.errors import FlatoutError
folder, mode = sys.argv[4:6]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))  # 3 rows: the ranks hold 2 and 1
whole = {name: one.detach().clone() for name, one in model.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), Plan(parallel="fsdp"))
checkpoints = Checkpoints(folder, asynchronous=mode == "asynchronous")
checkpoints.save(capture(step), step=0)
checkpoints.wait()
step(torch.randn(2, 5))
state = capture(step)
before = [one.full_tensor() for one in model.parameters()]
if mode == "fails" and rank == 1:
    import flatout.checkpoint.folder as place
    def full(*_, **__):
        raise OSError(28, "No space left on device")
    place.write_parts = full
try:
    checkpoints.save(state, step=1)
    if mode == "asynchronous":
        step(torch.randn(2, 5))  # what is saved is what was captured
    checkpoints.wait()
except (FlatoutError, OSError) as error:
    print(type(error).__name__, error)
restore(state, step)
if mode != "asynchronous":
    assert all(torch.equal(one.full_tensor(), two) for one, two in zip(model.parameters(), before))
if rank == 0:
    torch.save([whole, before], folder + ".pt")
leave()
"""


@pytest.mark.parametrize("mode", ["plain", "asynchronous"])
def test_what_ranks_save_is_whole_for_one_process(run_ranks: RunRanks, tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run"
    assert run_ranks(SAVE, 2, folder, mode) == [(0, "", "")] * 2
    first, later = torch.load(f"{folder}.pt")
    checkpoints = Checkpoints(folder)
    assert checkpoints.at(0).files.keys() >= {"part-00000.safetensors", "part-00001.safetensors"}
    begun = checkpoints.at(0).load()["model"]
    assert all(torch.equal(begun[name], first[name]) for name in first)
    newest = checkpoints.load()
    assert newest is not None
    assert newest.step == 1
    assert all(map(torch.equal, newest.state["model"].values(), later))
    assert newest.state["optimizer"]["state"][0]["exp_avg"].shape == (6, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 3))
    model.load_state_dict(newest.state["model"])


def test_a_part_that_is_missing_is_no_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (code, said, errors), (_, other, _) = run_ranks(SAVE, 2, folder, "fails")
    assert (code, errors) == (0, "")
    assert said.startswith(
        "MachineError rank 1 could not write its part of the checkpoint: OSError: [Errno 28] No space"
    )
    assert other.startswith("OSError [Errno 28] No space left on device")
    assert [path.name for path in folder.iterdir()] == ["000001-step-0"]


def test_damaged_parts_are_told(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_ranks(SAVE, 2, folder, "plain") == [(0, "", "")] * 2
    newest = Checkpoints(folder).at(1)
    part = newest.folder / "part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(UsageError, match=r"part-00001\.safetensors is damaged: its checksum"):
        open_checkpoint(newest.folder).load()
    with pytest.warns(UserWarning, match="step 0 is loaded"):
        loaded = Checkpoints(folder).load()
    assert loaded is not None
    assert loaded.step == 0
    manifest = json.loads((loaded.checkpoint.folder / "manifest.json").read_text())
    assert manifest["flatout"]["schema"] == 2


def test_a_key_of_the_users_is_not_taken_for_a_part(tmp_path: Path) -> None:
    extra = {"spread": [1, 2], "dict": {"spread": [("a", 3)]}}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"extra": extra}, step=1)
    assert checkpoints.at(1).load() == {"extra": extra}


def _part(local: torch.Tensor, whole: torch.Size, offset: tuple[int, ...]) -> Part:
    return Part(local=local, shape=whole, boxes=(Box((0,) * local.ndim, tuple(local.shape), offset),))


def test_copies_of_parts_are_one_part(tmp_path: Path) -> None:
    """Two by two ranks: each half of the rows is on two of them."""
    whole = torch.randn(4, 3)
    halves = [_part(whole[at : at + 2], whole.shape, (at, 0)) for at in (0, 2)]
    parts = [halves[0], halves[1], replace(halves[0], first_copy=False), halves[1]]
    names = [write_parts(tmp_path, rank, {"w": part})[0] for rank, part in enumerate(parts)]
    read = read_parts([tmp_path / name for name in names], {"w": ([4, 3], "float32")})
    assert torch.equal(read["w"], whole)
    with safe_open(tmp_path / names[2], framework="pt") as file:
        assert list(file.keys()) == []
    write_parts(tmp_path, 9, {"w": _part(whole[:2], whole.shape, (1, 0))})
    with pytest.raises(ValueError, match="the parts of w are not the whole"):
        read_parts([*tmp_path.glob("part-*")], {"w": ([4, 3], "float32")})


def test_of_a_mesh_of_two_dimensions_the_first_ranks_write() -> None:
    with pretended_ranks(4):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2))
        spread = distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        part = part_of(spread)
        assert part is not None
        assert (part.local.shape, part.boxes[0].offset, part.first_copy) == ((2, 3), (0, 0), True)


class Ranks:
    """Three ranks in one process, which save in the background."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, self._here = torch.distributed.HashStore(), 0
        monkeypatch.setattr(shared_saves, "POLL_SECONDS", 0.002)
        monkeypatch.setattr(shared_saves, "joined_rank", lambda: self._here)
        monkeypatch.setattr(shared_saves, "joined_ranks", lambda: 3)
        monkeypatch.setattr(shared_saves, "default_store", lambda: store)
        self._checkpoints = [Checkpoints(folder, asynchronous=True, rank=rank) for rank in range(3)]

    def save(self, step: int) -> list[int]:
        """Which ranks raised an error."""
        raised = []
        for rank, checkpoints in enumerate(self._checkpoints):
            self._here = rank
            part = _part(torch.full((1,), float(step)), torch.Size([3]), (rank,))
            try:
                checkpoints.save({"model": {"w": part}}, step=step)
            except (MachineError, OSError):
                raised.append(rank)
        return raised

    def wait(self) -> None:
        for checkpoints in self._checkpoints:
            checkpoints.wait()


def test_after_a_failure_the_ranks_save_the_same_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, write, failed = Ranks(tmp_path, monkeypatch), folder.write_parts, []

    def fails_once(place: Path, rank: int, parts: Any) -> Any:
        if rank == 1 and not failed:
            failed.append(rank)
            raise OSError(5, "Input/output error")
        return write(place, rank, parts)

    monkeypatch.setattr(folder, "write_parts", fails_once)
    assert ranks.save(1) == []
    assert ranks.save(2) == [0, 1]  # what failed before; rank 2 does not know of it, and saves nothing either
    assert ranks.save(3) == []
    ranks.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-3"]
    assert Checkpoints(tmp_path).at(3).load()["model"]["w"].tolist() == [3.0, 3.0, 3.0]


def test_ranks_that_save_different_steps_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, store = [0], torch.distributed.HashStore()
    monkeypatch.setattr(shared_saves, "joined_rank", lambda: here[0])
    monkeypatch.setattr(shared_saves, "joined_ranks", lambda: 2)
    monkeypatch.setattr(shared_saves, "default_store", lambda: store)
    first, here[0] = SharedSave(), 1
    other = SharedSave()
    first.begin(tmp_path, 20)
    with pytest.raises(MachineError, match=r"rank 0 saves step 20, and rank 1 step 10; .*on every rank"):
        other.write(lambda place: pytest.fail("it was written"), 10)
    with pytest.raises(MachineError, match="rank 1 could not write its part of the checkpoint: MachineError: rank 0"):
        first.collected(tmp_path)
