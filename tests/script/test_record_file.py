"""Ranks that one launcher has started, each of them `flatout run`: one reports for all."""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from pathlib import Path

import pytest

from flatout.machine.processes import pid_namespace, process_started
from flatout.script import record_file
from flatout.script.process_record import ProcessRecord
from flatout.script.record_file import last_records, launchers_folder, records_of_others
from flatout.script.run_folders import old_folders
from tests.processes import Python


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(tmp_path / "runs"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


def write(folder: Path, rank: int, *, ended: bool, here: bool = True) -> None:
    one = ProcessRecord(
        pid=os.getpid(),
        process_started=process_started(os.getpid()) if here else "another",
        pid_namespace=pid_namespace(),
        rank=rank,
        ranks=2,
        started_at=0.0,
        steps=1,
        step_seconds=0.1,
        device="cpu",
        peak_resident_bytes=1,
        ended=ended,
    )
    (folder / f"process-rank-{rank}.json").write_text(json.dumps(one.to_json()))


def test_it_is_that_of_the_launcher_and_is_removed_with_those_of_runs(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launchers_folder() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launchers_folder() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = launchers_folder()
    assert folder is not None
    assert folder == launchers_folder()
    assert (folder.parent, folder.name.split("-")[1]) == (runs, str(os.getppid()))
    assert folder.stat().st_mode & 0o077 == 0
    assert old_folders(runs, kept_seconds=0.0) == []  # the launcher is there
    folder.rename(folder.with_name("run-4000000-1"))
    assert old_folders(runs, kept_seconds=0.0) == [runs / "run-4000000-1"]


def test_a_folder_that_cannot_be_had_is_done_without(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    runs.write_text("a file")
    assert launchers_folder() is None


def test_the_last_records_of_the_others_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, ended=False)
    write(tmp_path, 1, ended=False)
    monkeypatch.setattr(record_file, "END_SECONDS", 100.0)
    assert [(one.rank, one.ended) for one in records_of_others(tmp_path, 0)] == [(1, False)]  # as they are now
    ends = threading.Timer(0.2, lambda: write(tmp_path, 1, ended=True))
    ends.start()
    assert [(one.rank, one.ended) for one in last_records(tmp_path, 0)] == [(1, True)]
    ends.join()
    write(tmp_path, 1, ended=False, here=False)
    assert [one.ended for one in last_records(tmp_path, 0)] == [False]  # it is gone: nothing more will come
    write(tmp_path, 1, ended=False)
    monkeypatch.setattr(record_file, "END_SECONDS", 0.1)
    began = time.monotonic()
    assert [one.ended for one in last_records(tmp_path, 0)] == [False]  # it goes on, but not for ever
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_rank_0_reports_for_the_ranks_of_torchrun(tmp_path: Path, python: Python) -> None:
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flatout", "run", "train.py"]
    done = python(*words, cwd=tmp_path, env={**os.environ, "FLATOUT_RUNS_DIR": str(tmp_path / "runs")})
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "flatout-run.json").read_text())
    assert [(one["name"], one["steps"], one["ended"]) for one in seen["processes"]] == [
        ("rank 0", 40, True),
        ("rank 1", 40, True),
    ]
    assert seen["rank_balance"] is not None
