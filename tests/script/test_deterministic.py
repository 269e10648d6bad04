"""Runs that repeat themselves to the bit, and what is said of those that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.cli.run_devices import determinism_text
from flatout.environment import DETERMINISTIC, deterministic_environment
from flatout.levers.subject import Subject
from flatout.script.deterministic import weights_digests
from flatout.script.deterministic_check import DeterminismCheck
from tests.cli.in_process import said_by
from tests.processes import Python

ASKS_OUTSIDE = """
import socket
socket.create_connection(("192.0.2.1", 80), timeout=5)
"""

SCRIPT = """
import random, numpy, torch
from torch import nn
print(torch.are_deterministic_algorithms_enabled(), hash("a"), random.random(), numpy.random.rand())
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {}
print(loss.item())
torch.manual_seed(7)
print(torch.rand(1).item())
"""


def flatout_run(folder: Path, option: str, line: str = "pass") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.format(line))
    command = [sys.executable, "-m", "flatout", "run", "--no-report", option, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_two_runs_print_the_same_and_the_scripts_own_seed_wins(tmp_path: Path) -> None:
    assert_the_same(*(flatout_run(tmp_path, "--deterministic") for _ in range(2)))


@pytest.mark.slow
def test_so_they_do_where_the_environment_is_given(tmp_path: Path, python: Python) -> None:
    """They need not start anew for it, and can be forked."""
    (tmp_path / "train.py").write_text(SCRIPT.format("pass"))
    environment: Mapping[str, str] = {**os.environ, **DETERMINISTIC}
    words = ("-m", "flatout", "run", "--no-report", "--deterministic", "train.py")
    assert_the_same(*python.together(words, words, cwd=tmp_path, env=environment))


def assert_the_same(first: subprocess.CompletedProcess[str], second: subprocess.CompletedProcess[str]) -> None:
    assert first.stdout == second.stdout, first.stderr
    assert first.stdout.startswith("True ")
    torch.manual_seed(7)
    assert float(first.stdout.splitlines()[-1]) == torch.rand(1).item()


@pytest.mark.usefixtures("forked_trials")
def test_a_check_proves_equal_bits_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format("open('written.txt', 'w').close()"))
    done = said_by(tmp_path, "run", "--no-report", "--check-deterministic", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("deterministic: after 6 steps two runs are bit-identical in 2 tensors\ncost: ")
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))", "put_ does not have a deterministic"),
        ("model.weight.data.add_(__import__('time').time_ns() % 1000)", "two runs differ in Linear.weight"),
    ],
    ids=["an operation", "the clock"],
)
@pytest.mark.usefixtures("forked_trials")
def test_what_cannot_be_deterministic_is_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(line))
    done = said_by(tmp_path, "run", "--check-deterministic", "train.py")
    assert done.returncode == 1, done.stderr
    assert told in done.stdout


@pytest.mark.usefixtures("forked_trials")
def test_each_run_of_a_check_reads_what_is_piped_in_and_stops_at_the_same_step(tmp_path: Path) -> None:
    script = SCRIPT.format("").replace("range(6)", "range(10_000)")
    (tmp_path / "train.py").write_text(f"import sys\nassert len(sys.stdin.readlines()) == 3\n{script}")
    done = said_by(tmp_path, "run", "--check-deterministic", "train.py", stdin="a\nb\nc\n")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("deterministic: after 40 steps two runs are bit-identical in 2 tensors\n")


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    made = deterministic_environment()
    assert made is not None
    assert (made["PYTHONHASHSEED"], made["CUBLAS_WORKSPACE_CONFIG"]) == ("5", ":4096:8")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert deterministic_environment() is None
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    made = deterministic_environment()
    assert made is not None
    assert (made["PYTHONHASHSEED"], made["CUBLAS_WORKSPACE_CONFIG"]) == ("0", ":16:8")


def test_digests_tell_bits_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    subject = Subject()
    subject.modules.add(model)
    before = dict(weights_digests(subject))
    assert len(before) == 6
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
    after = dict(weights_digests(subject))
    assert [name for name in before if before[name] != after[name]] == ["Sequential.0.weight"]


def test_two_models_of_one_class_are_told_apart() -> None:
    subject = Subject()
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for model in models:
        subject.modules.add(model)
    assert [name for name, _ in weights_digests(subject)] == ["Linear.weight", "Linear.weight #2"]


def test_a_cost_that_is_not_known_is_said_to_be() -> None:
    found = DeterminismCheck(equal=True, steps=40, tensors=3, differing=(), cost=None, error=None)
    assert "cost: not known" in determinism_text(found)


@pytest.mark.usefixtures("forked_trials")
def test_a_script_that_needs_the_network_is_told_how_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS_OUTSIDE)
    refused = said_by(tmp_path, "run", "--check-deterministic", "train.py")
    assert refused.returncode == 1
    assert "the script fails by itself: OSError" in refused.stderr
    assert "--allow-network" in refused.stderr


def test_a_plain_run_needs_no_leave_for_the_network(tmp_path: Path) -> None:
    done = flatout_run(tmp_path, "--allow-network", "open('ran.txt', 'w').close()")
    assert done.returncode == 2
    assert "--allow-network without --check-deterministic or --prove; a run has the network in any case" in done.stderr
    assert not (tmp_path / "ran.txt").exists()
