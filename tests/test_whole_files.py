"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.whole_files import PRIVATE, can_be_written, errors_named, usual_mode, written_whole


def test_a_file_takes_the_place_of_the_one_before_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text("before")
    with written_whole(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "before"
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert path.stat().st_mode & 0o777 == usual_mode()
    with written_whole(path, mode=PRIVATE) as temporary:
        temporary.write_text("mine")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_need_not_survive_a_power_failure_is_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    with written_whole(tmp_path / "state.json", durable=False) as temporary:
        temporary.write_text("now")
    assert ((tmp_path / "state.json").read_text(), flushed) == ("now", [])


def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text("before")

    def write() -> None:
        with written_whole(path) as temporary:
            temporary.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "missing" / "found.json"):
        pass


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    kept, link = tmp_path / "there" / "found.json", tmp_path / "link.json"
    kept.write_text("before")
    link.symlink_to(kept)
    with written_whole(link) as temporary:
        temporary.write_text("now")
    assert link.is_symlink()
    assert kept.read_text() == "now"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with written_whole(pipe, durable=False) as path:
        path.write_text("through it")
    assert os.read(reader, 100) == b"through it"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    inward, outward = os.pipe()
    named = Path(f"/dev/fd/{outward}")  # as /dev/stdout in a pipeline: a link to what has no path
    if named.exists():
        assert can_be_written(named)
        with written_whole(named, durable=False) as path:
            path.write_text("through it")
        assert os.read(inward, 100) == b"through it"
    os.close(inward)
    os.close(outward)
    with written_whole(Path(os.devnull)) as path:
        path.write_text("gone")
    assert not Path(os.devnull).is_file()


def test_a_new_file_is_as_open_as_the_user_wants_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert usual_mode() == 0o640
        assert os.umask(0o027) == 0o027
        with written_whole(tmp_path / "plan.toml") as temporary:
            temporary.write_text("mine")
        assert (tmp_path / "plan.toml").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_where_a_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "new", "link"):
        assert can_be_written(tmp_path / name)
    for name in (".", "absent/new", "file/new"):
        assert not can_be_written(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) == os.devnull)
    assert can_be_written(Path(os.devnull))
    assert not can_be_written(tmp_path / "new")


def test_a_folder_that_may_not_be_searched_is_no_place_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: object, **options: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbidden)
    assert not can_be_written(Path("/closed/report.json"))


def test_what_the_file_system_refuses_is_named() -> None:
    with (
        pytest.raises(UsageError, match=r"cannot write out\.txt: No space left on device; name another"),
        errors_named(Path("out.txt"), "name another"),
    ):
        raise OSError(28, "No space left on device")
