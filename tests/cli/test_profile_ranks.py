"""`flatout profile` of scripts that train in several processes: each by itself, one report; nothing hangs."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.cli.in_process import Said, said_by
from tests.cli.rank_script import rank_script
from tests.processes import Python

pytestmark = pytest.mark.slow

RANKS = """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    if kind == "never":
        time.sleep(600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        time.sleep(0.02 * rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 6 and kind == "dies":
            os._exit(3) if rank else time.sleep(600)
"""
PLAIN = """
    import torch
    from torch.utils.data import DataLoader
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4){layer})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in DataLoader(torch.randn(4 * {steps}, 4), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


def ranks(folder: Path, kind: str, steps: int = 100_000, *options: str) -> Said:
    (folder / "train.py").write_text(rank_script(RANKS))
    return said_by(folder, "profile", *options, "train.py", kind, str(steps))


def test_ranks_that_a_script_starts_are_side_by_side(tmp_path: Path) -> None:
    said = ranks(tmp_path, "train", 100_000, "--json")
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert [one["name"] for one in found["processes"]] == ["rank 0", "rank 1"]
    assert [one["name"] for one in found["rank_profiles"]] == ["rank 0", "rank 1"]
    for one in found["rank_profiles"]:
        exchanged = one["profile"]["communication"]
        assert exchanged["collectives"][0]["name"] == "gloo:all_reduce"
        assert exchanged["exposed_seconds"] <= exchanged["total_seconds"]
    balance = found["rank_balance"]
    assert (balance["straggler"], balance["part"], balance["certain"]) == ("rank 1", "other", True)
    assert "straggler" in [one["name"] for one in found["findings"]]
    assert not (tmp_path / "store").exists()  # a trial leaves nothing


def test_a_script_that_is_too_short_is_started_again(tmp_path: Path) -> None:
    said = ranks(tmp_path, "train", 12)
    assert said.returncode == 0, said.stderr
    assert "the script ends after 12 steps: 4 of the 5 asked for were profiled, in a second run of it" in said.stdout
    assert "rank 1" in said.stdout


def test_a_rank_that_dies_ends_the_trial(tmp_path: Path) -> None:
    said = ranks(tmp_path, "dies")
    assert said.returncode == 1
    assert "which the script started to train in, died before being profiled" in said.stderr


def test_ranks_that_never_train_end_with_the_patience(tmp_path: Path) -> None:
    said = ranks(tmp_path, "never", 9, "--patience", "15s")
    assert said.returncode == 1
    assert "did not take the steps of a profile in 15 s" in said.stderr


@pytest.mark.parametrize("steps", [100, 12])
def test_a_script_for_one_device_on_two(steps: int, tmp_path: Path, python: Python) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PLAIN.format(layer="", steps=steps)))
    done = python("-m", "flatout", "profile", "--devices", "2", "--json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["ranks"] for one in found["processes"]] == [2, 2]
    assert all(one["profile"]["steps"] == (5 if steps == 100 else 4) for one in found["rank_profiles"])
    assert found["rank_balance"] is not None


def test_what_several_devices_cannot_do_is_refused_with_the_remedy(tmp_path: Path, python: Python) -> None:
    layer = ", torch.nn.BatchNorm1d(4)"
    (tmp_path / "train.py").write_text(textwrap.dedent(PLAIN.format(layer=layer, steps=100)))
    done = python("-m", "flatout", "profile", "--devices", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "--allow-local-batchnorm" in done.stderr
