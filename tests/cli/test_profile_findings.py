"""`flatout profile` says what is wrong with a script, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.in_process import said_by

pytestmark = pytest.mark.usefixtures("forked_trials")

LOOP = """
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
losses = []
for step in range(120):
    x = torch.randn(16, 32)
    {clear}
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append({kept})
"""


def findings(folder: Path, **parts: str) -> dict[str, list[int]]:
    """Name of each finding -> its lines."""
    (folder / "train.py").write_text(LOOP.format(**parts))
    result = said_by(folder, "profile", "--json", "train.py")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["behaviour"]["notes"] == []
    return {one["name"]: [line[1] for line in one["lines"]] for one in found["findings"]}


def test_faults_have_their_lines(tmp_path: Path) -> None:
    found = findings(tmp_path, clear="pass", kept="loss")
    assert found["missing-zero-grad"][0] == 15
    assert found["graph-kept-by-logging"] == [16]


def test_a_healthy_script_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, clear="optimizer.zero_grad()", kept="loss.item()") == {}
