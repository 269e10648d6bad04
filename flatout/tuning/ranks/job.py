"""A process that starts ranks, and in whose network these have loopback alone: a trial that is a group, a measurement
of what they exchange, or a proof.

    with RanksJob(folder, JobRequest(kind="replicas", target=target, devices=2)) as job:
        ...                                # it ends with us, and whatever it started ends with it

A process of its own, since a launcher takes over the signals of its process, and a network cannot be left again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flatout.environment import trial_environment
from flatout.errors import FlatoutError, MachineError, ScriptError, UsageError
from flatout.script.child_command import child_command
from flatout.script.entry import Target

REQUEST, RESULT, LOG = "job.json", "result.json", "output.log"
ISOLATION, SCRATCH = "isolation.json", "scratch"
"""Of ranks of a script: how they are kept from the user's files, and where what they write goes."""
END_SECONDS = 10.0
"""After each signal: the launcher ends its ranks, whose processes the kernel has to end."""
POLL_SECONDS = 0.05
ERRORS: dict[str, type[FlatoutError]] = {one.__name__: one for one in (UsageError, ScriptError, MachineError)}
"""Those that pass from its process to us as they are; others come as a ScriptError."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What its process is to do."""

    kind: Literal["replicas", "ranks", "own-ranks", "module", "collectives", "proof"]
    """Start ranks that take commands, of a script that is replicated or of one that trains in ranks by itself; start a
    script that starts such ranks; run a module of ours, `target`, in ranks or alone; measure collectives; or prove that
    several devices train as one."""
    target: Target
    devices: int
    """How many ranks."""
    allow_network: bool = False
    shared: tuple[str, ...] = ()
    """Of ranks and of a module, the folders to which they write for real."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of ranks, more environment variables."""
    steps: int = 0
    """Of the proof."""


class RanksJob:
    """One such process. `folder`: has the settings of the ranks; it outlives the job."""

    def __init__(self, folder: Path, request: JobRequest) -> None:
        self._folder, self._log = folder, folder / LOG
        told = json.dumps({"request": asdict(request), "parent": os.getpid()})
        (folder / REQUEST).write_text(told, encoding="utf-8")
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                child_command("flatout.tuning.ranks.job_child", str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=trial_environment({}),
                start_new_session=True,  # Ctrl-C in the terminal is for us
            )

    def __enter__(self) -> RanksJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self, still_wanted: Callable[[], bool]) -> object:  # JSON, as the child wrote it
        """What it found. Raises what it raised; ScriptError with the end of its log where it died; None: it is not
        wanted any more."""
        while self.alive:
            if not still_wanted():
                return None
            time.sleep(POLL_SECONDS)
        try:
            found = json.loads((self._folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ScriptError(f"the ranks ended with exit code {self.process.wait()}", remedy=self.last_words) from None
        if (error := found.get("error")) is not None:
            raise ERRORS.get(error["kind"], ScriptError)(error["what"], limit=error["limit"], remedy=error["remedy"])
        return found["found"]

    @property
    def last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End it and all that it started: it is asked twice, the second time to hurry, and then killed, whereupon the
        launcher's guard ends the ranks."""
        for _ in range(2):
            if not self.alive:
                return
            self.process.send_signal(signal.SIGTERM)
            if self.ended_within(END_SECONDS):
                return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
