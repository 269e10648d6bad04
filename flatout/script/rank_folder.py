"""Where ranks keep their records that one launcher has started on this machine, each of them `flatout run` itself:

    torchrun --nproc-per-node 2 -m flatout run train.py

It is named after the launcher, their common parent, like the folder of a run, and removed with those.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flatout import environment
from flatout.machine.processes import pid_namespace, process_condition, process_started
from flatout.script.process_record import ProcessRecord
from flatout.script.record_file import read_records
from flatout.script.run_folders import make_private

END_SECONDS, POLL_SECONDS = 2.0, 0.05
"""How long the rank that reports waits for the last records of the others."""


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
    for one in records:
        with contextlib.suppress(OSError):
            here = one.pid_namespace == pid_namespace()
            if not one.ended and here and process_condition(one.pid, one.process_started) != "gone":
                return True
    return False
