"""`flatout run` by a plan that has a number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.application.applied_plan import AppliedPlan
from flatout.cli.run_devices import _planned, run_on_devices
from flatout.errors import UsageError
from flatout.machine.detect import detect, usable_cores
from flatout.plan import Plan, write_plan
from flatout.script.child_command import child_command
from flatout.script.entry import Target

TARGET = Target(path="train.py")
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
model = nn.Linear(6, 3)
optimizer = torch.optim.Adam(model.parameters())
for a, b in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(a), b).backward()
    optimizer.step()
print(f"{model.weight.sum().item():.5f}")
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`planned(devices=2)`: flatout.toml of train.py in the current folder, measured here."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)

    def planned(*, elsewhere: bool = False, **choices: int) -> None:
        machine = detect()
        plan = Plan(
            **choices,  # type: ignore[arg-type]
            script="train.py",
            machine_fingerprint="another" if elsewhere else machine.fingerprint,
            torch_version=machine.versions.torch,
        )
        write_plan("flatout.toml", plan)

    return planned


def test_the_number_of_devices_is_that_of_the_plan(
    planned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(devices=2)
    assert _planned(TARGET, {}) == 2
    assert _planned(TARGET, {"--device": "cpu"}) == 2
    assert _planned(TARGET, {"--plan": "flatout.toml"}) == 2


def test_a_plan_without_one_a_left_out_one_or_no_plan_start_one_process(planned: Callable[..., None]) -> None:
    planned(threads=1)
    assert _planned(TARGET, {}) is None
    planned(devices=2)
    for options in ({"--no-plan": ""}, {"--without": "devices"}, {"--device": "cuda:0"}):
        assert _planned(TARGET, options) is None
        assert run_on_devices(TARGET, options) is None
    assert _planned(Target(path="other.py"), {}) is None
    assert run_on_devices(TARGET, {"--devices": "1"}) is None


def test_a_plan_from_another_machine_starts_as_many_only_where_it_is_trusted(planned: Callable[..., None]) -> None:
    planned(devices=2, elsewhere=True)
    assert _planned(TARGET, {}) is None
    assert _planned(TARGET, {"--trust-plan": ""}) == 2


def test_a_machine_with_fewer_devices_is_named(planned: Callable[..., None]) -> None:
    count = usable_cores() + 1
    planned(devices=count)
    with pytest.raises(UsageError, match=f"the plan's devices is {count}, and .*--without devices trains on one"):
        run_on_devices(TARGET, {"--device": "cpu"})


def test_options_of_several_devices_need_them(planned: Callable[..., None]) -> None:
    planned(threads=1)
    with pytest.raises(UsageError, match="--loss without --devices"):
        run_on_devices(TARGET, {"--loss": "sum"})


@pytest.mark.parametrize(
    ("plan", "count", "left", "said"),
    [
        (Plan(devices=2, threads=1, precision="bf16"), 2, {"threads": 1, "precision": "bf16"}, []),
        (
            Plan(devices=2, threads=1),
            3,
            {},
            ["the plan is for 2 devices, and 3 train", "left out, because several devices train: threads"],
        ),
        (
            Plan(threads=2, allocator="retain"),
            2,
            {},
            ["left out, because several devices train: allocator, threads"],
        ),
    ],
)
def test_what_ranks_apply_of_a_plan(plan: Plan, count: int, left: dict[str, object], said: list[str]) -> None:
    found = AppliedPlan(TARGET, visible_before=None, announce=print, while_verifying=pytest.fail)  # type: ignore[arg-type]
    found.plan = plan
    found.for_ranks(count, on_cpu=True)
    assert found.plan is not None
    assert (found.plan.choices(), found.notes) == (left, said)


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or usable_cores() < 2, reason="needs namespaces of Linux, and two cores"
)
def test_a_run_by_such_a_plan_is_one_on_several_devices(planned: Callable[..., None]) -> None:
    planned(devices=2)
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = child_command("flatout", "run", *options, "train.py")
        return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)

    several, one = run("--device", "cpu"), run("--devices", "1")
    assert (several.returncode, several.stdout) == (0, one.stdout), several.stderr
    assert "on 2 devices, as the plan says (--without devices trains on one)" in several.stderr
    assert "2 ranks trained" in several.stderr
    assert "left out, because --devices is 1: devices" in one.stderr
