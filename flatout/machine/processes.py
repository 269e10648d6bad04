"""Processes by their number: whether one that was noted down is still there, and what it and those below it use."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import psutil

from flatout.descendants import descendants


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """One process now."""

    pid: int
    name: str
    resident_bytes: int
    """With pages that it shares with others."""
    cpu_seconds: float


def process_started(pid: int) -> str | None:
    """Distinguishes a process from later ones with its number: when it started, in whole units of the system.
    None: there is no such process."""
    try:
        if not os.path.exists("/proc/self/stat"):  # macOS, Windows
            return str(int(psutil.Process(pid).create_time() * 100))
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError, ValueError, psutil.Error):
        return None


def pid_namespace() -> str | None:
    """Where this process's number counts, as containers have numbers of their own; None: the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def process_condition(pid: int, started: str | None) -> str:
    """'running', 'stopped' (Ctrl-Z, a debugger) or 'gone'. started: as `process_started` said."""
    try:
        status = psutil.Process(pid).status()
    except (psutil.Error, ValueError):  # ValueError: no process has that number
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) or (
        started is not None and process_started(pid) != started
    ):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def processes_below(pid: int) -> tuple[ProcessUse, ...]:
    """Those that a process has started, and those that these have; without what may not be read."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in descendants(pid):
            with contextlib.suppress(psutil.Error), one.oneshot():
                times = one.cpu_times()
                found.append(
                    ProcessUse(
                        pid=one.pid,
                        name=one.name(),
                        resident_bytes=one.memory_info().rss,
                        cpu_seconds=times.user + times.system,
                    )
                )
    return tuple(found)
