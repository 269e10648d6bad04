"""A rank of a run on several devices that is only a trial: it goes through the windows of a profile, and ends.

All ranks end after the same step. What one rank alone does in a step (the first one's behaviour) is not followed: the
others would have to wait, or to go on without it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flatout.script.entry import Target
from flatout.script.process_end import leave_at_once
from flatout.script.replicas.rank import begin, run_script
from flatout.script.replicas.replica import Replica
from flatout.script.replicas.settings import ERRORS, LATE
from flatout.script.trial.isolated_child import Answer
from flatout.script.watched_rank import WatchedProcess


class ProfiledReplica(WatchedProcess):
    """One rank, from before the script's first line."""

    def __init__(self, replica: Replica, answers: Path, patience_seconds: float) -> None:
        self._replica = replica
        # What it writes to stderr is shown only where the script fails: the profiler logs there too.
        log = os.open(answers / f"{ERRORS}{replica.number}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 2)
        os.close(log)
        super().__init__(answers, f"rank-{replica.number}")
        timer = threading.Timer(patience_seconds, self._too_late)
        timer.daemon = True
        timer.start()

    def on_torch(self, hooks: Sequence[Callable[[ModuleType], object]]) -> None:
        self._replica.at_torch.extend(hooks)

    def finish(self, answer: Answer) -> NoReturn:
        """The windows are over, on all ranks."""
        self.give()
        leave_at_once(self._replica.end(0))

    def _too_late(self) -> None:
        """In a thread of its own: the script's may hang."""
        (self.answers.folder / LATE).touch()
        leave_at_once(1)


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder of the run, that of the answers, the patience in seconds, then the script and its own."""
    folder, answers, patience = Path(arguments[0]), Path(arguments[1]), float(arguments[2])
    target = Target.from_command(arguments[3:])
    replica = begin(folder)
    return run_script(replica, target, ProfiledReplica(replica, answers, patience).ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
