"""`flatout run` by a plan that holds a loss in chunks: a smaller process from its first step, and the same losses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import Python

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
torch.set_num_threads(1)
V, E = 16384, 32
def peak():  # not getrusage's, which keeps what the process that started this one held
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(V, E), nn.LayerNorm(E), nn.Linear(E, V, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x, y):
        logits = self.head(self.norm(self.embed(x)))
        return logits, functional.cross_entropy(logits.view(-1, V), y.view(-1), ignore_index=-1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
before = peak()
for step in range(3):
    x = torch.randint(0, V, (4, 256))
    logits, loss = model(x, x.roll(1, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(logits.argmax(-1).sum().item() > 0)
print(peak() - before)
"""
SCORES_BYTES = 4 * 256 * 16384 * 4


def run(python: Python, folder: Path, *options: str) -> list[str]:
    words = ["-m", "flatout", "run", *options, "--report", "run.json", "train.py"]
    done = python(*words, cwd=folder, env={**os.environ, "FLATOUT_CACHE_DIR": str(folder / ".cache")})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_peak_falls_and_the_losses_stay(tmp_path: Path, python: Python) -> None:
    script = SCRIPT.replace("print(logits", "# print(logits")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "plan.toml").write_text('schema = 1\n[plan]\nloss = "chunked"\n')
    plain = run(python, tmp_path, "--no-plan")
    chunked = run(python, tmp_path, "--plan", "plan.toml", "--trust-plan")
    seen = json.loads((tmp_path / "run.json").read_text())
    assert (seen["applied"], seen["rolled_back"]) == (["fused linear + cross-entropy"], [])
    assert [float(line) for line in chunked[:3]] == pytest.approx([float(line) for line in plain[:3]], rel=1e-6)
    assert int(plain[-1]) - int(chunked[-1]) > 2 * SCORES_BYTES - (64 << 20)


@pytest.mark.slow
def test_scores_that_are_looked_at_once_training_is_over_are_the_scripts(tmp_path: Path, python: Python) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text('schema = 1\n[plan]\nloss = "chunked"\n')
    assert (
        run(python, tmp_path, "--plan", "plan.toml", "--trust-plan")[3]
        == run(python, tmp_path, "--no-plan")[3]
        == "True"
    )
