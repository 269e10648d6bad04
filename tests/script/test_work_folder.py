"""Folders of trials: removed by their owner, or, where it was killed, by the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.errors import MachineError
from flatout.script import work_folder as module
from flatout.script.work_folder import PREFIX, sweep, work_folder
from flatout.temporary_folders import MARK

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from flatout.script.work_folder import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "trial" / "scratch" / "layers").mkdir(parents=True)
    (folder / "trial" / "scratch" / "layers").chmod(0)
    (folder / "link").symlink_to(sys.argv[2])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_owner(parent: Path, kept: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", KILLED, str(parent), str(kept)], env=environment, timeout=200)


def test_the_folder_of_a_killed_owner_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    parent, kept = tmp_path / "parent", tmp_path / "kept"
    for folder in (parent, kept):
        folder.mkdir()
    (kept / "file").write_text("x")
    with work_folder(parent) as live:
        killed_owner(parent, kept)
        assert len(list(parent.iterdir())) == 2
        with work_folder(parent) as second:
            assert sorted(parent.iterdir()) == sorted([live, second])
        assert list(parent.iterdir()) == [live]
    assert list(parent.iterdir()) == []
    assert (kept / "file").exists()


def test_only_folders_with_our_mark_are_taken(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}of-the-user").mkdir()
    (tmp_path / f"{PREFIX}with-a-link").mkdir()
    (tmp_path / f"{PREFIX}with-a-link" / MARK).symlink_to("/dev/null")
    (tmp_path / f"{PREFIX}file").write_text("x")
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / MARK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to("marked")
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    (folder / MARK).touch()
    os.chown(folder, 12345, 12345)
    assert sweep(tmp_path) == []
    os.chown(folder, 0, 0)
    assert sweep(tmp_path) == [folder]


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "mkdtemp", full)
    with pytest.raises(MachineError, match="No space left on device; free some space there"), work_folder(tmp_path):
        pass


def test_a_removal_that_is_interrupted_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is listed first: the mark goes when all else is gone."""

    def marks_first(folder: int) -> list[str]:
        return sorted(listed(folder), key=lambda name: name != MARK)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    listed, owned = os.listdir, work_folder(tmp_path)
    folder = owned.__enter__()
    (folder / "trial").mkdir()
    with monkeypatch.context() as patches:
        patches.setattr(os, "listdir", marks_first)
        patches.setattr(os, "rmdir", interrupted)
        with pytest.raises(KeyboardInterrupt):
            owned.__exit__(None, None, None)
    assert sweep(tmp_path) == [folder]
    assert list(tmp_path.iterdir()) == []
