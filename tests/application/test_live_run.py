"""A run while it goes on, as its own process keeps it: states, the panel's lines, and the process of the page."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.application import live_run
from flatout.application.live_run import LiveRun, RunPanel, ranks_panel, start_page
from flatout.errors import MachineError
from flatout.machine.processes import pid_namespace, process_started
from flatout.machine.sensors import Reading
from flatout.script.entry import Target
from flatout.script.process_record import ProcessRecord
from flatout.script.replicas.settings import RUN_FOLDER
from flatout.script.runner import Runner
from flatout.serve.run_folder import StateFile, read_ranks, read_run
from tests.live_states import gpu_reading, reading, run_state


class Source:
    def read(self, *, processes: bool = False) -> Reading:
        assert not processes  # finding their names takes long
        return reading(1.0, gpu_reading(1.0))

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def live(runner: Runner, *arguments: str) -> LiveRun:
    return LiveRun(Target(path="train.py", arguments=arguments), runner, plan=None, notes=())


def test_states_are_written_from_the_start_to_the_end() -> None:
    runner = Runner()
    run = live(runner, "--key", "secret")
    assert run.folder is not None
    assert read_run(run.folder).condition == "running"
    for _ in range(7):
        runner.watch.finder.optimizer_stepped(1)
    runner.record.steps, runner.record.recent_seconds = 7, 0.5
    (second,) = runner.at_second
    second(1.0)
    assert read_run(run.folder).state.steps == 7
    run.end(3)
    seen = read_run(run.folder)
    assert (seen.condition, seen.state.status, seen.state.steps) == ("ended", 3, 7)
    assert "secret" not in (run.folder / "state.json").read_text()


def test_a_process_that_gets_little_of_the_processor_writes_fewer_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes 1 ms of processor time here, and the process gets 0.1 s of it in each second."""
    runner = Runner()
    run = live(runner)
    clock, made = [0.0], []
    run._imported = True

    def update() -> None:
        made.append(1)
        clock[0] += 0.001

    monkeypatch.setattr(run, "_update_with_own_imports", update)
    monkeypatch.setattr(live_run.time, "thread_time", lambda: clock[0])
    for second in range(100, 200):
        runner.at_second[0](float(second))
        clock[0] += 0.1
    assert len(made) == 20
    made.clear()
    for second in range(200, 300):
        runner.at_second[0](float(second))
        clock[0] += 1.0
    assert len(made) == 100


def test_a_folder_that_cannot_be_had_leaves_the_panel(runs: Path) -> None:
    runs.write_text("a file")
    run = live(Runner())
    assert (run.folder, bool(run.fault)) == (None, True)
    assert RunPanel(run.seen, None, Source()).lines(80, 3) == [" flatout · waiting for the first step"]
    run.end(0)


def test_a_defect_of_ours_reaches_neither_the_script_nor_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    run = live(runner)

    def fail(**_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(run._states, "now", fail)
    runner.at_second[0](1.0)
    assert run.fault == "ZeroDivisionError: a defect"


def test_a_forked_child_writes_no_end() -> None:
    run = live(Runner())
    assert run.folder is not None
    run._owner = os.getpid() + 1
    run.end(0)
    assert not read_run(run.folder).state.ended


def test_the_panel_reads_the_sensors_now_and_then() -> None:
    run = live(Runner())
    asked = []

    class Counting(Source):
        def read(self, *, processes: bool = False) -> Reading:
            asked.append(1)
            return super().read(processes=processes)

    panel = RunPanel(run.seen, None, Counting())
    run.latest = run_state(device="cuda:0")
    for _ in range(10):
        first, second = panel.lines(200, 3)
    assert len(asked) == 1
    assert first.startswith(" flatout · step 1,234 · 12.5 ms")
    assert "GPU 0 · 98% busy" in second
    assert len(panel.lines(80, 1)) == 1
    panel.close()


def rank_record(rank: int) -> ProcessRecord:
    return ProcessRecord(
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        pid_namespace=pid_namespace(),
        rank=rank,
        ranks=2,
        started_at=0.0,
        steps=7,
        step_seconds=0.01,
        device="cpu",
        peak_resident_bytes=1 << 20,
    )


def test_the_process_that_started_the_ranks_has_their_panel(tmp_path: Path, runs: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    panel = ranks_panel(ranks, None)
    assert panel.lines(80, 6) == [""]  # the first rank has not begun
    file = StateFile(runs)
    file.write(run_state(ranks_folder=str(ranks)))
    for rank in range(2):
        text = json.dumps(rank_record(rank).to_json())
        (ranks / f"process-rank-{rank}.json").write_text(text)
    (ranks / RUN_FOLDER).write_text(str(file.folder))
    lines = panel.lines(80, 6)
    assert lines[0].startswith(" flatout · 2 ranks · step 7")
    assert [line[:8] for line in lines[1:]] == [" rank 0 ", " rank 1 "]
    panel.close()
    assert file.folder is not None
    found = read_ranks(read_run(file.folder))
    assert [one.condition for one in found.ranks] == ["running", "running"]


def test_the_page_has_a_process_of_its_own(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "runs")
    file.write(run_state(ended=True, status=0))
    assert file.folder is not None
    url = start_page(file.folder, linger_seconds=3.0)
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{url}state", timeout=20) as answer:
        assert json.load(answer)["condition"] == "ended"
    assert not [one for one in psutil.Process().children() if "flatout.serve" in one.cmdline()]


def test_a_page_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is not the folder of a run"):
        start_page(tmp_path)


def test_a_page_whose_process_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "child_command", lambda *_: ["/bin/true"])
    with pytest.raises(MachineError, match="ended before it served anything"):
        start_page(tmp_path)
