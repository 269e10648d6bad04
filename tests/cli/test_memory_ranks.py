"""`flatout memory` of scripts that train in several processes: each by itself, one report; nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.in_process import Said, said_by
from tests.cli.rank_script import rank_script

pytestmark = pytest.mark.slow

RANKS = """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4 + 60 * (1 - rank if kind == "leaks" else rank), 64)
        model(inputs).square().mean().backward()
        optimizer.step()
        if kind == "leaks" and rank == 1:
            kept.append(inputs)
        if step == 4 and kind == "dies":
            os._exit(3) if rank else time.sleep(600)
"""


def ranks(folder: Path, kind: str, *options: str, steps: int = 100_000, method: str = "spawn") -> Said:
    (folder / "train.py").write_text(rank_script(RANKS))
    return said_by(folder, "memory", *options, "train.py", kind, str(steps), method)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_a_script_starts_are_side_by_side(method: str, tmp_path: Path) -> None:
    said = ranks(tmp_path, "train", "--json", method=method)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    first, second = found["ranks"]
    assert (first["name"], second["name"]) == ("rank 0", "rank 1")
    for one, samples in ((first, 4), (second, 64)):
        categories = one["use"]["peak"]["categories"]
        assert categories["weights"] == 4 * (64 * 64 + 64)
        assert categories["inputs"] == 4 * 64 * samples
        assert (one["steps"], one["leaks"]["verdict"], one["fault"]) == (10, "steady", None)
        assert not any("gradients freed" in saving["measure"] for saving in one["use"]["savings"])  # ranks add them up
    assert found["shown_rank"] == "rank 1"  # its batches are larger
    assert found["use"] == second["use"]
    assert not (tmp_path / "store").exists()  # a trial leaves nothing


def test_what_leaks_in_one_rank_alone_is_told(tmp_path: Path) -> None:
    said = ranks(tmp_path, "leaks")
    assert said.returncode == 0, said.stderr
    assert "in 2 processes; below is rank 0" in said.stdout
    assert "rank 1: held by `kept` (list, " in said.stdout
    assert "kept.append(inputs)" in said.stdout


def test_a_script_that_is_too_short_says_what_was_seen(tmp_path: Path) -> None:
    said = ranks(tmp_path, "train", steps=5)
    assert said.returncode == 0, said.stderr
    assert "5 steps, 2 of them to warm up, in 2 processes" in said.stdout
    assert "the script exited on its own with code 0" in said.stdout


def test_a_rank_that_dies_ends_the_trial(tmp_path: Path) -> None:
    said = ranks(tmp_path, "dies")
    assert said.returncode == 1
    assert "which the script started to train in, died before being followed" in said.stderr
