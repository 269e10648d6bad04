"""An untrusted script, as hostile as a careless one gets: run by the tests in a process of its own.

    python untrusted.py '{"mode": "overlay", "scratch": ..., "home": ..., "user": 0, ...}'

It enters isolation and tries every write of the table, each of which also checks that it sees its own change. On
stdout comes one JSON document: the isolation, and for every write 'done', the error, or the guard's description.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import multiprocessing.popen_fork
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flatout.errors import MachineError
from flatout.script.isolation import enter, guard

# Another user may not be able to read this interpreter's library: what would be imported late is imported here.
PRELOADED = (tempfile, multiprocessing.popen_fork)


def overwrite(home: Path) -> None:
    (home / "data.txt").write_text("mine")
    assert (home / "data.txt").read_text() == "mine"


def append(home: Path) -> None:
    with open(home / "train.log", "a") as log:
        log.write("more\n")
    assert (home / "train.log").read_text().endswith("more\n")


def delete(home: Path) -> None:
    (home / "gone.txt").unlink()
    assert not (home / "gone.txt").exists()


def rename(home: Path) -> None:
    (home / "name.txt").rename(home / "other name.txt")
    assert (home / "other name.txt").exists()


def replace_in_other_folder(home: Path) -> None:
    (home / "source.txt").write_text("new")
    os.replace(home / "source.txt", home / "folder" / "kept.txt")
    assert (home / "folder" / "kept.txt").read_text() == "new"


def chmod(home: Path) -> None:
    (home / "mode.sh").chmod(0o700)
    assert (home / "mode.sh").stat().st_mode & 0o777 == 0o700


def truncate(home: Path) -> None:
    os.truncate(home / "long.bin", 1)
    assert (home / "long.bin").stat().st_size == 1


def times(home: Path) -> None:
    os.utime(home / "data.txt", (1, 1))
    assert (home / "data.txt").stat().st_mtime == 1


def new_folder(home: Path) -> None:
    (home / "runs" / "a").mkdir(parents=True)
    (home / "runs" / "a" / "events").write_text("x")


def remove_tree(home: Path) -> None:
    shutil.rmtree(home / "tree")
    assert not (home / "tree").exists()


def checkpoint(home: Path) -> None:
    (home / "model.pt").write_bytes(bytes(2 << 20))
    assert (home / "model.pt").stat().st_size == 2 << 20


def symlink(home: Path) -> None:
    (home / "latest").symlink_to("data.txt")


def hard_link(home: Path) -> None:
    os.link(home / "linked.txt", home / "link2.txt")
    (home / "link2.txt").write_text("through a hard link")


def relative(home: Path) -> None:
    Path("relative.txt").write_text("x")
    assert (home / "relative.txt").exists()


def through_link(home: Path) -> None:
    (home / "link").write_text("through a link")


def through_proc(home: Path) -> None:
    Path(f"/proc/self/root{home}/folder/kept.txt").write_text("x")
    Path("/proc/self/cwd/folder/kept.txt").write_text("x")
    Path(f"/proc/{os.getppid()}/root{home}/folder/kept.txt").write_text("x")


def database(home: Path) -> None:
    with sqlite3.connect(home / "runs.db") as connection:
        connection.execute("insert into runs values (2)")
    connection.close()


def mapped(home: Path) -> None:
    with open(home / "mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:4] = b"mine"
    assert (home / "mapped.bin").read_bytes()[:4] == b"mine"


def unnamed(home: Path) -> None:
    opened = os.open(home, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(opened, b"x")
    os.link(f"/proc/self/fd/{opened}", home / "named", src_dir_fd=opened)  # any descriptor: it makes link() follow


def shell(home: Path) -> None:
    subprocess.run(["sh", "-c", 'echo more >> "$0"', str(home / "train.log")], check=True, stderr=subprocess.DEVNULL)


def worker(home: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=overwrite, args=(home,))
    process.start()
    process.join()
    if process.exitcode:  # in guard mode it has reported and ended, as the first to write
        os._exit(process.exitcode)


WRITES: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        *(overwrite, append, delete, rename, replace_in_other_folder, chmod, truncate, times, new_folder, remove_tree),
        *(checkpoint, symlink, hard_link, relative, through_link, through_proc, database, mapped, unnamed, shell),
        *(worker,),
    )
}


def attempt(write: Callable[[Path], None], home: Path) -> str:
    try:
        write(home)
        return "done"
    except (OSError, sqlite3.Error, subprocess.CalledProcessError) as error:
        return f"{type(error).__name__}: {error}"


def in_overlay(asked: dict[str, object], home: Path, scratch: Path) -> dict[str, object]:
    isolation = enter(scratch, [Path(str(path)) for path in asked.get("shared", [])], "overlay")  # type: ignore[attr-defined]
    outcome = {name: attempt(WRITES[name], home) for name in asked.get("writes") or WRITES}  # type: ignore[attr-defined]
    for path in asked.get("also", []):  # type: ignore[attr-defined]
        outcome[path] = attempt(lambda _, path=path: Path(path).write_text("x") and None, home)
    return {"isolation": asdict(isolation), "outcome": outcome}


def in_guard(asked: dict[str, object], home: Path, scratch: Path) -> dict[str, object]:
    """Every write in a fork of its own: the first one ends the process."""
    if not asked["landlock"]:
        guard.restrict_writes = no_landlock
    outcome = {}
    for name in asked.get("writes") or WRITES:  # type: ignore[attr-defined]
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)

            def stop(description: str, writing: int = writing) -> None:
                os.write(writing, description.encode())
                os._exit(77)

            enter(scratch, mode="guard", on_first_write=stop)
            os.write(writing, attempt(WRITES[name], home).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as answer:
            outcome[name] = answer.read()
        os.wait()
    return {"outcome": outcome}


def no_landlock(writable: object) -> str:
    raise MachineError("no Landlock here")


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["user"]:
        os.setgroups([])
        os.setgid(asked["user"])
        os.setuid(asked["user"])
    home, scratch = Path(asked["home"]), Path(asked["scratch"])
    os.chdir(home)
    run = in_guard if asked["mode"] == "guard" else in_overlay
    print(json.dumps(run(asked, home, scratch)))


if __name__ == "__main__":
    main()
