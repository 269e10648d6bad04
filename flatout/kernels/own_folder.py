"""Folders of the cache that hold code which is loaded into this process: no one else may be able to write there.

A library that is kept has a record, which holds its checksum: a truncated library would end the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.environment import cache_dir


class Refused(OSError):
    """The cache cannot be trusted; the text says why."""


def own_folder(name: str) -> Path:
    """A folder of the cache, made for this user alone. Refused where others could put their own code into it."""
    folder = cache_dir() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(folder)
    return folder


def _check_ours(path: Path) -> None:
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


def kept_library(record: Path) -> tuple[Path, Mapping[str, Any]] | None:  # Any: as it was noted
    """The library that this record speaks of, if it is whole, and what was noted of it; None: there is none.

    The checksum is also in the library's name: whoever builds the same meanwhile, to other bytes, never overwrites what
    the record speaks of.
    """
    try:
        _check_ours(record)
        noted = json.loads(record.read_text())
        library = record.with_name(f"{record.name}-{noted['checksum'][:16]}.so")
        _check_ours(library)
        whole = checksum(library) == noted["checksum"]
    except Refused:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (library, noted) if whole else None


def keep_library(made: Path, record: Path, **noted: object) -> Path:
    """Move a library that was built beside its place there, whole, and note it: another process may build the same, or
    load it right now."""
    found = checksum(made)
    note = made.with_name("record")
    note.write_text(json.dumps({"checksum": found, **noted}))
    made.chmod(0o500)
    note.chmod(0o400)
    library = record.with_name(f"{record.name}-{found[:16]}.so")
    os.replace(made, library)
    os.replace(note, record)  # after the library: a record always speaks of a whole one
    return library


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
