"""The folders in which runs keep their state: made for their user alone, and removed when the run has long ended.

    XDG_RUNTIME_DIR/flatout-runs/run-PID-START         else below the temporary folder

Hardly more than names and times is read here, because every run does this before it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path

from flatout.machine.processes import pid_namespace, process_condition, process_started

STATE = "state.json"
NAME = re.compile(r"run-(\d+)-(\d+)")
"""The process's number, and when it started."""
KEPT_SECONDS = 3600.0
"""How long the last state of a run that has ended is kept."""


def make_private(parent: Path) -> None:
    """The folder of all runs. Raises OSError where it cannot be made, or is not this user's alone."""
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700, parents=True)
    _check_private(parent)


def make_folder(parent: Path) -> Path:
    """That of this process's run."""
    folder = parent / f"run-{os.getpid()}-{process_started(os.getpid()) or time.time_ns()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def run_folders(parent: Path) -> list[Path]:
    """Of all runs; none where the folder is not this user's alone."""
    try:
        _check_private(parent)
        return sorted(parent / name for name in os.listdir(parent) if NAME.fullmatch(name))
    except OSError:
        return []


def unusable_because(parent: Path) -> str | None:
    """Why runs keep no state in this folder, and nobody can list them; None: they do, or it was never needed."""
    try:
        _check_private(parent)
        os.listdir(parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return None


def remove_old(parent: Path) -> None:
    """Remove the folders of runs that ended more than an hour ago."""
    for folder in old_folders(parent):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def old_folders(parent: Path, *, kept_seconds: float = KEPT_SECONDS) -> list[Path]:
    """What `remove_old` would remove: never the folder of a process that runs. One of another container stays for an
    hour in any case, as its process cannot be seen from here."""
    found = []
    for folder in run_folders(parent):
        match = NAME.fullmatch(folder.name)
        with contextlib.suppress(OSError):
            age = time.time() - max(path.stat().st_mtime for path in (folder, folder / STATE) if path.exists())
            fresh = 0 <= age < kept_seconds  # a clock that was set back makes it negative
            if match is None or fresh or process_condition(int(match[1]), match[2]) != "gone":
                continue
            if age >= KEPT_SECONDS or not _is_elsewhere(folder):
                found.append(folder)
    return found


def _is_elsewhere(folder: Path) -> bool:
    """Does its process have its number in another container?"""
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            namespace = json.loads(path.read_text(encoding="utf-8")).get("pid_namespace")
            if namespace is not None:
                return bool(namespace != pid_namespace())
    return False


def _check_private(folder: Path) -> None:
    """In a shared temporary folder, somebody else may have made one of this name."""
    found = os.lstat(folder)
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    if not stat.S_ISDIR(found.st_mode) or not ours:
        raise PermissionError(1, "it is not a folder of this user's alone", str(folder))
