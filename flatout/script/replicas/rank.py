"""A rank's process, before the script's first line.

    replica = begin(folder)      # isolated, its GPU chosen, its launcher's variables hidden from the script
    replica.install()
    ...                          # the script
    replica.end(status)

Ranks other than the first run the same lines, so they would write the same files. They see a private copy of whatever
they write: a checkpoint is there for the rank that loads it again, and on disk once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from flatout import environment
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.script.entry import Target, execute
from flatout.script.replicas.replica import Replica
from flatout.script.replicas.settings import SCRATCH, Refusals, Settings

ALL_WRITE = "--all-ranks-write"


def begin(folder: Path) -> Replica:
    """Call it while the process has one thread, before torch is imported: it returns in a new process where the rank is
    isolated. Raises Refused where that is not possible, UsageError without a launcher's variables."""
    place = environment.launched()
    if place is None:
        raise UsageError(
            f"{environment.RANKS} is set, and RANK is not",
            limit="flatout run --devices sets both, for its ranks alone",
            remedy="unset it",
        )
    number, count = place
    settings = Settings.read(folder)
    local = environment.local_rank()
    environment.put_ranks_aside()
    if settings.visible:
        environment.show_cuda_devices(settings.visible[number if local is None else local])
    if settings.is_trial or (number and settings.isolated):
        _isolate(folder, number, settings)
    if number or settings.is_trial:
        _silence()
    return Replica(settings, folder, number, count)


def run_script(replica: Replica, target: Target, at_end: Callable[[], object]) -> int:
    """The script on this rank of a trial; the exit status. at_end: called where it has ended by itself."""
    own = os.getpid()
    replica.install()
    try:
        status = execute(target)
    except FlatoutError:
        replica.end(1)
        raise
    if status == 0 and os.getpid() == own:  # not in a process that the script has forked
        at_end()
    return replica.end(status)


def _isolate(folder: Path, number: int, settings: Settings) -> None:
    from flatout.script.isolation import enter

    shared = [folder, *(Path(path) for path in settings.shared)]
    try:
        # The network stays: ranks reach each other over loopback.
        enter(folder / f"{SCRATCH}{number}", shared, "overlay", allow_network=True)
    except MachineError as error:
        raise Refusals(folder, number).refuse(
            f"rank {number} cannot get a private copy of the files it writes: {error.what}",
            limit=error.limit or "each rank runs the whole script, and would write the same files at the same time",
            remedy=f"{error.remedy}, or " * bool(error.remedy)
            + f"let all of them write, if the script's files can bear it: {ALL_WRITE}",
            machine=True,
        ) from None


def _silence() -> None:
    """The first rank prints what one device would have printed, and nobody reads what a trial prints; errors are passed
    on."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
