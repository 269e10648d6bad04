"""A script that would train on the GPU and is planned for the CPU, on a real GPU where there is one."""

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
import torch
torch.manual_seed(0)
device = "cuda" if torch.cuda.device_count() else "cpu"
model = torch.nn.Linear(16, 4)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range({steps}):
    x = torch.randn(8, 16).to(device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(device, loss.item())
"""


def flatout(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "flatout", *arguments]
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "FLATOUT_CACHE_DIR": str(folder / ".cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_hides_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(steps=50))
    (tmp_path / "plan.toml").write_text('schema = 2\n[plan]\ndevice = "cpu"\n')
    plain = flatout(tmp_path, "run", "--no-plan", "train.py").split()
    planned = flatout(tmp_path, "run", "--plan", "plan.toml", "--trust-plan", "train.py").split()
    assert (plain[0], planned[0]) == ("cuda", "cpu")
    assert float(planned[1]) == pytest.approx(float(plain[1]), rel=1e-3)


def test_tune_tries_it_where_a_step_is_small(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(steps=10**9))
    flatout(tmp_path, "tune", "--budget", "120", "train.py")
    report = json.loads((tmp_path / "flatout-report.json").read_text())
    trials = {trial["label"]: trial for trial in report["trials"]}
    assert trials["trained on the CPU"]["comparison"]["ratio"] > 0
