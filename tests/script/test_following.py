"""Training in processes that the script starts: each is watched, one report; everything else is as without Flatout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.plan import Plan
from flatout.script import child_hook
from flatout.script.child_hook.sitecustomize import when_first_optimizer
from flatout.script.process_record import ProcessRecord, in_order, own_spread, process_names, step_spread
from tests.processes import Python

HOOK = os.path.dirname(child_hook.__file__)

WORKER = """
    import os, sys, time
    import torch, torch.distributed as dist

    def train(rank, steps=40, end=""):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=os.environ.get("STORE", "env://"), rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            time.sleep(0.012 * rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
        if end == "kill" and rank == 1:
            os.kill(os.getpid(), 9)

    if __name__ == "__main__":
        train(int(os.environ["RANK"]))
"""
START = """
    import os, sys
    import torch.multiprocessing as mp
    from worker import train

    if __name__ == "__main__":
        os.environ["STORE"] = "file://" + os.path.abspath("store")
        context = mp.get_context(sys.argv[1])
        started = [context.Process(target=train, args=(rank, 40, sys.argv[2])) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        print([process.exitcode for process in started], os.environ.get("PYTHONPATH"))
"""


def trained(
    folder: Path, python: Python, *words: str, start: str = START, options: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    (folder / "worker.py").write_text(textwrap.dedent(WORKER))
    (folder / "train.py").write_text(textwrap.dedent(start))
    done = python("-m", "flatout", "run", *options, "train.py", *words, cwd=folder)
    return done, json.loads((folder / "flatout-run.json").read_text())


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_each_process_that_trains_has_a_row(method: str, tmp_path: Path, python: Python) -> None:
    done, seen = trained(tmp_path, python, method, "")
    assert (done.returncode, done.stdout) == (0, f"[0, 0] {os.environ.get('PYTHONPATH')}\n")
    assert [(one["rank"], one["steps"], one["ended"]) for one in seen["processes"]] == [(0, 40, True), (1, 40, True)]
    assert seen["process_spread"]["outside_backward"]["slowest"] == "rank 1"  # though both wait for it in backward
    assert seen["process_spread"]["step"]["share"] < 0.5
    balance = seen["rank_balance"]
    assert (balance["straggler"], balance["part"]) == ("rank 1", "other")  # it sleeps outside of everything
    names = {one["name"] for one in seen["findings"]}
    assert (seen["steps"], "no-step" in names, "straggler" in names) == (0, False, True)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_last_record(tmp_path: Path, python: Python) -> None:
    done, seen = trained(tmp_path, python, "fork", "kill")
    assert done.stdout.startswith("[0, -9]")
    assert [(one["rank"], one["ended"]) for one in seen["processes"]] == [(0, True), (1, False)]


@pytest.mark.slow
def test_that_the_plan_is_not_applied_there_is_said(tmp_path: Path, python: Python) -> None:
    (tmp_path / "flatout.toml").write_text(Plan(optimizer="fused").to_toml())
    done, seen = trained(tmp_path, python, "fork", "", options=["--trust-plan"])
    said = "the plan was not applied in 2 processes that the script started to train in"
    said += ": it does not say which loop was tuned"
    assert (done.returncode, said in seen["plan_notes"]) == (0, True)
    assert f"flatout: {said}" in done.stderr.splitlines()


@pytest.mark.slow
def test_ranks_under_a_launcher_that_the_script_starts_are_followed(tmp_path: Path, python: Python) -> None:
    launch = """
        import subprocess, sys
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "worker.py"]
        raise SystemExit(subprocess.run(command).returncode)
    """
    done, seen = trained(tmp_path, python, start=launch)
    assert done.returncode == 0
    assert [(one["rank"], one["steps"]) for one in seen["processes"]] == [(0, 40), (1, 40)]


@pytest.mark.slow
def test_ranks_of_torchrun_itself_are_followed(tmp_path: Path, python: Python) -> None:
    """It gives them an environment of their own."""
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "worker.py"]
    done = python("-m", "flatout", "run", *words, cwd=tmp_path)
    seen = json.loads((tmp_path / "flatout-run.json").read_text())
    assert done.returncode == 0
    assert [(one["rank"], one["ranks"], one["steps"]) for one in seen["processes"]] == [(0, 2, 40), (1, 2, 40)]


@pytest.mark.slow
def test_ranks_on_several_devices_have_a_row_each(tmp_path: Path, python: Python) -> None:
    trains = """
        import torch
        from torch.utils.data import DataLoader
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in DataLoader(torch.randn(160, 4), batch_size=4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(trains))
    done = python("-m", "flatout", "run", "--devices", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "flatout-run.json").read_text())
    found = [(one["name"], one["steps"], one["ranks"], one["ended"]) for one in seen["processes"]]
    assert found == [("rank 0", 40, 2, True), ("rank 1", 40, 2, True)]
    assert all(one["exposed_seconds"] > 0 for one in seen["processes"])
    assert seen["rank_balance"] is not None


