"""Which way a trial is kept from the user's files, and why: `enter` chooses, `probe` tells beforehand.

Put the scratch directory below /tmp or /var/tmp, on a disk, with a short path (a socket's path has at most 107
characters). Beneath a home directory it works too, but then that home is laid over child by child (see overlay.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from flatout.errors import MachineError, TrialError

from .guard import enter_guard
from .overlay import enter_overlay
from .scratch import cleanup, prepare

Mode = Literal["overlay", "guard"]


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """How this process is kept from the user's files; `details` says what is special or still possible here."""

    mode: Mode
    reason: str
    details: tuple[str, ...] = ()


def enter(
    scratch: Path,
    shared: Sequence[Path] = (),
    mode: Literal["auto", "overlay", "guard"] = "auto",
    on_first_write: Callable[[str], NoReturn] | None = None,
) -> Isolation:
    """From here on this process, and whatever it starts, changes no file of the user's. There is no way back.

    Call it while the process has one thread, before the script or torch is imported. What is written below `scratch`
    and the `shared` directories is real and stays. In guard mode `on_first_write` is called with a description before
    the first write anywhere else; it must not return. Without it that write raises PermissionError.
    """
    scratch = prepare(scratch)
    resolved = [_prepare_shared(path) for path in shared]
    refusal = "asked for"
    if mode != "guard":
        try:
            reason, details = enter_overlay(scratch, resolved)
            return Isolation(mode="overlay", reason=reason, details=details)
        except MachineError as error:
            if mode == "overlay":
                raise
            refusal = str(error)
    return Isolation(mode="guard", reason=refusal, details=enter_guard(scratch, resolved, on_first_write))


def _prepare_shared(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dataclasses import asdict
from pathlib import Path
from flatout.script.isolation import enter
print(json.dumps(asdict(enter(Path(sys.argv[2])))))
"""


def probe(scratch: Path) -> Isolation:
    """What `enter` would do here, found by doing it in a process of its own; changes nothing but `scratch`."""
    scratch.mkdir(parents=True, exist_ok=True)
    place = tempfile.mkdtemp(prefix="probe-", dir=scratch)
    try:
        # The child's own search path, because this package may come from a checkout that only this process knows of.
        search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        command = [sys.executable, "-c", _PROBE, search_path, place]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        if answer.returncode != 0:
            raise TrialError(f"the isolation probe failed with code {answer.returncode}: {answer.stderr[-500:]}")
        found = json.loads(answer.stdout)
        return Isolation(mode=found["mode"], reason=found["reason"], details=tuple(found["details"]))
    except subprocess.TimeoutExpired as error:
        raise TrialError("the isolation probe did not answer", limit="60 seconds") from error
    finally:
        cleanup(Path(place))
