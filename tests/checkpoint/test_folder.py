"""Which checkpoints stay, which are found, and what the folder may be."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.checkpoint import disk, saved
from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.errors import MachineError, UsageError
from flatout.plan import Plan


def steps(folder: Path) -> list[int]:
    return [int(path.name.split("-step-")[1]) for path in sorted(folder.iterdir())]


def save_all(checkpoints: Checkpoints, metrics: dict[int, float | None]) -> None:
    for step, metric in metrics.items():
        checkpoints.save({"extra": torch.full((3,), step)}, step=step, metric=metric)


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    save_all(checkpoints, {1: 0.5, 2: 0.1, 3: math.nan, 4: 0.3, 5: None, 6: 0.9, 7: math.inf})
    assert steps(tmp_path) == [2, 4, 6, 7]
    best, latest = checkpoints.best(), checkpoints.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, best.metric, latest.step, latest.metric) == (2, 0.1, 7, math.inf)
    assert best.load()["extra"].tolist() == [2, 2, 2]


def test_the_best_may_be_the_highest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1, best="max")
    save_all(checkpoints, {1: 0.5, 2: 0.9, 3: 0.9, 4: -math.inf})
    best = checkpoints.best()
    assert best is not None
    assert (best.step, steps(tmp_path)) == (3, [3, 4])


def test_the_newest_is_the_last_saved_even_after_going_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    save_all(checkpoints, {500: None, 600: None, 110: None})
    loaded = checkpoints.load()
    assert loaded is not None
    assert (loaded.step, loaded.state["extra"][0], steps(tmp_path)) == (110, 110, [600, 110])


def test_a_step_saved_again_is_found_in_its_newer_form(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"extra": "old"}, step=4)
    checkpoints.save({"extra": "new"}, step=4)
    assert checkpoints.at(4).load() == {"extra": "new"}


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_all(checkpoints, {1: None, 3: None})
    with pytest.raises(UsageError, match=r"no checkpoint of step 2 .*the steps there are: 1, 3"):
        checkpoints.at(2)


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none" / "yet")
    assert (checkpoints.load(), checkpoints.latest(), checkpoints.best()) == (None, None, None)
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="there are: none"):
        checkpoints.at(0)
    save_all(checkpoints, {0: None})
    assert checkpoints.at(0).step == 0


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-4").mkdir()
    save_all(Checkpoints(tmp_path, keep_last=1), {1: None, 2: None})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-2", "notes.txt", "step-4"]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    other = Checkpoints(tmp_path / "a", rank=1)
    other.save({"extra": lambda: 0}, step=1)
    assert not (tmp_path / "a").exists()
    save_all(Checkpoints(tmp_path / "a", rank=0), {1: None})
    loaded = other.load()
    assert loaded is not None
    assert loaded.step == 1


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    plan = Plan(precision="bf16")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(capture(plan=plan, extra=1), step=1, metric=torch.tensor(0.5))  # type: ignore[arg-type]
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.plan == plan
    assert loaded.checkpoint.versions["torch"] == torch.__version__
    assert {"python", "flatout"} < set(loaded.checkpoint.versions)
    on_disk = sum(path.stat().st_size for path in loaded.checkpoint.folder.iterdir() if path.name != "manifest.json")
    assert loaded.checkpoint.size_bytes == on_disk
    assert saved.open_checkpoint(loaded.checkpoint.folder) == loaded.checkpoint


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keep_last": 0}, "keep_last is 0; it is a whole number of at least 1"),
        ({"keep_best": -1}, "keep_best is -1"),
        ({"best": "low"}, "best is 'low'"),
    ],
)
def test_settings_out_of_range(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Checkpoints(tmp_path, **settings)


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_steps_out_of_range(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="step is"):
        Checkpoints(tmp_path).save({}, step=step)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file is a file; checkpoints need a folder"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(UsageError, match=r"file is a file; checkpoints need a folder"):
        Checkpoints(tmp_path / "file" / "below")


def test_a_folder_that_may_not_be_written() -> None:
    with pytest.raises((UsageError, MachineError), match=r"checkpoint of step 1 c.* be written to /proc/none"):
        Checkpoints("/proc/none").save({"extra": 1}, step=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied; name a folder that you may write"):
        Checkpoints(tmp_path).save({"extra": 1}, step=1)


def test_what_cannot_be_deleted_is_warned_of_and_the_save_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save_all(checkpoints, {1: None})

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("flatout.checkpoint.folder.remove_folder", refuse)
    with pytest.warns(UserWarning, match="000001-step-1 cannot be deleted: Permission denied"):
        save_all(checkpoints, {2: None})
    assert steps(tmp_path) == [1, 2]


def test_what_dead_processes_left_is_swept_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    dead = tmp_path / ".unfinished-000001-step-1-abc"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".discarded-000001-step-1-abc").mkdir()
    with disk.whole_folder(tmp_path, "000009-step-9") as living:
        with pytest.warns(UserWarning, match=r"unfinished.* is an interrupted save; nothing was saved before"):
            assert Checkpoints(tmp_path).load() is None
        save_all(Checkpoints(tmp_path), {1: None})
        assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, "000001-step-1"]
    assert steps(tmp_path) == [1, 9]


def test_what_cannot_be_read_now_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    save_all(checkpoints, {1: None})
    manifest = tmp_path / "000001-step-1" / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    manifest.mkdir()  # as where the file system fails: an error of reading, and nothing that is seen to be damaged
    save_all(checkpoints, {2: None, 3: None})
    assert steps(tmp_path) == [1, 3]
    manifest.rmdir()
    manifest.write_bytes(kept)
    assert checkpoints.at(1).load()["extra"].tolist() == [1, 1, 1]


def test_what_load_found_damaged_does_not_count_among_the_last(tmp_path: Path) -> None:
    save_all(Checkpoints(tmp_path), {1: None, 2: None})
    path = tmp_path / "000002-step-2" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    with pytest.warns(UserWarning, match="step 1 is loaded"):
        checkpoints.load()
    save_all(checkpoints, {3: None})
    assert steps(tmp_path) == [1, 3]


def test_a_folder_keeps_its_lock_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, abandoned = os.rename, []

    def looked(place: Path, name: Path) -> None:
        abandoned.extend(disk.abandoned_folders(tmp_path))
        rename(place, name)

    monkeypatch.setattr(os, "rename", looked)
    save_all(Checkpoints(tmp_path), {1: None})
    assert abandoned == []
    assert not (tmp_path / "000001-step-1" / disk.LOCK).exists()


def test_another_process_that_saves_in_the_same_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def after_another(source: Any, target: Any) -> None:
        if Path(target).name == "000001-step-5" and not Path(target).exists():
            Path(target).mkdir()
            (Path(target) / "manifest.json").write_text("{}")
        rename(source, target)

    monkeypatch.setattr(disk.os, "rename", after_another)
    with pytest.raises(UsageError, match="another process has saved one there under the same name"):
        Checkpoints(tmp_path).save({"extra": 1}, step=5)
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-5"]


def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "b"):
        with pytest.raises(UsageError, match="cannot be used: File name too long; name a folder"):
            Checkpoints(folder)
        with pytest.raises(UsageError, match="cannot be used: File name too long"):
            restore(folder, model=torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="it is a path, as text"):
        Checkpoints("a\0b")


def test_a_folder_that_is_removed_within_a_save_is_named_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, where = saved.write_tensors, tmp_path / "run"

    def removing(file: Any, tensors: Any, **about: str) -> None:
        written(file, tensors, **about)
        shutil.rmtree(where)

    state = {"model": {"a": torch.ones(2)}}
    with monkeypatch.context() as patched:
        patched.setattr(saved, "write_tensors", removing)
        with pytest.raises(MachineError, match=r"No such file or directory; that folder is not there; check the disk"):
            Checkpoints(where).save(state, step=1)
    Checkpoints(where).save(state, step=2)
    assert [path.name for path in where.iterdir()] == ["000001-step-2"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_writes_a_folder_is_not_copied(tmp_path: Path, copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match="cannot be copied, or sent to another process; one of them writes its folder"):
        copied(Checkpoints(tmp_path))
