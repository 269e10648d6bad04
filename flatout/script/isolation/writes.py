"""Which of Python's audit events is a write, and to which path.

Each event of the table below is turned into the paths it would change. A path may be changed below the allowed
directories, and where nothing is kept: character devices. What leads to other programs counts as a write too: named
pipes, sockets with a path, signals.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote

Stop = Callable[[str], object]
"""Called with a description before a write; where it returns, the write takes place."""
Arguments = tuple[Any, ...]  # each event has its own
Check = Callable[[Arguments], None]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT

# event -> (what to call it, position of a path, position of its directory's descriptor or None), for each path.
_CHANGES: dict[str, tuple[str, tuple[tuple[int, int | None], ...]]] = {
    "os.chflags": ("change flags of", ((0, None),)),
    "os.chmod": ("change mode of", ((0, 2),)),
    "os.chown": ("change owner of", ((0, 3),)),
    "os.link": ("link", ((1, 3),)),
    "os.mkdir": ("make directory", ((0, 2),)),
    "os.remove": ("remove", ((0, 1),)),
    "os.removexattr": ("change attributes of", ((0, None),)),
    "os.rename": ("rename", ((0, 2), (1, 3))),
    "os.rmdir": ("remove directory", ((0, 1),)),
    "os.setxattr": ("change attributes of", ((0, None),)),
    "os.symlink": ("make link", ((1, 2),)),
    "os.truncate": ("truncate", ((0, None),)),
    "os.utime": ("change times of", ((0, 3),)),
}

# Events that name a directory entry itself, not what a link there leads to.
_ON_THE_ENTRY = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"}

# Programs that only look, and that importing a library may start.
_LOOKING_PROGRAMS = {"uname", "ldconfig", "lscpu", "nvidia-smi"}


class WriteRules:
    """Where writes may go, and what happens before one that goes elsewhere."""

    def __init__(self, writable: tuple[str, ...], stop: Stop) -> None:
        self.writable = writable
        self.stop = stop

    def events(self) -> dict[str, Check]:
        """Audit event -> its check."""
        table: dict[str, Check] = {event: functools.partial(self._check_change, event) for event in _CHANGES}
        return table | {
            "open": self._check_open,
            "sqlite3.connect": self._check_sqlite,
            "socket.bind": functools.partial(self._check_socket, "make socket"),
            "socket.connect": functools.partial(self._check_socket, "connect to socket"),
            "os.kill": self._check_signal,
            "os.killpg": self._check_signal,
        }

    def check(
        self,
        what: str,
        path: str | bytes | int | os.PathLike[str] | None,
        directory: int | None = None,
        *,
        entry: bool = False,
    ) -> None:
        """Stop unless `path` may be changed; `entry`: the name itself, where it is a link."""
        resolved = _resolve(path, directory, entry=entry)
        if resolved is not None and not self._may_write(resolved):
            self.stop(f"{what}: {resolved}")

    def _may_write(self, path: str) -> bool:
        if any(path == directory or path.startswith(directory + "/") for directory in self.writable):
            return True
        if path.startswith(f"/proc/{os.getpid()}/"):
            return True  # settings of this process alone, such as a thread's name
        try:
            return stat.S_ISCHR(os.stat(path).st_mode)
        except OSError:
            return False

    def _check_change(self, event: str, arguments: Arguments) -> None:
        what, places = _CHANGES[event]
        if event == "os.truncate" and isinstance(arguments[0], int):
            return  # that it may be written was decided when it was opened
        for position, directory in places:
            number = arguments[directory] if directory is not None and directory < len(arguments) else None
            self.check(what, arguments[position], number, entry=event in _ON_THE_ENTRY)

    def _check_open(self, arguments: Arguments) -> None:
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
            self.check("open for writing", path)

    def _check_sqlite(self, arguments: Arguments) -> None:
        database = os.fsdecode(arguments[0])
        if database.startswith("file:"):
            name, _, query = database.removeprefix("file:").partition("?")
            asked = parse_qs(query)
            if asked.get("mode") in (["ro"], ["memory"]) or asked.get("immutable") == ["1"]:
                return
            database = unquote(name)
        if database not in ("", ":memory:"):
            self.check("open database", database)

    def _check_socket(self, what: str, arguments: Arguments) -> None:
        address = arguments[1]
        if isinstance(address, str | bytes) and address and os.fsencode(address)[0] != 0:  # not an abstract name
            self.check(what, address)

    def _check_signal(self, arguments: Arguments) -> None:
        """A trial has a session of its own, to which its workers belong."""
        process, number = arguments
        try:
            ours = number == 0 or process == 0 or os.getsid(abs(process)) == os.getsid(0)
        except OSError:
            return  # there is no such process: the call itself will say so
        if not ours:
            self.stop(f"send signal {number} to process {process}")


def _resolve(path: str | bytes | int | os.PathLike[str] | None, directory: int | None, *, entry: bool) -> str | None:
    """The real path without links; None for what is no file by name."""
    if path is None:
        path = "."
    if isinstance(path, int):
        return _path_of_descriptor(path)
    try:
        name = os.fsdecode(os.fspath(path))
    except TypeError:
        return None  # the call itself will refuse it
    if directory is not None and directory >= 0 and not os.path.isabs(name):
        name = os.path.join(_path_of_descriptor(directory) or "/", name)
    if not entry:
        return os.path.realpath(name)
    parent, last = os.path.split(name.rstrip("/"))
    return os.path.join(os.path.realpath(parent or "."), last)


def _path_of_descriptor(number: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass
    try:
        import fcntl

        if hasattr(fcntl, "F_GETPATH"):  # macOS
            return os.fsdecode(fcntl.fcntl(number, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    except OSError:
        pass
    return None


def program_rules(stop: Stop) -> dict[str, Check]:
    """Another program writes where no hook of ours can see it."""

    def check(position: int, arguments: Arguments) -> None:
        command = arguments[position]
        words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
        shown = [os.fsdecode(word) for word in words]
        if not _only_looks(shown):
            stop(f"start another program: {' '.join(shown)[:200]}")

    # Where the arguments are: os.system has the command only, the others a path and then the list.
    positions = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2}
    return {event: functools.partial(check, position) for event, position in positions.items()}


def _only_looks(words: list[str]) -> bool:
    if not words:
        return True
    tracks_shared_memory = any("multiprocessing.resource_tracker" in word for word in words)
    return os.path.basename(words[0]) in _LOOKING_PROGRAMS or tracks_shared_memory


def save_check(original: Callable[..., object], rules: WriteRules) -> Callable[..., object]:
    """One of torch's, with a check of the path that it gets second, or as `f`; files were checked when opened."""

    @functools.wraps(original)
    def checked(*arguments: Any, **named: Any) -> object:  # torch checks them
        target = arguments[1] if len(arguments) > 1 else named.get("f")
        if isinstance(target, str | bytes | os.PathLike):
            rules.check("save", target)
        return original(*arguments, **named)

    return checked
