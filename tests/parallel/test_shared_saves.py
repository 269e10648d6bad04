"""A checkpoint of parameters that are spread over ranks: each rank writes its parts, and it is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.saved import open_checkpoint
from flatout.errors import UsageError
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
