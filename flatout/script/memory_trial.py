"""`flatout memory`: one trial that follows every tensor of a script for a few steps.

watched = watch_memory(MemoryRequest(target=Target.from_command(["train.py"])))
watched.memory.use.peak.size_bytes, watched.memory.leaks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.decoding import decode
from flatout.memory.leaks import LEAST_STEPS, Leak
from flatout.memory.use import MemoryUse
from flatout.script.entry import Target
from flatout.script.rank_answers import RankAnswer
from flatout.script.trial.messages import MemoryAnswer
from flatout.script.watched_trial import WatchRequest, watched_trial

STEPS = 8


@dataclass(frozen=True, kw_only=True)
class MemoryRequest(WatchRequest):
    """What to watch, and for how many steps after the warm-up."""

    steps: int = STEPS


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Of one process, over the steps that were watched."""

    step_kind: str | None = None
    steps: int = 0
    use: MemoryUse | None = None
    """None: the script never imported torch."""
    leaks: tuple[Leak, ...] = ()
    judged_steps: int = 0
    resident_bytes: tuple[int, ...] = ()
    """Of the process, at the end of each step; includes Python, torch's libraries and our own records."""
    peak_resident_bytes: int
    collected: tuple[str, ...] = ()
    """Lines whose tensors were only waiting for the garbage collector."""
    compiled: bool = False
    left_uncompiled: bool = False
    """Does the script use torch.compile, which compiles nothing while every operation is followed?"""

    @property
    def peak_bytes(self) -> int:
        """Of tensors; 0 where there were none."""
        return 0 if self.use is None else self.use.peak.size_bytes

    @property
    def leaking(self) -> tuple[Leak, ...]:
        return tuple(leak for leak in self.leaks if not leak.bounded)

    @property
    def verdict(self) -> Literal["leaks", "steady", "unknown"]:
        if self.leaking:
            return "leaks"
        return "steady" if self.judged_steps >= LEAST_STEPS else "unknown"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Of one of several processes that train."""

    name: str
    """'rank 1', or 'process 4242' where they do not train together."""
    memory: ProcessMemory
    fault: str = ""
    """Why it could not be followed to the end."""


@dataclass(frozen=True, kw_only=True)
class MemoryWatched:
    """The result of the trial."""

    target: Target
    status: int | None
    """The script's exit code where it ended by itself; None: it was stopped after its steps."""
    memory: ProcessMemory
    """Of the script's process; where that does not train, of the one of `ranks` whose tensors take the most."""
    errors: str
    """What the script wrote to stderr, where it failed."""
    ranks: tuple[RankMemory, ...] = ()
    """The processes that train together, or that the script started to train in."""
    shown_rank: str = ""
    """Name of the one that `memory` is of; '': it is of the script's own process, beside them."""
    rank_notes: tuple[str, ...] = ()


def watch_memory(request: MemoryRequest) -> MemoryWatched:
    """Run the script as a trial. Raises TrialError where it could not be watched."""
    request.target.check()
    found = watched_trial(request, {"do": "memory", "steps": request.steps}, "followed", inherits_stdin=True)
    ranks = tuple(
        RankMemory(name=_name(one), memory=_process_memory(one["memory"]), fault=one["fault"]) for one in found.ranks
    )
    memory = None if found.answer is None else _process_memory(found.answer)
    shown = None
    if memory is None or (ranks and not memory.steps):
        shown = max(ranks, key=lambda one: one.memory.peak_bytes)
        memory = shown.memory
    return MemoryWatched(
        target=request.target,
        status=found.status,
        memory=memory,
        errors=found.shown_errors,
        ranks=ranks,
        shown_rank="" if shown is None else shown.name,
        rank_notes=found.rank_notes,
    )


def _name(answer: RankAnswer) -> str:
    return f"process {answer['name']}" if answer["rank"] is None else f"rank {answer['rank']}"


def _process_memory(answer: MemoryAnswer) -> ProcessMemory:
    return decode(ProcessMemory, {name: value for name, value in answer.items() if name not in ("event", "ended")})
