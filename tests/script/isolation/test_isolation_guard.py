"""In guard mode every write of the untrusted script is stopped before it happens, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .users_home import HERE, SOMEBODY, fill, give_to, take_snapshot

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

EXPECTED = {
    "overwrite": "open for writing: {home}/data.txt",
    "append": "open for writing: {home}/train.log",
    "delete": "remove: {home}/gone.txt",
    "rename": "rename: {home}/name.txt",
    "replace_in_other_folder": "open for writing: {home}/source.txt",
    "chmod": "change mode of: {home}/mode.sh",
    "truncate": "truncate: {home}/long.bin",
    "times": "change times of: {home}/data.txt",
    "new_folder": "make directory: {home}/runs/a",
    "remove_tree": "remove: {home}/tree/a/b.txt",
    "checkpoint": "open for writing: {home}/model.pt",
    "symlink": "make link: {home}/latest",
    "hard_link": "link: {home}/link2.txt",
    "relative": "open for writing: {home}/relative.txt",
    "through_link": "open for writing: {home}/folder/kept.txt",
    "through_proc": "open for writing: {home}/folder/kept.txt",
    "database": "open database: {home}/runs.db",
    "mapped": "open for writing: {home}/mapped.bin",
    "unnamed": "open for writing: {home}",
    "worker": "open for writing: {home}/data.txt",
}


@pytest.mark.parametrize("user", [0, pytest.param(SOMEBODY, marks=needs_root)])
@pytest.mark.parametrize("landlock", [True, False])
def test_each_write_is_stopped_before_it_happens(
    new_place: Callable[[str], Path], run_stranger: Callable[..., dict[str, Any]], landlock: bool, user: int
) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    home = base / "my home, a: b\\c"
    fill(home)
    if user:
        give_to(user, base)
        give_to(user, scratch)
    before = take_snapshot(base)

    outcome = run_stranger(mode="guard", scratch=scratch, home=home, user=user, landlock=landlock)["outcome"]

    shell = outcome.pop("shell")
    assert outcome == {name: expected.format(home=home) for name, expected in EXPECTED.items()}
    assert shell.startswith(("start another program: sh -c", "CalledProcessError"))
    assert take_snapshot(base) == before


def guarded(code: str, scratch: Path, home: Path) -> subprocess.CompletedProcess[str]:
    preface = f"""
import os, sys
from pathlib import Path
from flatout.script.isolation import enter, guard, guard_torch
scratch, home = Path({str(scratch)!r}), Path({str(home)!r})
def stop(description):
    print("stopped:", description, flush=True)
    os._exit(77)
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, "-W", "error", "-c", preface + code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def test_what_may_be_written(tmp_path: Path) -> None:
    code = """
import socket, sqlite3, tempfile
isolation = enter(scratch, [home / "cache"], "guard", stop)
(scratch / "new").write_text("x")
(home / "cache" / "kept").write_text("x")
Path(os.devnull).write_text("x")
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=8); memory.close(); memory.unlink()
os.kill(os.getpid(), 0)
with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory():
    assert file.name.startswith(str(scratch))
reading, writing = os.pipe()
os.write(writing, b"x")
open(writing, "w").close()
sqlite3.connect(":memory:").close()
assert open(__import__("json").__file__).read()
socket.socket(socket.AF_UNIX).close()
print(isolation.mode)
"""
    ended = guarded(code, tmp_path / "s", tmp_path)
    assert ended.stdout == "guard\n", ended.stdout + ended.stderr
    assert (tmp_path / "cache" / "kept").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("Path('/dev/shm/flatout-test-guard').write_text('x')", "open for writing: /dev/shm/flatout-test-guard"),
        ("os.kill(OUTSIDE, 15)", "send signal 15 to process"),
        ("open(home / 'pipe', 'w')", "open for writing: "),
        ("import socket; socket.socket(socket.AF_UNIX).connect(str(home / 'socket'))", "connect to socket: "),
    ],
)
def test_what_leads_to_other_programs_is_stopped(tmp_path: Path, code: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    enter = "enter(scratch, (), 'guard', stop)\n"
    ended = guarded(enter + code.replace("OUTSIDE", str(os.getpid())), tmp_path / "s", tmp_path)
    assert ended.stdout.startswith(f"stopped: {said}"), ended.stdout + ended.stderr
    assert ended.returncode == 77


def test_without_a_callback_the_write_raises(tmp_path: Path) -> None:
    ended = guarded('enter(scratch, mode="guard")\nPath(home / "x").write_text("x")', tmp_path / "s", tmp_path)
    assert "PermissionError" in ended.stderr
    assert f"open for writing: {tmp_path}/x" in ended.stderr


def test_landlock_stops_what_python_does_not_announce(tmp_path: Path) -> None:
    code = """
import ctypes
isolation = enter(scratch, mode="guard", on_first_write=stop)
if not isolation.details[0].startswith("Landlock"):
    print("skip:", isolation.details[0]); sys.exit()
print(ctypes.CDLL(None).creat(os.fsencode(home / "from C"), 0o644))
"""
    ended = guarded(code, tmp_path / "s", tmp_path)
    if ended.stdout.startswith("skip"):
        pytest.skip(ended.stdout)
    assert ended.stdout == "-1\n", ended.stderr
    assert not (tmp_path / "from C").exists()


def test_spawned_workers_are_stopped_where_nothing_would_watch_them(tmp_path: Path) -> None:
    code = """
import multiprocessing
from flatout.errors import MachineError
def no_landlock(writable):
    raise MachineError("no Landlock here")
guard.restrict_writes = no_landlock
enter(scratch, mode="guard", on_first_write=stop)
multiprocessing.get_context("spawn").Process(target=print).start()
"""
    ended = guarded(code, tmp_path / "s", tmp_path)
    assert ended.stdout.startswith("stopped: start another program"), ended.stdout + ended.stderr


def test_torch_checkpoints_are_stopped_and_torch_is_put_back(tmp_path: Path) -> None:
    code = """
enter(scratch, mode="guard", on_first_write=stop)
import io, warnings
warnings.simplefilter("ignore")
import torch
original = torch.save
undo = guard_torch(torch)
torch.save({}, scratch / "allowed.pt")
torch.save({}, io.BytesIO())
undo()
assert torch.save is original
guard_torch(torch)
torch.save({}, f=home / "model.pt")
"""
    ended = guarded(code, tmp_path / "s", tmp_path)
    assert ended.stdout == f"stopped: save: {tmp_path}/model.pt\n", ended.stderr
    assert not (tmp_path / "model.pt").exists()


def test_torch_is_left_alone_without_a_guard() -> None:
    from flatout.script.isolation import guard_torch

    torch = SimpleNamespace(save=print)
    guard_torch(torch)()  # type: ignore[arg-type]
    assert torch.save is print
