"""Where each run keeps its state while it goes on, for whoever watches it: one folder a run, for its user alone.

    XDG_RUNTIME_DIR/flatout-runs/run-PID-START/state.json       else below the temporary folder

The run writes the file about once a second, whole or not at all; nothing is read back, no descriptor stays open, and a
folder that cannot be written harms no run. The folders of runs that have ended are removed an hour later, by the next
run or by `flatout clean`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path

from flatout import environment
from flatout.diagnose.run_state import RunState
from flatout.diagnose.seen_run import LiveRanks, SeenRun, condition_of, live_ranks
from flatout.errors import UsageError, describe_error
from flatout.report.document import document, read_document
from flatout.script.record_file import read_records
from flatout.script.run_folders import STATE, make_folder, make_private, remove_old, run_folders, unusable_because
from flatout.whole_files import PRIVATE, written_whole

KIND = "run-state"
LARGEST_BYTES = 4 << 20
MOST = 1e10
"""Seconds: no run takes three centuries."""
RETRY_SECONDS = 10.0
"""After a write that failed."""


class StateFile:
    """The state of this process's run. No method raises for what the file system refuses; `fault` says what it was."""

    def __init__(self, parent: Path | None = None) -> None:
        self.folder: Path | None = None
        self.fault: str | None = None
        self._retry = 0.0
        try:
            parent = (environment.runs_dir() if parent is None else parent).absolute()
            make_private(parent)
            remove_old(parent)
            self.folder = make_folder(parent)
        except OSError as error:
            self.fault = describe_error(error)

    def write(self, state: RunState) -> None:
        if self.folder is None or (self.fault is not None and not state.ended and state.written_clock < self._retry):
            return
        text = json.dumps(document(KIND, state.to_json()), ensure_ascii=True, allow_nan=False)
        try:
            with written_whole(self.folder / STATE, mode=PRIVATE, durable=False) as temporary:
                temporary.write_text(text, encoding="utf-8")
            self.fault = None
        except OSError as error:
            self.fault, self._retry = describe_error(error), state.written_clock + RETRY_SECONDS
            with contextlib.suppress(OSError):  # something cleared the temporary folder
                self.folder.mkdir(mode=0o700, parents=True)


def read_run(folder: Path) -> SeenRun:
    """The run whose state is in this folder, or a UsageError that says why there is none."""
    path = folder / STATE
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(
            f"{folder} is not the folder of a run: no {STATE} ({error.strerror})",
            remedy="list them with: flatout watch",
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_BYTES:
        raise UsageError(f"{path} is not the state of a run", limit=f"a file of at most {LARGEST_BYTES >> 20} MiB")
    doc = read_document(path, KIND)
    try:
        state = RunState.from_json({key: value for key, value in doc.items() if key != "flatout"})
    except TypeError as error:
        raise UsageError(f"{path} is not the state of a run: {error}") from error
    if not all(abs(one) <= MOST for one in (state.run_seconds, state.step_seconds or 0.0, *state.step_curve)):
        raise UsageError(f"{path} is not the state of a run: it took more than {MOST:g} s")
    return SeenRun(folder=str(folder), state=state, condition=condition_of(state))


def read_ranks(seen: SeenRun) -> LiveRanks:
    """The processes of this run that train, where there are several, by the records that they keep."""
    folders = [seen.folder, *([seen.state.ranks_folder] if seen.state.ranks_folder is not None else [])]
    records = [one for folder in folders for one in read_records(Path(folder))]
    return live_ranks(records, time.monotonic())


def all_runs(parent: Path | None = None) -> list[SeenRun]:
    """Those of this user on this machine, the newest first: running, or ended within the last hour."""
    found = []
    for folder in run_folders(environment.runs_dir() if parent is None else parent):
        with contextlib.suppress(UsageError):
            found.append(read_run(folder))
    return sorted(found, key=lambda one: one.state.started_at, reverse=True)


def runs_unknown_because() -> str | None:
    """Why no run can be listed; None: all can."""
    why = unusable_because(environment.runs_dir())
    return None if why is None else f"{why}; runs keep no state there: name another folder in FLATOUT_RUNS_DIR"


def find_run(name: str) -> SeenRun:
    """By its folder or its process number. Raises UsageError where there is none."""
    if not name.isdecimal() or os.path.isdir(name):
        return read_run(Path(name))
    same = [one for one in all_runs() if str(one.state.pid) == name.lstrip("0")]
    if not same:
        raise UsageError(
            f"process {name} is no `flatout run` of yours",
            limit=runs_unknown_because() or "",
            remedy="list them with: flatout watch",
        )
    return same[0]
