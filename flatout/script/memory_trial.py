"""The parent's end of `flatout memory`: start the isolated process, wait for its answer, clean up after it.

    watched = watch_memory(MemoryRequest(target=Target.from_command(["train.py"])))
    watched.use.peak.size_bytes, watched.leaks

Nothing of the user's is touched: the process writes to a copy, and ends after a few steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.environment import trial_environment
from flatout.errors import ScriptError, TrialError
from flatout.memory.leaks import LEAST_STEPS, Leak
from flatout.memory.use import MemoryUse
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.trial.end import end_trial
from flatout.script.work_folder import work_folder
from flatout.units import format_seconds

STEPS = 8
PATIENCE_SECONDS = 1800.0
MOST_ERROR_BYTES = 20_000


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What to watch, and for how many steps after the warm-up."""

    target: Target
    steps: int = STEPS
    patience_seconds: float = PATIENCE_SECONDS
    """For the whole watch: a script that never steps, or hangs, is ended then."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryWatched:
    """Everything that was found out."""

    target: Target
    status: int | None
    """The script's exit code where it ended by itself; None: it was stopped after its steps."""
    step_kind: str | None
    steps: int
    use: MemoryUse | None
    """None: the script never imported torch."""
    leaks: tuple[Leak, ...]
    judged_steps: int
    resident_bytes: tuple[int, ...]
    """Of the process, at the end of each step: with Python, torch's libraries and our own records."""
    peak_resident_bytes: int
    collected: tuple[str, ...]
    """Lines whose tensors only waited for the garbage collector."""
    compiled: bool
    left_uncompiled: bool
    """Does the script ask for torch.compile, which compiles nothing while every operation is followed?"""
    errors: str
    """What the script wrote to stderr, where it failed."""

    @property
    def leaking(self) -> tuple[Leak, ...]:
        return tuple(leak for leak in self.leaks if not leak.bounded)

    @property
    def verdict(self) -> Literal["leaks", "steady", "unknown"]:
        if self.leaking:
            return "leaks"
        return "steady" if self.judged_steps >= LEAST_STEPS else "unknown"


def watch_memory(request: MemoryRequest) -> MemoryWatched:
    """Run the script as a trial. Raises ScriptError or TrialError where nothing could be watched."""
    request.target.check()
    with work_folder() as folder:
        answer = run_child("flatout.script.memory_child", request, folder)
        errors = (folder / "errors.log").read_bytes()[-MOST_ERROR_BYTES:].decode(errors="replace")
    return _watched(request, answer, errors)


def _watched(request: MemoryRequest, answer: dict[str, Any], errors: str) -> MemoryWatched:
    if answer["event"] == "stopped":
        raise TrialError(f"stopped before the script's first write: {answer['reason']}")
    if answer["event"] == "refused":
        raise ScriptError(answer["reason"])
    if answer["event"] == "fault":
        raise TrialError(f"the memory could not be watched: {answer['reason']}")
    leaks = [Leak(**{**one, "births": tuple(one["births"])}) for one in answer.get("leaks", ())]
    return MemoryWatched(
        target=request.target,
        status=answer.get("status"),
        step_kind=answer.get("step_kind"),
        steps=answer.get("steps", 0),
        use=MemoryUse.from_json(answer["use"]) if "use" in answer else None,
        leaks=tuple(leaks),
        judged_steps=answer.get("judged_steps", 0),
        resident_bytes=tuple(answer.get("resident_bytes", ())),
        peak_resident_bytes=answer["peak_resident_bytes"],
        collected=tuple(answer.get("collected", ())),
        compiled=answer.get("compiled", False),
        left_uncompiled=answer.get("left_uncompiled", False),
        errors=errors if answer.get("status") else "",
    )


def run_child(
    module: str,
    request: MemoryRequest,
    folder: Path,
    *,
    words: Mapping[str, Any] | None = None,
    changes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start `python -m module CONFIG` isolated and wait for its one line. changes: of its environment."""
    scratch, config = folder / "scratch", folder / "config.json"
    scratch.mkdir()
    read_fd, write_fd = os.pipe()
    words = {
        **(words or {}),
        "scratch": str(scratch),
        "isolation": request.isolation,
        "allow_network": request.allow_network,
        "steps": request.steps,
        "write_fd": write_fd,
    }
    config.write_text(json.dumps({"target": asdict(request.target), "parent": os.getpid(), **words}))
    with (
        _stdin() as stdin,
        open(folder / "output.log", "wb") as output,
        open(folder / "errors.log", "wb") as errors,
        os.fdopen(read_fd, "rb") as answers,
    ):
        process = subprocess.Popen(
            child_command(module, str(config)),
            stdin=stdin,
            stdout=output,
            stderr=errors,
            pass_fds=(write_fd,),
            env=trial_environment(changes or {}),
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            return _answer(process, answers, request)
        except TrialError as error:
            tail = _tail(folder / "errors.log")
            told = TrialError(error.what, limit=error.limit, remedy=error.remedy + (f"\n{tail}" if tail else ""))
            told.exit_code = error.exit_code
            raise told from None
        finally:
            end_trial(process)


def _answer(process: subprocess.Popen[bytes], answers: Any, request: MemoryRequest) -> dict[str, Any]:
    """One line; workers that outlive the process hold the pipe open, so its end alone is not waited for."""
    line = b""
    deadline = time.monotonic() + request.patience_seconds
    while not line.endswith(b"\n"):
        if time.monotonic() > deadline:
            raise TrialError(
                f"the script had not made its {request.steps} steps after {format_seconds(request.patience_seconds)}",
                limit="that is the patience with it",
                remedy="give more with --patience 2h, or fewer --steps, if it trains at all",
            )
        gone = process.poll() is not None
        if select.select([answers], [], [], 0.2)[0]:
            chunk = os.read(answers.fileno(), 1 << 16)
            line += chunk
            if chunk:
                continue
        elif not gone:
            continue
        raise _death(process.wait())
    found: dict[str, Any] = json.loads(line)
    return found


def _tail(log: Path) -> str:
    return log.read_bytes()[-MOST_ERROR_BYTES:].decode(errors="replace").strip()


def _death(code: int) -> TrialError:
    """Of a signal: with the exit code that a shell gives for it."""
    if code >= 0:
        return TrialError(f"the script left with code {code} in a way that skips all of Python's own ends")
    name = signal.Signals(-code).name
    died = TrialError(f"the script died of {name}" + (" (out of memory?)" if name == "SIGKILL" else ""))
    died.exit_code = 128 - code
    return died


@contextlib.contextmanager
def _stdin() -> Iterator[Any]:
    """What is piped in goes to the script; of a terminal it reads nothing, because it runs in a session of its own."""
    try:
        piped = sys.stdin is not None and not sys.stdin.isatty() and sys.stdin.fileno() >= 0
    except (OSError, ValueError):
        piped = False
    if piped:
        yield sys.stdin
    else:
        with open(os.devnull, "rb") as nothing:
            yield nothing
