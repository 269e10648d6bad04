"""macOS and Windows, as far as a Linux machine can show: their missing modules and functions are hidden, their name is
pretended. Nothing here ran on them."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

import flatout
from flatout.cli.main import main
from flatout.errors import MachineError
from tests.processes import Python

# What torch and the standard library need of these is loaded first.
WINDOWS = """
import importlib, os, pkgutil, signal, socket, subprocess, sys, warnings
import multiprocessing.util, numpy, psutil, rich, torch, torch.utils.data, typer
for name in [name for name in sys.modules if name.partition(".")[0] == "flatout"]:
    del sys.modules[name]  # of the process that this one was forked from
for name in ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp"):
    sys.modules[name] = None
for module, names in {
    os: "fork sched_getaffinity getuid geteuid getgid register_at_fork killpg setsid openpty",
    signal: "SIGHUP SIGKILL SIGALRM SIGWINCH pthread_sigmask",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        delattr(module, name)
warnings.simplefilter("ignore")
import flatout
"""
EVERY_MODULE = """
failed = []
for found in pkgutil.walk_packages(flatout.__path__, "flatout.", onerror=failed.append):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except Exception as error:
            failed.append((found.name, repr(error)))
assert not failed, failed
"""
LIBRARY = """
from flatout.environment import cache_dir
from flatout.machine import detect, process_memory
assert detect.usable_cores() >= 1
assert detect.memory_left()[1] > 0
assert cache_dir()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_fn = flatout.supervised(torch.nn.CrossEntropyLoss())
batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
plan = flatout.Plan.from_toml(flatout.Plan(precision="bf16").to_toml())
step = flatout.TrainStep(model, optimizer, loss_fn, plan)
assert flatout.forecast(step, batch).peak_bytes > 0
for batch in flatout.batches(batch, 4, plan, seed=0):
    assert torch.isfinite(step(batch))
"""


@pytest.mark.slow
def test_modules_plan_step_and_forecast_need_no_posix(tmp_path: Path, python: Python) -> None:
    done = python("-c", WINDOWS + LIBRARY + EVERY_MODULE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("platform", "name", "remedy"), [("win32", "Windows", "WSL 2"), ("darwin", "macOS", "virtual machine")]
)
def test_tune_refuses_before_it_starts_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w').close()")
    tune, _ = flatout.tune, sysconfig.get_config_vars()  # torch is loaded as it is for Linux
    monkeypatch.setattr(sys, "platform", platform)
    for call in (
        lambda: main(["tune", "train.py"]),
        lambda: main(["memory", "train.py"]),
        lambda: tune(str(script)),
    ):
        with pytest.raises(MachineError, match=name) as refused:
            call()
        assert remedy in str(refused.value)
        assert "WSL" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
