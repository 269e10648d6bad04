"""A trial that is a group of ranks: each has a pipe for commands and one for answers, and gets the same commands.

Ranks wait for them at the end of a step, so that they use no core while another trial is timed. What the first rank
timed counts: in each step it waits for the others, in the exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import tempfile
import time
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import NoReturn, Self

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.script.isolation import cleanup
from flatout.script.numerics import NumericsAnswer
from flatout.script.reference import CheckFound
from flatout.script.trial.answers import Answer, TrialDied, TrialEnded, TrialFault, TrialHangs, most_of
from flatout.script.trial.commanded_rank import ANSWERS, COMMANDS
from flatout.script.trial.commands import CommandedTrial, Patience
from flatout.script.trial.hang_location import STACKS, location
from flatout.script.trial.messages import Command
from flatout.script.trial.process import START_TIMEOUT_SECONDS, STOP_POLL_SECONDS, cpu_seconds
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent
from flatout.tuning.ranks.job import JobRequest, RanksJob

SCRIPT = -1
"""In place of a rank: the process of a script that starts its ranks itself."""
REASON_SECONDS = 15.0
"""After a rank has ended: until the others have, and the reason is there."""


class RankGroup(CommandedTrial):
    """One group of `count` ranks."""

    def __init__(self, setup: TrialSetup, count: int, choices: Sequence[Choice] = (), *, label: str = "ranks") -> None:
        super().__init__(setup, choices, label=label)
        self.count = count
        self.folder = Path()
        """What the ranks read and write; it outlives them."""
        self.ready: Sequence[Answer] = ()
        """What each rank said at the end of its first step."""
        self._job: RanksJob | None = None
        self._spawned = False
        self._spawned_at = 0.0
        self._commands: list[int] = []
        self._answers: list[int] = []
        self._buffers: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> JobRequest:
        """Write what the ranks are told into `folder`; returns how to start them."""
        raise NotImplementedError

    def refusal(self) -> TrialError | None:
        """Why the ranks did not go on, where they ended without an error of the script; None: they do not say."""
        return None

    def scratch(self) -> Sequence[Path]:
        """Folders of the ranks, in `folder`, that are removed once they have ended."""
        return ()

    def check(self, answer: Answer) -> None:
        """Raise where this answer of a rank shows that the others need not be awaited."""

    @property
    def alive(self) -> bool:
        return self._job is not None and self._job.alive

    def spawn(self) -> None:
        """Begin to start without waiting; `start` must follow."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.label}-", dir=self.setup.work_folder))
        self._spawned = True
        request = self.prepare()
        self._commands = [_pipe(self.folder / f"{COMMANDS}{rank}") for rank in range(self.count)]
        self._answers = [_pipe(self.folder / f"{ANSWERS}{rank}") for rank in range(self.count)]
        self._buffers = [b""] * self.count
        self._spawned_at = time.perf_counter()
        self._job = RanksJob(self.folder, request)

    def start(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait for the end of every rank's first recognized step. Raises TrialEnded where the script ends first, and
        what `refusal` says."""
        if self.interruptible and self._has_passed():
            raise BudgetSpent(self.deadline)
        if self._job is None:
            self.spawn()
        assert self._job is not None
        self.ready = self._answered(timeout_seconds, interruptible=False)
        self.start_seconds = self.startup_seconds = time.perf_counter() - self._spawned_at
        self.waiting_seconds = max(0.0, self.start_seconds - cpu_seconds(self._job.process.pid))

    def close(self) -> None:
        """End the ranks and whatever they started, and remove their scratch. The log stays."""
        if self._job is not None:
            self._job.close()
        for pipe in (*self._commands, *self._answers):
            with contextlib.suppress(OSError):
                os.close(pipe)
        self._job, self._commands, self._answers = None, [], []
        for scratch in self.scratch() if self._spawned else ():
            with contextlib.suppress(TrialError):  # the owner of the work folder tries again
                cleanup(scratch)

    def _ask(self, command: Command, timeout_seconds: float) -> object:  # JSON
        for rank in reversed(range(self.count)):  # the first rank, which takes the time, begins last
            os.write(self._commands[rank], (json.dumps(_for_rank(command, rank)) + "\n").encode())
        return as_one(self._answered(timeout_seconds, interruptible=self.interruptible))

    def _answered(self, timeout_seconds: float, *, interruptible: bool) -> list[object]:  # JSON
        """One answer of each rank. Raises where a rank has ended, or does not answer."""
        patience = Patience(timeout_seconds, self._computed_seconds if self.ready else None)
        found: dict[int, object] = {}
        while len(found) < self.count:
            missing = [rank for rank in range(self.count) if rank not in found]
            arrived = self._read(patience.seconds_left, missing, interruptible=interruptible)
            if not arrived and patience.is_over():
                raise TrialHangs(patience.waited_seconds, self._locations(missing))
            for rank, answer in arrived:
                self.check(answer)
                found[rank] = answer
            fault = next((answer["reason"] for _, answer in arrived if answer["event"] == "fault"), None)
            if fault is not None:
                raise TrialFault(fault)
            refused = next((answer["reason"] for _, answer in arrived if answer["event"] == "refused"), None)
            if refused is not None:
                raise TrialError(refused)
            if ended := {rank: answer for rank, answer in arrived if answer["event"] == "ended"}:
                self._explain_end(ended)
        return [found[rank] for rank in range(self.count)]

    def _locations(self, ranks: Sequence[int]) -> str:
        """The lines at which these ranks are; '' where they are unknown, as of ranks that the script starts itself."""
        assert self._job is not None
        found: dict[str, list[str]] = {}
        for rank in ranks:
            at = location(self._job.process.pid, self.folder / f"{STACKS}-{rank}", self.setup.target.folder)
            if at:
                found.setdefault(at, []).append(str(rank))
        return ", ".join(f"{at} (rank {' and '.join(where)})" for at, where in found.items())

    def _computed_seconds(self) -> float:
        return 0.0 if self._job is None else cpu_seconds(self._job.process.pid)

    def _read(self, left: float, missing: Sequence[int], *, interruptible: bool) -> list[tuple[int, Answer]]:
        """What has arrived from these ranks within a moment. left: seconds of patience."""
        assert self._job is not None
        patience = min(left, self.deadline.grace_seconds_left) if self.deadline and interruptible else left
        pipes = [self._answers[rank] for rank in missing]
        alive = self._job.alive  # before we look: what a rank wrote before its end is there
        ready, _, _ = select.select(pipes, [], [], min(max(0.0, patience), STOP_POLL_SECONDS))
        if self.deadline is not None and self.deadline.stopped:
            raise BudgetSpent(self.deadline)
        if not ready and interruptible and self._has_passed():
            raise BudgetSpent(self.deadline)
        if not ready and not alive:
            self._explain_death()
        arrived = []
        for rank in missing:
            if self._answers[rank] in ready:
                self._buffers[rank] += os.read(self._answers[rank], 1 << 16)
            line, newline, rest = self._buffers[rank].partition(b"\n")
            if newline:
                self._buffers[rank] = rest
                arrived.append((rank, json.loads(line)))
        return arrived

    def _explain_end(self, ended: dict[int, Answer]) -> NoReturn:
        """These ranks have ended. One that failed by itself says so; else another one, or the run, says why."""
        assert self._job is not None
        if any(answer["status"] != 0 for answer in ended.values()) and not _failed(ended):
            self._job.ended_within(REASON_SECONDS)
            ended |= self.ends_of_others(ended)
            if not _failed(ended) and (refusal := self.refusal()) is not None:
                raise refusal
        rank = next(iter(_failed(ended) or ended))
        end, steps = ended[rank], max(answer["steps"] for answer in ended.values())
        where = f"rank {rank}" if rank != SCRIPT else ""
        script_steps = max(answer["script_steps"] for answer in ended.values())
        raise TrialEnded(end["status"] or 0, end["error"], steps, where, script_steps=script_steps)

    def ends_of_others(self, known: Collection[int]) -> dict[int, object]:  # JSON
        """Of the other ranks that have said how they ended, what they said."""
        found = {}
        for rank in range(self.count):
            ready, _, _ = select.select([self._answers[rank]], [], [], 0)
            if rank not in known and ready:
                self._buffers[rank] += os.read(self._answers[rank], 1 << 16)
            for line in self._buffers[rank].splitlines():
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if answer["event"] == "ended":
                        found[rank] = answer
        return found

    def _explain_death(self) -> NoReturn:
        """All ranks are gone, and have not answered."""
        assert self._job is not None
        if (refusal := self.refusal()) is not None:
            raise refusal
        if ended := self.ends_of_others(()):
            self._explain_end(ended)
        self._job.result(lambda: True)  # raises what its process could not do
        raise TrialDied(self._job.process.wait())


def _failed(ended: dict[int, Answer]) -> list[int]:
    """The ranks whose script raised."""
    return [rank for rank, answer in ended.items() if answer["error"]]


def _for_rank(command: Command, rank: int) -> Command:
    """What is recorded of a rank is in a folder of its own."""
    request = command.get("request")
    if request is None or not request["folder"]:
        return command
    folder = Path(str(request["folder"])) / f"rank-{rank}"
    folder.mkdir(exist_ok=True)
    return {**command, "request": {**request, "folder": str(folder)}}


def _pipe(path: Path) -> int:
    """A named pipe, open at both ends: nobody who opens it waits, and it ends with us."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


# the answers of all ranks to one command, as one: of the first rank, with what all of them have to say


def as_one(answers: Sequence[Answer]) -> object:
    """Times and what was observed are the first rank's; memory of a step is the largest, that of the machine the sum;
    a lever is rolled back where any rank did; numbers are those of all."""
    first = dict(answers[0])
    if first["event"] == "numerics":
        first |= numbers_of_all(answers)
    if "resident_bytes" in first:
        for resident in ("resident_bytes", "peak_resident_bytes"):
            first[resident] = sum(one[resident] for one in answers)
        first["rolled_back"] = list(chain.from_iterable(one["rolled_back"] for one in answers))
    if first["event"] == "peak":
        first["peak_bytes"] = most_of([one["peak_bytes"] for one in answers])
        first["incidents"] = list(chain.from_iterable(one["incidents"] for one in answers))
    return first


def numbers_of_all(answers: Sequence[NumericsAnswer]) -> NumericsAnswer:
    """The losses of all ranks in each step, every rank's tensors under names of their own. Norms of single gradients
    are the first rank's."""
    first = answers[0]
    steps = min(len(one["gradient_norms"]) for one in answers)
    return {
        **first,
        "losses": [list(chain.from_iterable(one["losses"][step] for one in answers)) for step in range(steps)],
        "gradient_norms": [_root_of_squares([one["gradient_norms"][step] for one in answers]) for step in range(steps)],
        "weight_digest": " ".join(one["weight_digest"] for one in answers),
        "buffer_digest": " ".join(one["buffer_digest"] for one in answers),
        "generator_digest": " ".join(one["generator_digest"] for one in answers),
        "finite": all(one["finite"] for one in answers),
        "checks": [_check(found) for found in _same_steps([one["checks"] for one in answers])],
        "in_codes": [_of_rank(rank, name) for rank, one in enumerate(answers) for name in one["in_codes"]],
        "compared": "samples" if any(one["compared"] == "samples" for one in answers) else "every element",
        "ended": any(one["ended"] for one in answers),
        "unseeded": list(dict.fromkeys(chain.from_iterable(one["unseeded"] for one in answers))),
    }


def _same_steps(checks: Sequence[Sequence[CheckFound]]) -> list[list[CheckFound]]:
    """Of each step that all ranks checked, what each found. A rank checks fewer where its state is large."""
    by_step = [{one["step"]: one for one in of_rank} for of_rank in checks]
    return [[of_rank[step] for of_rank in by_step] for step in by_step[0] if all(step in one for one in by_step)]


def _check(found: Sequence[CheckFound]) -> CheckFound:
    unlike = (_of_rank(rank, one["unlike"]) for rank, one in enumerate(found) if one["unlike"])
    return {
        "step": found[0]["step"],
        "same_generators": all(one["same_generators"] for one in found),
        "unlike": next(unlike, ""),
        "replaced": all(one["replaced"] for one in found),
        "drift": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["drift"]],
        "gradients": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["gradients"]],
        "updates": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["updates"]],
    }


def _root_of_squares(norms: Sequence[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return sum(norm**2 for norm in known) ** 0.5 if len(known) == len(norms) else None


def _of_rank(rank: int, name: str) -> str:
    return f"rank {rank}: {name}" if rank else name
