"""Training in processes that the script starts: each is watched by itself, and keeps its record in the run's folder.

    follow_children(folder)     # in `flatout run`, before the script: Python processes started from now on inherit it
    follow()                    # in such a process, when it makes its first optimizer: see child_hook/sitecustomize.py
    read_records(folder)        # in `flatout run`, when the script has ended

A process that makes no optimizer (a loader's worker, a launcher) only waits for torch to be imported.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flatout import environment
from flatout.script import child_hook
from flatout.script.child_hook.sitecustomize import when_first_optimizer
from flatout.script.own_modules import own_imports
from flatout.script.patches import ImportWatch
from flatout.script.runner import Runner
from flatout.whole_files import PRIVATE, written_whole

if TYPE_CHECKING:
    from flatout.script.process_record import ProcessRecord

PREFIX = "process-"
WRITE_EVERY_SECONDS = 2.0
FIRST_AT_EXIT = 0
"""The priority of a finalizer of multiprocessing: a forked child runs those, and no exit handlers."""
MOST_PROCESSES, LARGEST_BYTES = 4096, 1 << 20


def follow_children(folder: Path) -> None:
    """Let Python processes that are started from now on, and forks of this one, keep their records there."""
    environment.follow_children(os.path.dirname(child_hook.__file__), str(folder))
    owner = os.getpid()

    def forked() -> None:
        if os.getppid() == owner:  # a fork of a fork has inherited what the first one set up
            _when_training_begins(folder)

    os.register_at_fork(after_in_child=forked)


def _when_training_begins(folder: Path) -> None:
    def imported(torch: ModuleType) -> None:
        when_first_optimizer(lambda: _follow_into(folder))

    ImportWatch({"torch": imported}).install()


def follow() -> None:
    """Watch this process, as `flatout run` watches the script."""
    folder = environment.followed_into()
    if folder is not None:
        _follow_into(Path(folder))


def _follow_into(folder: Path) -> None:
    with own_imports():
        Followed(folder)


class Followed:
    """The watch of this process, and its record. No error in here reaches the script."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid, self._ended = folder, os.getpid(), False
        self._started_at, self._next = time.time(), 0.0
        self._rank: int | None = None
        """The last one known: a script destroys its process group before it ends."""
        self.runner = Runner()
        self.runner.at_second.append(self._second)
        self.runner.install()
        atexit.register(self.end)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.end, exitpriority=FIRST_AT_EXIT)

    def _second(self, now: float) -> None:
        if now >= self._next and os.getpid() == self._pid:
            self._next = now + WRITE_EVERY_SECONDS
            with own_imports():
                self._write()

    def end(self) -> None:
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        with own_imports(), contextlib.suppress(Exception):
            self.runner.ended()
            self._write()

    def _write(self) -> None:
        if not self.runner.record.steps:
            return
        with contextlib.suppress(Exception):
            from flatout.script.process_record import process_record, rank_now  # here: every run imports this module

            rank = rank_now()
            self._rank = self._rank if rank is None else rank
            record = process_record(self.runner, rank=self._rank, started_at=self._started_at, ended=self._ended)
            path = self._folder / f"{PREFIX}{self._pid}.json"
            with written_whole(path, mode=PRIVATE, durable=False) as temporary:
                temporary.write_text(json.dumps(record.to_json(), allow_nan=False), encoding="utf-8")


def read_records(folder: Path) -> list[ProcessRecord]:
    """Those that can be read; a process that was killed while it wrote leaves its previous one."""
    records: list[ProcessRecord] = []
    if not (paths := sorted(folder.glob(f"{PREFIX}*.json"))):
        return records
    from flatout.script.process_record import ProcessRecord

    for path in paths[:MOST_PROCESSES]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size <= LARGEST_BYTES:
                records.append(ProcessRecord.from_json(json.loads(path.read_text(encoding="utf-8"))))
    return records
