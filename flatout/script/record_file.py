"""The record of a process that trains, in a file that another process reads: every few seconds, and at its end.

It is in the folder of the run; or, of ranks that one launcher has started on this machine, each of them `flatout run`
itself (torchrun --nproc-per-node 2 -m flatout run train.py), in one that is named after the launcher, their common
parent, like the folder of a run, and removed with those.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flatout import environment
from flatout.machine.processes import pid_namespace, process_condition, process_started
from flatout.script.own_modules import own_imports
from flatout.script.process_record import Place, ProcessRecord, place_now, process_record
from flatout.script.run_folders import make_private
from flatout.script.runner import Runner
from flatout.signals import own_errors_suppressed
from flatout.whole_files import PRIVATE, written_whole

PREFIX = "process-"
WRITE_EVERY_SECONDS = 2.0
MOST_PROCESSES, LARGEST_BYTES = 4096, 1 << 20
END_SECONDS, POLL_SECONDS = 2.0, 0.05
"""How long the rank that reports waits for the last records of the others."""


class RecordFile:
    """Of this process. No error in here reaches the script."""

    def __init__(self, folder: Path, name: str, runner: Runner, place: Place | None = None) -> None:
        """name: of the process, among those that keep their records in this folder. place: among its ranks."""
        self._path, self._runner, self._pid = folder / f"{PREFIX}{name}.json", runner, os.getpid()
        self._place = place or Place()
        """The last one known: a script destroys its process group before it ends."""
        self._started_at, self._next = time.time(), 0.0
        self._ended = self._written = False
        runner.at_second.append(self._second)

    def _second(self, now: float) -> None:
        if now >= self._next and os.getpid() == self._pid:
            self._next = now + WRITE_EVERY_SECONDS
            # Imports happen once: later the path is not changed under a thread of the script's that may be importing.
            with contextlib.nullcontext() if self._written else own_imports():
                self._write()

    def end(self) -> None:
        """Training has ended. Safe to call twice, and from a forked child (where it does nothing)."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        with own_imports(), contextlib.suppress(Exception):
            self._runner.ended()
            self._write()

    def _write(self) -> None:
        if not self._runner.record.steps:
            return
        with own_errors_suppressed():
            self._place = place_now(self._place)
            record = process_record(self._runner, place=self._place, started_at=self._started_at, ended=self._ended)
            with written_whole(self._path, mode=PRIVATE, durable=False) as temporary:
                temporary.write_text(json.dumps(record.to_json(), allow_nan=False), encoding="utf-8")
            self._written = True


def read_records(folder: Path) -> list[ProcessRecord]:
    """Those that can be read; a process that was killed while it wrote leaves its previous one."""
    records: list[ProcessRecord] = []
    for path in sorted(folder.glob(f"{PREFIX}*.json"))[:MOST_PROCESSES]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size <= LARGEST_BYTES:
                records.append(ProcessRecord.from_json(json.loads(path.read_text(encoding="utf-8"))))
    return records


def launchers_folder() -> Path | None:
    """None: no launcher has started this process together with others, or the folder cannot be had."""
    if environment.rank() is None or (environment.world_size() or 1) < 2:
        return None
    parent = os.getppid()
    started = process_started(parent)
    if started is None:
        return None
    folder = environment.runs_dir().absolute() / f"run-{parent}-{started}"
    try:
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def records_of_others(folder: Path, own_rank: int) -> tuple[ProcessRecord, ...]:
    """Of the other ranks of this start, as they are now."""
    return tuple(one for one in read_records(folder) if one.rank != own_rank)


def last_records(folder: Path, own_rank: int) -> tuple[ProcessRecord, ...]:
    """The same once they have ended; or soon, as they are then."""
    until = time.monotonic() + END_SECONDS
    while True:
        others = records_of_others(folder, own_rank)
        if not _go_on(others) or time.monotonic() >= until:
            return others
        time.sleep(POLL_SECONDS)


def _go_on(records: Sequence[ProcessRecord]) -> bool:
    """Is one of them still there that has not ended?"""
    here = [one for one in records if not one.ended and one.pid_namespace == pid_namespace()]
    return any(process_condition(one.pid, one.process_started) != "gone" for one in here)
