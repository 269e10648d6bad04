"""A run while it goes on: its state in a file about once a second, and as a view for the panel of a terminal.

The state is made in the script's own thread, at the end of a step. The panel's thread reads the latest one, and the
sensors; nothing else of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.diagnose.run_energy import Energy, EnergyWatch
from flatout.diagnose.run_state import RunState, RunStates
from flatout.diagnose.seen_run import LiveRanks, SeenRun
from flatout.errors import MachineError, UsageError
from flatout.machine.ceilings import Ceilings
from flatout.machine.device_rates import Devices, DeviceWatch
from flatout.machine.sensors import Sensors, SensorSource
from flatout.plan import Plan
from flatout.private_details import LEFT_OUT
from flatout.report.live_text import LiveView, panel_lines
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.own_modules import own_imports
from flatout.script.record_file import WRITE_EVERY_SECONDS
from flatout.script.replicas.settings import RUN_FOLDER
from flatout.script.runner import Runner
from flatout.serve.run_folder import StateFile, read_ranks, read_run
from flatout.signals import raised_by_handler

MOST_SHARE, SELDOM_SECONDS = 0.002, 5.0
"""States take at most this share of the script's processor time, but there is one every so many seconds."""
SENSORS_EVERY_SECONDS = 3.0
PAGE_START_SECONDS = 30.0
LINGER_SECONDS = 60.0
"""How long a page can still fetch the last state of a run that has ended; browsers ask rarely for a hidden page."""


class LiveRun:
    """Made before the script starts. No error in here reaches the script or ends the watch."""

    def __init__(
        self,
        target: Target,
        runner: Runner,
        *,
        plan: Plan | None,
        notes: Sequence[str],
        ranks_folder: Path | None = None,
    ) -> None:
        """notes: what was said of the plan. ranks_folder: where the ranks of a run on several devices keep their
        records."""
        command = f"{target.name} {LEFT_OUT}" if target.arguments else target.name
        ranks = None if ranks_folder is None else str(ranks_folder)
        self._states = RunStates(target, runner, plan=plan, notes=notes, command=command, ranks_folder=ranks)
        self._runner, self._file = runner, StateFile()
        self._owner = os.getpid()
        self._imported = False
        self._next_cpu = self._latest_at = 0.0
        self.latest: RunState | None = None
        self.fault: str | None = self._file.fault
        """Why nobody can watch this run; None: they can."""
        self._update()
        runner.at_second.append(self._second)

    @property
    def folder(self) -> Path | None:
        return self._file.folder

    def seen(self) -> SeenRun | None:
        """As of its last state."""
        if self.latest is None:
            return None
        return SeenRun(folder=str(self.folder or os.devnull), state=self.latest, condition="running")

    def end(self, status: int | None) -> None:
        """The script has ended with this status; None: it is not known."""
        if os.getpid() == self._owner:
            self._runner.watch.count_passed()
            self._runner.record.steps = self._runner.watch.finder.steps
            self._update(status=status, ended=True)

    def _second(self, now: float) -> None:
        """`now`, on the clock of time.perf_counter(), comes a second after the last one or later. On a machine that
        many share, this process may have had little of that second: then a state is worth less than what it takes."""
        began = time.thread_time()
        if began < self._next_cpu and now < self._latest_at + SELDOM_SECONDS:
            return
        self._latest_at = now
        again = self._imported
        self._update_with_own_imports()
        if again:  # imports happen once
            self._next_cpu = began + (time.thread_time() - began) / MOST_SHARE

    def _update_with_own_imports(self) -> None:
        if self._imported:
            self._update()
            return
        with own_imports():  # what is imported on the way the first time must not be the script's
            self._update()
        self._imported = self.latest is not None and self.latest.steps > 0

    def _update(self, *, status: int | None = None, ended: bool = False) -> None:
        try:
            self.latest = self._states.now(status=status, ended=ended)
            self._file.write(self.latest)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.fault = f"{type(error).__name__}: {error}"


class RunPanel:
    """The lines of the panel, for its thread."""

    def __init__(
        self, seen: Callable[[], SeenRun | None], ceilings: Ceilings | None, sensors: SensorSource | None = None
    ) -> None:
        """seen: the run as it is now; None: it has not begun."""
        self._seen, self._ceilings = seen, ceilings
        self._watch, self._energy = DeviceWatch(sensors or Sensors()), EnergyWatch()
        self._devices: Devices | None = None
        self._known_energy: Energy | None = None
        self._ranks = LiveRanks()
        self._next = self._next_ranks = 0.0

    def lines(self, columns: int, most: int) -> list[str]:
        """At most so many, each of at most so many cells."""
        seen, now = self._seen(), time.monotonic()
        if seen is None:
            return [""]
        if now >= self._next:
            self._next = now + SENSORS_EVERY_SECONDS
            self._devices = self._watch.read()
            self._known_energy = self._energy.add(seen.state, self._devices)
        if now >= self._next_ranks:
            self._next_ranks = now + WRITE_EVERY_SECONDS
            self._ranks = read_ranks(seen)
        view = LiveView(
            state=seen.state,
            clock_seconds=now,
            ceilings=self._ceilings,
            devices=self._devices,
            energy=self._known_energy,
            ranks=self._ranks,
        )
        return panel_lines(view, columns, most)[:most]

    def close(self) -> None:
        self._watch.close()


def ranks_panel(ranks_folder: Path, ceilings: Ceilings | None) -> RunPanel:
    """For the process that started the ranks of a run on several devices: the state is the first rank's."""

    def seen() -> SeenRun | None:
        with contextlib.suppress(OSError, UsageError):
            return read_run(Path((ranks_folder / RUN_FOLDER).read_text(encoding="utf-8")))
        return None

    return RunPanel(seen, ceilings)


def start_page(folder: Path, *, linger_seconds: float = LINGER_SECONDS) -> str:
    """Start the process that serves this run's page, until so long after the run has ended; returns the page's URL.

    It is nobody's child for long, so a script that waits for its children never meets it. Raises MachineError.
    """
    ours, theirs = os.pipe()
    try:
        command = child_command("flatout.serve", str(folder), str(theirs), str(linger_seconds))
        shell = subprocess.Popen(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        theirs = -1
        shell.wait()
        return _announced(ours)
    except OSError as error:
        raise MachineError(f"the page's process cannot be started: {error.strerror}") from error
    finally:
        for descriptor in (ours, theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _announced(descriptor: int) -> str:
    """What the page's process says, in one line."""
    deadline, said = time.monotonic() + PAGE_START_SECONDS, b""
    while b"\n" not in said:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise MachineError("the page's process did not start", limit=f"waited {PAGE_START_SECONDS:.0f} s")
        data = os.read(descriptor, 4096)
        if not data:
            raise MachineError("the page's process ended before it served anything")
        said += data
    found = json.loads(said.split(b"\n")[0])
    if "url" not in found:
        raise MachineError(str(found.get("error")))
    return str(found["url"])
