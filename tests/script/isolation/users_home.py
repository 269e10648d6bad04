"""A user's home with one file for every kind of harm, and what tells whether it was harmed."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

HERE = Path(__file__).parent
SOMEBODY = 12345  # an ordinary user, for tests that run as root

Snapshot = dict[str, tuple[int, int, int, str]]


def take_snapshot(directory: Path) -> Snapshot:
    """Mode, size, time and content of everything below, links not followed."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def fill(home: Path) -> None:
    home.mkdir(parents=True)
    for name in ("data.txt", "train.log", "gone.txt", "name.txt", "mode.sh", "linked.txt"):
        (home / name).write_text(f"the user's {name}\n")
    for name in ("long.bin", "mapped.bin"):
        (home / name).write_bytes(bytes(range(256)) * 64)
    for name in ("folder/kept.txt", "tree/a/b.txt"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("kept")
    (home / "link").symlink_to("folder/kept.txt")
    connection = sqlite3.connect(home / "runs.db")
    connection.executescript("create table runs (number); insert into runs values (1)")
    connection.close()


def give_to(user: int, directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)
