"""`flatout tune` moves a script, in a process of its own: tried, kept, proved and measured against the plain one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.processes import Python

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
            time.sleep(0.06)  # the CPU is so slow at this that a busy machine cannot hide it
"""


TUNE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import accelerator
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.tuning.script_tuning import TuneRequest, tune_script
from tests.processes import brief_comparisons, fork_trials

accelerator.build()  # before the trials, whose file system is not the real one
fork_trials(setattr)
brief_comparisons(setattr)
request = TuneRequest(target=Target(path="train.py"), budget_seconds=300, levers=sys.argv[3])
result = tune_script(request, detect())
json.dump(
    {
        "trials": [[one.label, one.outcome, one.reason, one.on_top_of] for one in result.state.trials],
        "observed": result.state.observed.device,
        "planned": result.plan.device,
        "proof": [result.proof.verdict, result.proof.reason] if result.proof else None,
        "comparison": result.final.comparison.verdict if result.final else None,
        "in the parent": "hpu" in sys.modules,
    },
    open("found.json", "w"),
)
"""
"""In a process of its own, because autograd learns of devices once, in the first backward pass."""


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has the stand-in's device or CUDA, not both")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.slow
def test_a_script_is_moved_by_a_plan(tmp_path: Path, python: Python) -> None:
    tests = Path(__file__).parents[1]
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tune.py").write_text(TUNE)
    levers = f"{Path(__file__).parent / 'stand_in_levers.py'}:LEVERS"
    done = python("tune.py", str(tests.parent), str(tests / "levers" / "standins"), levers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (label, outcome, reason, _), *others = found["trials"]
    assert (label, outcome) == ("moved to the GPU", "kept"), reason
    assert found["observed"] == "hpu:0"
    assert all(on_top_of == ["moved to the GPU"] for *_, on_top_of in others)
    assert found["planned"] == "cuda"
    assert found["proof"] is not None
    assert found["proof"][0] in ("within rounding", "bit-identical"), found["proof"]
    assert found["comparison"] == "faster"
    assert not found["in the parent"]
