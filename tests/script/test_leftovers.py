from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.script.leftovers import find_leftovers, remove_leftovers
from flatout.script.run_folders import KEPT_SECONDS, STATE, make_folder, make_private, old_folders
from flatout.script.work_folder import PREFIX, work_folder
from flatout.temporary_folders import MARK, temporary_folder

KERNEL = f"decoder-{'a' * 16}-{'0' * 16}.so"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    (folder / "native").mkdir(parents=True)
    (folder / "native" / KERNEL).write_bytes(b"x" * 1000)
    (folder / "tunes.json").write_text("{}")
    (folder / ".tunes-abc").write_text("half")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(folder))
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(tmp_path / "runs"))
    return folder


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "var-tmp"
    folder.mkdir()
    return folder


def killed(parent: Path, name: str = "killed") -> Path:
    folder = parent / (PREFIX + name)
    folder.mkdir()
    (folder / MARK).touch()
    (folder / "layer").write_bytes(b"x" * 500)
    return folder


def names(found: object) -> list[str]:
    return [Path(one.path).name for one in found]  # type: ignore[attr-defined]


def test_all_that_flatout_made_is_found_with_its_size_and_removed(cache: Path, temporary: Path) -> None:
    killed(temporary)
    found = find_leftovers(temporary=[temporary])
    assert names(found) == [".tunes-abc", "native", "tunes.json", f"{PREFIX}killed"]
    assert [one.size_bytes for one in found] == [4, 1000, 2, 500]
    cleaned = remove_leftovers(found)
    assert cleaned.removed == tuple(found)
    assert not cleaned.failed
    assert not cache.exists()
    assert list(temporary.iterdir()) == []
    assert find_leftovers(temporary=[temporary]) == []


def test_what_flatout_did_not_make_stays(cache: Path, temporary: Path) -> None:
    (cache / "notes.txt").write_text("mine")
    (cache / "ceilings").mkdir()
    (cache / "ceilings" / "bedroom.jpg").write_text("mine")
    (temporary / f"{PREFIX}unmarked").mkdir()
    (temporary / "other").mkdir()
    remove_leftovers(find_leftovers(temporary=[temporary]))
    assert names_in(cache) == ["ceilings", "notes.txt"]
    assert names_in(temporary) == [f"{PREFIX}unmarked", "other"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_no_link_is_followed(cache: Path, temporary: Path, tmp_path: Path) -> None:
    mine = killed(tmp_path, "elsewhere")
    (cache / "inductor").symlink_to(mine)
    (cache / "native" / f"decoder-{'b' * 16}").symlink_to(mine)
    (temporary / f"{PREFIX}link").symlink_to(mine)
    found = find_leftovers(temporary=[temporary])
    assert f"{PREFIX}link" not in names(found)
    assert sum(one.size_bytes for one in found) < 1500
    remove_leftovers(found)
    assert (mine / "layer").stat().st_size == 500
    assert not cache.exists()


def test_a_tune_that_runs_is_left_alone(cache: Path, temporary: Path) -> None:
    with work_folder(temporary) as folder:
        assert f"{PREFIX}killed" not in names(find_leftovers(temporary=[temporary]))
        found = find_leftovers(temporary=[temporary])
        assert folder.name not in names(found)
        assert folder.exists()


def test_the_temporary_files_of_a_process_that_was_killed_are_found_and_those_in_use_are_not(
    cache: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    lines = (
        "import os, sys, tempfile",
        "from flatout.temporary_folders import temporary_folder",
        "with temporary_folder('input') as folder:",
        "    (folder / 'stdin').write_text('piped in')",
        "    os.kill(os.getpid(), 9)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False)
    (left,) = temporary.iterdir()
    (temporary / "flatout-input-unmarked").mkdir()  # nobody knows whether it is in use
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with temporary_folder("input") as used:
        found = [one for one in find_leftovers(temporary=[temporary]) if one.path.startswith(str(temporary))]
        assert [(one.path, one.size_bytes, one.is_trial) for one in found] == [(str(left), 8, False)]
        assert remove_leftovers(found).removed == tuple(found)
        assert remove_leftovers([replace(found[0], path=str(used))]).removed == ()
        assert sorted(temporary.iterdir()) == sorted([used, temporary / "flatout-input-unmarked"])


def test_what_came_to_life_meanwhile_is_left_alone(cache: Path, temporary: Path) -> None:
    folder = killed(temporary)
    found = find_leftovers(temporary=[temporary])
    (folder / MARK).unlink()
    cleaned = remove_leftovers(found)
    assert [Path(one.path) for one, _ in cleaned.failed] == [folder]
    assert (folder / "layer").exists()


def test_what_belongs_to_another_user_stays(cache: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(temporary)
    found = find_leftovers(temporary=[temporary])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert find_leftovers(temporary=[temporary]) == []
    assert remove_leftovers(found).removed == ()
    assert (cache / "tunes.json").exists()


def test_the_state_of_a_run_that_has_ended_is_found_and_that_of_one_that_runs_is_not(
    cache: Path, temporary: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    make_private(runs)
    running = make_folder(runs)
    ended = runs / "run-4194305-7"
    ended.mkdir(mode=0o700)
    (ended / STATE).write_text("{}")
    (runs / "notes").mkdir()
    found = [one for one in find_leftovers(temporary=[temporary]) if one.path.startswith(str(runs))]
    assert names(found) == ["run-4194305-7"]
    remove_leftovers(found)
    assert sorted(path.name for path in runs.iterdir()) == sorted(["notes", running.name])


def test_the_state_of_a_run_in_another_container_stays_for_an_hour(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_private(runs)
    folder = runs / "run-4194305-7"
    folder.mkdir(mode=0o700)
    (folder / "plan.json").write_text("{}")
    (folder / STATE).write_text(json.dumps({"pid_namespace": "pid:[1]"}))
    assert old_folders(runs, kept_seconds=0.0) == []
    for path in (folder / STATE, folder):
        os.utime(path, (0, time.time() - 2 * KEPT_SECONDS))
    assert old_folders(runs, kept_seconds=0.0) == [folder]
