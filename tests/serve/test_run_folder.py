"""The folder of a run's state: private, whole, and no harm to a run where it cannot be had."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.script import run_folders
from flatout.script.run_folders import KEPT_SECONDS, STATE, remove_old
from flatout.serve.run_folder import StateFile, all_runs, find_run, read_run
from tests.live_states import run_state


def test_a_state_is_kept_for_its_user_alone_and_read_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "runs")
    assert file.folder is not None
    file.write(run_state())
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700
    assert stat.S_IMODE(file.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((file.folder / STATE).stat().st_mode) == 0o600
    assert [path.name for path in file.folder.iterdir()] == [STATE]
    (seen,) = all_runs(tmp_path / "runs")
    assert (seen.state, seen.condition, seen.folder) == (run_state(), "running", str(file.folder))


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for number, started in ((1, 100.0), (2, 300.0), (3, 200.0)):
        _planted(tmp_path, f"run-{number}-5", run_state(started_at=started, steps=number))
    assert [one.state.steps for one in all_runs(tmp_path)] == [2, 3, 1]


def test_a_run_is_found_by_its_process_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(tmp_path))
    folder = _planted(tmp_path, "run-7-5", run_state(pid=4194305))
    assert find_run(str(folder)).folder == find_run("4194305").folder == str(folder)
    with pytest.raises(UsageError, match="process 9 is no `flatout run` of yours; list them with: flatout watch"):
        find_run("9")
    with pytest.raises(UsageError, match="is not the folder of a run: no state"):
        find_run(str(tmp_path))


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / "runs"
    link.symlink_to(target)
    file = StateFile(link)
    assert file.folder is None
    assert "not a folder of this user's alone" in (file.fault or "")
    file.write(run_state())
    assert list(target.iterdir()) == []
    target.chmod(0o777)
    assert StateFile(target).folder is None
    assert all_runs(target) == []


def test_a_folder_that_cannot_be_made_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = StateFile(tmp_path / "file" / "runs")
    file.write(run_state())
    assert (file.folder, bool(file.fault)) == (None, True)


def test_a_full_disk_is_asked_again_after_a_while_and_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path)
    assert file.folder is not None
    file.write(run_state(steps=1))
    asked = []

    def full(path: Path, *words: Any, **named: Any) -> int:
        asked.append(path)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for second in range(15):
            file.write(run_state(steps=2, written_clock=1100.0 + second))
        assert "No space left" in (file.fault or "")
    assert len(asked) == 2
    assert [path.name for path in file.folder.iterdir()] == [STATE]
    assert read_run(file.folder).state.steps == 1
    file.write(run_state(steps=3, written_clock=1200.0))
    assert (read_run(file.folder).state.steps, file.fault) == (3, None)


def test_a_folder_that_something_cleared_away_is_made_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "runs")
    assert file.folder is not None
    file.folder.rmdir()
    (tmp_path / "runs").rmdir()
    file.write(run_state(written_clock=1.0))
    file.write(run_state(written_clock=50.0))
    assert read_run(file.folder).state.written_clock == 50.0


def test_states_of_runs_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    gone = _planted(tmp_path, "run-4194305-5", run_state(pid=4194305))
    lately = _planted(tmp_path, "run-4194306-5", run_state(pid=4194306))
    empty = tmp_path / "run-4194307-5"
    empty.mkdir()
    running = StateFile(tmp_path)
    assert running.folder is not None
    running.write(run_state())
    other = tmp_path / "run-of-the-mill"
    other.mkdir()
    old = time.time() - KEPT_SECONDS - 60
    for path in (gone / STATE, gone, empty, running.folder / STATE, running.folder, other):
        os.utime(path, (old, old))
    remove_old(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([lately, running.folder, other])


def test_a_clock_that_was_set_back_removes_no_run_that_goes_on(tmp_path: Path) -> None:
    running = StateFile(tmp_path)
    assert running.folder is not None
    running.write(run_state())
    later = time.time() + 10 * KEPT_SECONDS
    for path in (running.folder / STATE, running.folder):
        os.utime(path, (later, later))
    assert run_folders.old_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a JSON document"),
        ('{"flatout": {"document": "run", "schema": 1}}', "a 'run-state' is needed here"),
        ('{"flatout": {"document": "run-state", "schema": 1}, "pid": "x"}', "is not the state of a run: RunState.pid"),
        ('{"flatout": {"document": "run-state", "schema": 99}}', "update Flatout"),
        ('{"flatout": {"document": "run-state", "schema": 1}, "step_seconds": NaN}', "NaN is no JSON"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / STATE).write_text(text)
    with pytest.raises(UsageError, match=why):
        read_run(tmp_path)


@pytest.mark.parametrize("changes", [{"run_seconds": 1e300}, {"step_seconds": 1e300}, {"step_curve": (1e300,)}])
def test_durations_of_centuries_are_no_state(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = _planted(tmp_path, "run-1-1", run_state(**changes))
    with pytest.raises(UsageError, match="it took more than"):
        read_run(folder)


def test_a_number_that_no_process_has_is_one_that_is_gone(tmp_path: Path) -> None:
    assert read_run(_planted(tmp_path, "run-1-1", run_state(pid=-1))).condition == "killed"


def test_a_pipe_or_a_huge_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / STATE)
    with pytest.raises(UsageError, match="is not the state of a run; a file of at most 4 MiB"):
        read_run(tmp_path)


def _planted(parent: Path, name: str, state: Any) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    parent.chmod(0o700)
    header = {"document": "run-state", "schema": 1, "version": "0.1.0"}
    (folder / STATE).write_text(json.dumps({"flatout": header, **state.to_json()}))
    return folder
