"""A script for the CPU, run on a real GPU where there is one: numbers as on the CPU, the model on the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SCRIPT = """
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 4)
        self.scale = torch.full((8, 1, 1), 1.5)
    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x))) * self.scale
        return self.last(h.flatten(1) + torch.arange(8 * 36) / 100)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
criterion = nn.CrossEntropyLoss()
x, y = torch.randn(64, 1, 8, 8), torch.randint(0, 4, (64,))
for epoch in range(3):
    for inputs, targets in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        out = model(inputs)
        loss = criterion(out, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (out.argmax(1) == targets).float().mean().item()
        assert isinstance(out.detach().numpy(), numpy.ndarray)
        print(loss.item())
torch.save(model.state_dict(), "weights.pt")
print(*{p.is_cuda for p in model.parameters()})
"""


def run(folder: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "flatout", "run", *options, "--report", "run.json", "train.py"]
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "FLATOUT_CACHE_DIR": str(folder / ".cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_trains_there_with_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text('schema = 1\n[plan]\ndevice = "cuda"\n')
    plain = run(tmp_path, "--no-plan")
    moved = run(tmp_path, "--plan", "plan.toml", "--trust-plan")
    seen = json.loads((tmp_path / "run.json").read_text())
    assert (plain[-1], moved[-1]) == ("False", "True"), seen["rolled_back"]
    assert seen["applied"] == ["moved to the GPU"]
    losses = [[float(line) for line in lines[:-1]] for lines in (plain, moved)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert all(one.device.type == "cpu" for one in torch.load(tmp_path / "weights.pt").values())
