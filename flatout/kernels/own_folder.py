"""Folders of the cache that hold code which is loaded into this process: no one else may be able to write there."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from flatout.environment import cache_dir


class Refused(OSError):
    """The cache cannot be trusted; the text says why."""


def own_folder(name: str) -> Path:
    """A folder of the cache, made for this user alone. Refused where others could put their own code into it."""
    folder = cache_dir() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_ours(folder)
    return folder


def check_ours(path: Path) -> None:
    """Refused if the file or folder is somebody else's, or others can write to it."""
    found = path.stat()
    if not hasattr(os, "getuid"):
        raise Refused("this system does not report who else can write to a folder")
    if found.st_uid not in (os.getuid(), 0):
        remedy = "set FLATOUT_CACHE_DIR to a folder of your own"
        raise Refused(f"{path} belongs to user {found.st_uid}, whose code would be loaded; {remedy}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"chmod go-w {shlex.quote(str(path))}"
        raise Refused(f"others can write {path} (mode {stat.S_IMODE(found.st_mode):o}); {remedy}")
