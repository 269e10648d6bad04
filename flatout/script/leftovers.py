"""What Flatout has left on this machine, and its removal: `flatout clean`.

    FLATOUT_CACHE_DIR, else ~/.cache/flatout   ceilings/, native/, extensions/, inductor/, tunes.json
    /var/tmp and TMPDIR                        flatout-trials-*, flatout-profile-* and others: of killed processes
    FLATOUT_RUNS_DIR, else XDG_RUNTIME_DIR     run-*: the last state of runs that have ended

Only names that Flatout creates are considered, and only what this user owns is removed. Links are not followed: the
link is removed, its target stays. The folder of a running process is left alone, and so are all plans and reports:
those are the user's files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout import environment
from flatout.errors import FlatoutError
from flatout.script.isolation import cleanup
from flatout.script.run_folders import old_folders
from flatout.script.work_folder import LOCKED, PREFIX, UNFINISHED, leftover_folders, remove_leftover

KEPT = {
    "ceilings": "what this machine can do, as measured here",
    "native": "compiled kernels",
    "extensions": "what flatout.kernels.load built",
    "inductor": "what torch.compile made",
    "tunes.json": "what earlier tunes measured",
}
"""Name in the cache folder -> what it is. Nothing else there is touched."""
OWN_NAMES = {
    "ceilings": re.compile(r".+-torch-.+\.json|\.ceilings-.*"),
    "native": re.compile(r"[a-z_]+-[0-9a-f]{16}(-[0-9a-f]{16}\.so)?|\.build-.*"),
    "extensions": re.compile(r"\w+-[0-9a-f]{16}(-[0-9a-f]{16}\.so)?|\.build-.*|\.lock-[0-9a-f]"),
}
"""Patterns of Flatout's own files. A folder that holds anything else is left alone: FLATOUT_CACHE_DIR may be a folder
in which the user has a `native` of their own."""
BEGUN = (".tunes-", ".ceilings-")
"""Prefixes of files that a killed process left unfinished there."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """One file or folder of Flatout's."""

    path: str
    what: str
    size_bytes: int
    """Total size, without following links; what cannot be read counts as 0."""
    is_trial: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What was removed, and what could not be."""

    removed: tuple[Leftover, ...]
    failed: tuple[tuple[Leftover, str], ...] = ()
    """With the reason."""

    def to_json(self) -> dict[str, object]:
        failed = [{**one.to_json(), "reason": why} for one, why in self.failed]
        return {"removed": [one.to_json() for one in self.removed], "failed": failed}


def find_leftovers(cache: Path | None = None, temporary: Sequence[Path] | None = None) -> list[Leftover]:
    """What `remove_leftovers` would remove. cache, temporary: where to look, by default where Flatout writes."""
    cache = environment.cache_dir() if cache is None else cache
    found = []
    for name in _names(cache):
        path = cache / name
        if name in KEPT and _is_ours(path) and _holds_only_own(path):
            found.append(Leftover(path=str(path), what=KEPT[name], size_bytes=_size(path)))
        elif name.startswith(BEGUN) and _is_ours(path) and not path.is_dir():
            found.append(Leftover(path=str(path), what="a file that was not finished", size_bytes=_size(path)))
    for parent in sorted({Path("/var/tmp"), Path(tempfile.gettempdir())}) if temporary is None else temporary:
        for path in leftover_folders(parent):
            of_tune = path.name.startswith((PREFIX, UNFINISHED))
            what = "a tune that was killed" if of_tune else "temporary files of a process that was killed"
            found.append(Leftover(path=str(path), what=what, size_bytes=_size(path), is_trial=of_tune))
    for path in old_folders(environment.runs_dir(), kept_seconds=0.0):
        found.append(Leftover(path=str(path), what="the last state of a run that has ended", size_bytes=_size(path)))
    return found


def remove_leftovers(found: Sequence[Leftover]) -> Cleaned:
    """Remove them; each is checked again, as time has passed since it was found. Never raises for what stays."""
    removed, failed = [], []
    for one in found:
        path = Path(one.path)
        try:
            if path.name.startswith(LOCKED):
                gone = remove_leftover(path)
            else:
                gone = _is_ours(path) and _holds_only_own(path)
                if gone:
                    _remove(path)
            if gone:
                removed.append(one)
            else:
                failed.append((one, "it is in use, or no longer yours"))
        except (OSError, FlatoutError) as error:
            failed.append((one, getattr(error, "strerror", None) or str(error)))
    if removed:
        with contextlib.suppress(OSError):  # only where nothing else is in it
            os.rmdir(environment.cache_dir())
    return Cleaned(removed=tuple(removed), failed=tuple(failed))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    """Does this user own it? For a link, the link itself."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def _holds_only_own(path: Path) -> bool:
    own = OWN_NAMES.get(path.name)
    return own is None or path.is_symlink() or all(own.fullmatch(name) for name in _names(path))


def _remove(path: Path) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        cleanup(path)  # follows no link, enters no other file system
    else:
        os.unlink(path)


def _size(path: Path) -> int:
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    if not stat.S_ISDIR(found.st_mode):
        return found.st_size
    return sum(_size(path / name) for name in _names(path))