def test_workers_of_a_loader_are_not_followed(tmp_path: Path, python: Python) -> None:
    loads = """
        import torch
        from torch.utils.data import DataLoader
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        for x in DataLoader(torch.ones(20, 1), batch_size=2, num_workers=2):
            model(x).sum().backward()
            optimizer.step()
    """
    _, seen = trained(tmp_path, python, start=loads)
    assert seen["steps"] == 10
    assert "processes" not in seen


LOOK = "import sys; print(sys.path, sys.modules.get('sitecustomize'))"


@pytest.mark.parametrize("own", [True, False])
def test_a_child_has_the_users_sitecustomize_and_path(own: bool, tmp_path: Path) -> None:
    if own:
        (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)\n")
    plain = {**os.environ, "PYTHONPATH": str(tmp_path)}
    outputs = [
        subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True, timeout=60)
        for env in (plain, {**plain, "PYTHONPATH": os.pathsep.join([HOOK, str(tmp_path)])})
    ]
    assert (outputs[0].stdout, outputs[0].stderr) == (outputs[1].stdout, outputs[1].stderr)
    assert ("mine sitecustomize" in outputs[1].stdout) == own


def test_a_child_starts_in_a_folder_that_was_removed(tmp_path: Path) -> None:
    leave = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    command = [sys.executable, "-c", f"{leave}; os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])"]
    env = {**os.environ, "PYTHONPATH": HOOK}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert (found.stdout, found.stderr) == ("5\n", "")


def test_the_first_optimizer_calls_once_and_leaves_torch_as_it_was() -> None:
    import torch

    original, calls = torch.optim.Optimizer.__init__, list[int]()
    when_first_optimizer(lambda: calls.append(1))
    with pytest.raises(ValueError, match="empty parameter list") as refused:
        torch.optim.SGD([])
    assert torch.optim.Optimizer.__init__ is original
    assert not any(str(entry.path).startswith(HOOK) for entry in refused.traceback)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert calls == [1]


def record(rank: int | None, pid: int = 1, **changes: Any) -> ProcessRecord:
    parts = {"data": 0.001, "backward": 0.002}
    common: dict[str, Any] = {"started_at": float(pid), "steps": 9, "step_seconds": 0.003, "parts": parts}
    return ProcessRecord(rank=rank, pid=pid, device="cpu", peak_resident_bytes=1 << 20, **{**common, **changes})


def test_the_scripts_own_process_comes_first_and_then_ranks() -> None:
    own = record(None, 9, started_by_script=False)
    ordered = in_order([record(1, 2), record(None, 5), record(0, 3), own])
    assert [one.pid for one in ordered] == [9, 3, 2, 5]
    assert process_names(ordered) == ["the script", "rank 0 (3)", "rank 1 (2)", "process 5"]
    assert process_names([record(0), record(1)]) == ["rank 0", "rank 1"]


def test_spreads_are_unknown_where_fewer_than_two_ranks_are_known() -> None:
    assert step_spread([record(0), record(1, step_seconds=None)]) is None
    assert own_spread([record(0), record(1, parts={})]) is None
    spread = own_spread([record(0), record(1, parts={"data": 0.003, "backward": 0.0})])
    assert spread is not None
    assert (spread.slowest, spread.fastest) == ("rank 1", "rank 0")
    assert spread.share == pytest.approx(2)


def test_a_record_is_read_back() -> None:
    one = record(3, fault="it broke", peak_device_bytes=5)
    assert ProcessRecord.from_json(json.loads(json.dumps(one.to_json()))) == one
