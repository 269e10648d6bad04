"""`flatout memory`: one trial that follows every tensor of a script for a few steps.

watched = watch_memory(MemoryRequest(target=Target.from_command(["train.py"])))
watched.use.peak.size_bytes, watched.leaks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.errors import TrialError
from flatout.memory.leaks import LEAST_STEPS, Leak
from flatout.memory.use import MemoryUse
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialDied, TrialEnded, TrialFault, TrialHangs
from flatout.script.trial.messages import MemoryAnswer
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup, terminal_size
from flatout.script.work_folder import work_folder
from flatout.units import format_seconds

STEPS = 8
PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What to watch, and for how many steps after the warm-up."""

    target: Target
    steps: int = STEPS
    patience_seconds: float = PATIENCE_SECONDS
    """Timeout of the trial, for a script that never steps or hangs."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryWatched:
    """The result of the trial."""

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
    """Of the process, at the end of each step; includes Python, torch's libraries and our own records."""
    peak_resident_bytes: int
    collected: tuple[str, ...]
    """Lines whose tensors were only waiting for the garbage collector."""
    compiled: bool
    left_uncompiled: bool
    """Does the script use torch.compile, which compiles nothing while every operation is followed?"""
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
    """Run the script as a trial. Raises TrialError where it could not be watched."""
    request.target.check()
    with work_folder() as folder:
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            isolation=request.isolation,
            allow_network=request.allow_network,
            inherits_stdin=True,
            terminal_size=terminal_size(),
            errors_apart=True,
        )
        with TrialProcess(setup, label="memory") as trial:
            try:
                answer: MemoryAnswer
                answer, end = trial.watch({"do": "memory", "steps": request.steps}, request.patience_seconds)
            except TrialError as error:
                raise _explained(error, request, trial.errors) from None
            return _watched(request, answer, end, trial.errors)


def _watched(request: MemoryRequest, answer: MemoryAnswer, end: TrialEnded | None, errors: str) -> MemoryWatched:
    leaks = [Leak(**{**one, "births": tuple(one["births"])}) for one in answer.get("leaks", ())]
    note = f"{end.note}\n" if end is not None and end.note else ""
    return MemoryWatched(
        target=request.target,
        status=end.status if end is not None else None,
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
        errors=errors + note if end is not None and end.status else "",
    )


def _explained(error: TrialError, request: MemoryRequest, errors: str) -> TrialError:
    """The error in terms of `flatout memory`, with the script's stderr; for a signal with a shell's exit code."""
    what, limit, remedy = error.what, error.limit, error.remedy
    if isinstance(error, TrialHangs):
        patience = format_seconds(request.patience_seconds)
        what = f"the script did not reach {request.steps} steps in {patience}"
        limit = "that is the timeout"
        remedy = "allow more with --patience 2h, or ask for fewer --steps, if it trains at all"
    elif isinstance(error, TrialFault):
        what = f"the memory could not be followed: {what}"
    elif isinstance(error, TrialDied):
        what = (
            f"the script died of {error.signal_name}"
            if error.signal_name
            else (f"the script exited with code {error.code} without Python's normal shutdown")
        )
    tail = errors.strip() if isinstance(error, TrialHangs | TrialDied) else ""
    explained = TrialError(what, limit=limit, remedy=remedy + (f"\n{tail}" if tail else ""))
    if isinstance(error, TrialDied) and error.signal_name:
        explained.exit_code = 128 - error.code
    return explained
