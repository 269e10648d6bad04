"""`flatout tune` moves a script, in a process of its own: tried, kept, proved and measured against the plain one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.tune.tune import TuneRequest, tune

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
right = 0
while True:
    for x, y in DataLoader(data, 16, shuffle=True):
        scores = model(x)
        loss = torch.nn.functional.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += int((scores.argmax(1) == y).sum())
        if model[0].weight.is_cpu:
            time.sleep(0.02)  # the CPU is slow at this
"""


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_script_is_moved_by_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "levers" / "standins"))
    import accelerator

    accelerator.build()  # before the trials, whose file system is not the real one
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    levers = f"{Path(__file__).parent / 'stand_in_levers.py'}:LEVERS"
    result = tune(TuneRequest(target=Target(path="train.py"), budget_seconds=25, levers=levers), detect(), print)
    moved, *others = result.state.trials
    assert (moved.label, moved.outcome) == ("moved to the GPU", "kept"), moved.reason
    assert result.state.observed.device == "hpu:0"
    assert all(trial.on_top_of == ("moved to the GPU",) for trial in others)
    assert result.plan.device == "cuda"
    assert result.proof is not None
    assert result.proof.verdict in ("within rounding", "bit-same"), result.proof.reason
    assert result.final is not None
    assert result.final.comparison.verdict == "faster"
    assert "hpu" not in sys.modules
