"""The parent's end of a trial: start the process, send it commands, notice that it hangs, dies or stops.

with TrialProcess(setup, choices=[]) as trial:
    trial.start()                                     # until the script's first certain step
    answer = trial.window([choice], settle=3, steps=20)
    answer.seconds                                    # one figure a step

with TrialProcess(setup) as trial:                    # one command, which holds from the script's first line
    answer, end = trial.watch({"do": "memory", "steps": 8, "ranks": "/folder"}, timeout_seconds=600)
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TextIO

import psutil

from flatout.decoding import decode
from flatout.descendants import descendants
from flatout.environment import launched, trial_environment
from flatout.errors import TrialError, UsageError
from flatout.levers.lever import Choice
from flatout.profiling.step_operators import Operator, StepOperators
from flatout.script.child_command import child_command
from flatout.script.isolation import cleanup
from flatout.script.trial.answers import (
    Answer,
    TrialDied,
    TrialEnded,
    TrialFault,
    TrialHangs,
    TrialSettled,
    TrialStopped,
    no_step_within,
)
from flatout.script.trial.commands import WORK_STEPS, CommandedTrial, Patience, as_json
from flatout.script.trial.forked import KILLED, Forked, ForkOfTrial
from flatout.script.trial.hang_location import STACKS, location
from flatout.script.trial.messages import Command, TrialConfig
from flatout.search.deadline import BudgetSpent

if TYPE_CHECKING:
    from flatout.script.trial.setup import TrialSetup

START_TIMEOUT_SECONDS = 1800.0
STOP_POLL_SECONDS = 0.5
"""Interval for checking whether the user has stopped the search, while a trial is silent."""
ENDS_OF_INPUT = b"\x04" * 64
"""Every read from a trial's terminal gets an end of file."""
MOST_ERROR_BYTES = 20_000
FORK_SECONDS = 60.0
"""Timeout of what is asked of a process that waits to be forked."""
END_SECONDS = 10.0
"""Timeout of a trial's end: the kernel has to end every process in it."""


def in_ranks() -> UsageError:
    """What to raise in a process that a launcher has started."""
    here = launched() or (0, 1)
    return UsageError(
        f"this is rank {here[0]} of {here[1]}",
        limit="a trial is on its own, and would wait for the others",
        remedy="let Flatout start the ranks (flatout tune --nproc-per-node 2 train.py, and --devices 2 if it trains on "
        "one device); start the launcher under Flatout (flatout profile -m torch.distributed.run --nproc-per-node 2 "
        "train.py); or use flatout run in each rank",
    )


class TrialProcess(CommandedTrial):
    """One child."""

    def __init__(self, setup: TrialSetup, choices: Sequence[Choice] = (), *, label: str = "trial") -> None:
        super().__init__(setup, choices, label=label)
        self.step_kind = ""
        self._process: subprocess.Popen[bytes] | Forked | ForkOfTrial | None = None
        self._forks: socket.socket | None = None
        """Where it may be forked: brings it the descriptors of those processes."""
        self._parent: TrialProcess | None = None
        """What it was forked from."""
        self._spawned_at = 0.0
        self._loaded_seconds = 0.0
        """Time to load torch, where that was done before."""
        self._terminal: int | None = None
        self._buffer = b""
        self._settled: Callable[[], bool] | None = None
        self._more_if_computing = True
        """Does it count as hanging later where it computes?"""

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        return self._folder / "output.log"

    @property
    def errors(self) -> str:
        """The end of the script's stderr, where the setup logs it separately."""
        return _end_of(self._folder / "errors.log")

    def start(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Start the script and wait for its first recognized step. Raises TrialEnded if there is none."""
        if self.interruptible and self._has_passed():
            raise BudgetSpent(self.deadline)
        with self._starting():
            if self._process is None:
                self.spawn()
            self._await_first_step(timeout_seconds)
            started = self.setup.started
            if started is not None and self._forks is not None and started.takes(self):
                started.add(self._left_to_be_forked())
                self.spawn()
                self._await_first_step(timeout_seconds)

    def start_within(self, patience_seconds: float) -> None:
        """The same, with an error that names the option by which the user allows more time. What is asked of it later
        has as much time each, also where the script computes."""
        self.first_steps_seconds, self._more_if_computing = patience_seconds, False
        try:
            self.start(patience_seconds)
        except TrialHangs as hang:
            raise no_step_within(hang, self.setup.name) from hang

    def watch(
        self, command: Command, timeout_seconds: float, settled: Callable[[], bool] | None = None
    ) -> tuple[Answer, TrialEnded | None]:
        """Run the script under one command that applies from its first line; returns the answer, and the script's end
        where it ended early. settled: asked while the script is silent; where it is true, raises TrialSettled."""
        self._settled = settled
        until = time.monotonic() + timeout_seconds
        self.spawn(command)
        self.isolation = self._answer(timeout_seconds)
        found = self._answer(until - time.monotonic())
        if not found["ended"]:
            return found, None
        try:
            self._answer(timeout_seconds)
        except TrialEnded as end:
            return found, end
        raise AssertionError("an answer after the last")

    def spawn(self, command: Command | None = None) -> None:
        """Start the script without waiting, so that several may start at once; `start` must follow, unless there is a
        command that applies from its first line. UsageError in one of several ranks."""
        if (launched() or (0, 1))[1] > 1:
            raise in_ranks()
        environment = self.setup.environment_of(self.choices)
        started = None if environment or command is not None else self.setup.started
        self._parent = None if started is None else started.process(self.choices)
        may_be_forked = started is not None and started.may_take(self.choices)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.label}-", dir=self.setup.work_folder))
        self._loaded_seconds, self._process, self._buffer = 0.0, None, b""
        command_read, self._command_write = os.pipe()
        self._answer_read, answer_write = os.pipe()
        given = [command_read, answer_write]
        errors_path = self._folder / "errors.log" if self.setup.errors_apart else self.log_path
        try:
            with self._stdin() as stdin, open(self.log_path, "ab") as log, open(errors_path, "ab") as errors:
                streams = [stdin, log, errors]
                self._fork_from_parent(streams, given)
                if self._process is None:
                    self._start_process(streams, given, command, environment, may_be_forked=may_be_forked)
        finally:
            for descriptor in given:
                os.close(descriptor)
            if self._process is None:
                self._close_descriptors()

    def _start_process(
        self,
        streams: list[IO[bytes] | IO[str]],
        given: list[int],
        command: Command | None,
        environment: Mapping[str, str],
        *,
        may_be_forked: bool,
    ) -> None:
        """Forked by the server where that is possible. given: what to pass beside the streams; to be closed here."""
        config = self._folder / "config.json"
        settings = self._config(command)
        if may_be_forked:
            self._forks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.append(theirs.detach())
        server = None if environment else self.setup.fork_server
        if server is not None and server.is_ready():
            config.write_text(json.dumps({**settings, "parent": server.pid}))
            self._spawned_at, self._loaded_seconds = time.perf_counter(), server.load_seconds
            self._process = server.start(config, streams, given)
        if self._process is None:
            config.write_text(json.dumps(settings))
            self._spawned_at, self._loaded_seconds = time.perf_counter(), 0.0
            stdin, log, errors = streams
            self._process = subprocess.Popen(
                child_command("flatout.script.trial.child", str(config), *map(str, given)),
                stdin=stdin,
                stdout=log,
                stderr=errors,
                pass_fds=given,
                env=trial_environment(environment),
                start_new_session=True,
            )

    def _await_first_step(self, timeout_seconds: float) -> None:
        if self._parent is not None and self._is_forked(self._parent):
            return
        self.isolation = self._answer(timeout_seconds, starting=True)
        ready = self._answer(timeout_seconds, starting=True)
        if ready["event"] == "alone" and self.setup.fork_server is not None:
            self.setup.fork_server.obstacle = ready["reason"]
            self.close()
            self.spawn()
            self._await_first_step(timeout_seconds)
            return
        self._note_ready(ready)
        assert isinstance(self.start_seconds, float)
        assert self._process is not None
        assert not isinstance(self._process, ForkOfTrial)
        computing_seconds = cpu_seconds(self._process.pid)
        self.waiting_seconds = max(0.0, self.start_seconds - computing_seconds)
        starts = self.setup.starts
        if not self.choices and (starts.seconds is None or self.start_seconds < starts.seconds):
            starts.seconds, starts.cores = self.start_seconds, computing_seconds / self.start_seconds

    def _note_ready(self, ready: Answer) -> None:
        self.step_kind = ready["step_kind"]
        self.start_seconds = time.perf_counter() - self._spawned_at
        self.startup_seconds = self.start_seconds + self._loaded_seconds

    # forks

    def _left_to_be_forked(self) -> TrialProcess:
        """The process, which stays where it is; this trial has none then."""
        waiting = copy.copy(self)
        waiting.deadline = None  # it is asked only what takes no time
        self._process = self._forks = self._terminal = None
        return waiting

    def _is_forked(self, parent: TrialProcess) -> bool:
        """Wait for its first answer; False where there is none: then the script is starting by itself."""
        try:
            self._note_ready(self._answer(FORK_SECONDS, starting=True))
        except BudgetSpent:
            raise
        except TrialError as error:
            self._fork_failed(error)
            self.close()
            self.spawn()
            return False
        self.isolation, self.waiting_seconds = parent.isolation, 0.0
        return True

    def _fork_failed(self, error: TrialError) -> None:
        assert self.setup.started is not None
        self.setup.started.obstacle = f"it cannot be forked: {error}"
        self._parent = None

    def _fork_from_parent(self, streams: Sequence[IO[bytes] | IO[str]], given: Sequence[int]) -> None:
        """Leaves the process unset where there is none to be forked, or forking it fails."""
        if self._parent is None:
            return
        self._spawned_at, self._loaded_seconds = time.perf_counter(), self._parent.startup_seconds or 0.0
        try:
            self._process = self._parent.fork(streams, given, self.choices)
        except TrialError as error:
            self._fork_failed(error)

    def fork_obstacle(self) -> str:
        """Why it cannot be forked at its first step; '' if it can."""
        return str(self._ask({"do": "forkable"}, FORK_SECONDS)["obstacle"])

    def fork(
        self, streams: Sequence[IO[bytes] | IO[str]], pipes: Sequence[int], choices: Sequence[Choice]
    ) -> ForkOfTrial:
        """A new process at the same step, where these choices are on. streams: its stdin, stdout and stderr; pipes: for
        commands and answers."""
        assert self._forks is not None
        with contextlib.suppress(OSError):  # it has ended: reading the answer reports how
            socket.send_fds(self._forks, [b"."], [*(stream.fileno() for stream in streams), *pipes])
        answer = self._ask({"do": "fork", "levers": as_json(choices)}, FORK_SECONDS)
        return ForkOfTrial(self, answer["pid"])

    def ask_of_fork(self, do: Literal["poll", "kill"], number: int) -> Answer:
        """Of one that was forked from it, and ends with it. Raises TrialError where this process has ended."""
        if self._process is None:
            raise TrialDied(KILLED)
        command: Command = {"do": do, "pid": number}
        answer = self._ask(command, FORK_SECONDS)
        while (answer["event"], answer.get("pid")) != (do, number):  # Ctrl-C may have left an earlier one unread
            answer = self._answer(FORK_SECONDS)
        return answer

    def operators(self, choices: Sequence[Choice]) -> StepOperators:
        """Of one step under these levers, which takes several times as long."""
        command: Command = {"do": "operators", "levers": as_json(choices)}
        answer = self._ask(command, self._patience(WORK_STEPS, choices))
        return StepOperators(
            operators=tuple(decode(Operator, one) for one in answer["operators"]),
            samples=None if answer["samples"] is None else round(answer["samples"]),
            device=answer["device"],
            tf32=answer["tf32"],
            fault=answer["fault"],
            rolled_back={name: reason for name, _, reason in answer["rolled_back"]},
        )

    def close(self) -> None:
        """End the process and everything it started, and remove its scratch. Its log stays."""
        if self._process is None:
            return
        if isinstance(self._process, ForkOfTrial):
            self._process.end()
        else:
            _end(self._process)
        self._close_descriptors()
        self._process = None
        with contextlib.suppress(TrialError):  # the owner of the work folder tries again: the result counts for more
            cleanup(self._folder / "scratch")

    def _close_descriptors(self) -> None:
        if self._forks is not None:
            self._forks.close()
        descriptors = self._command_write, self._answer_read, self._terminal
        self._command_write = self._answer_read = -1  # their numbers may soon be those of others
        self._terminal = None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _config(self, command: Command | None) -> TrialConfig:
        (self._folder / "scratch").mkdir()
        return {
            "target": self.setup.target.command,
            "scratch": str(self._folder / "scratch"),
            "shared": [str(path) for path in self.setup.written],
            "turns": str(self.setup.shared_folder),
            "isolation": self.setup.isolation,
            "allow_network": self.setup.allow_network,
            "parent": os.getpid(),
            "levers": self.setup.levers,
            "choices": as_json(self.choices),
            "command": command,
        }

    def _stdin(self) -> contextlib.AbstractContextManager[IO[bytes] | IO[str]]:
        if self.setup.inherits_stdin and (piped := _piped_in()) is not None:
            return contextlib.nullcontext(piped)
        if self.setup.terminal_size is None or self.setup.stdin_file is not None:
            return open(self.setup.stdin_file or os.devnull, "rb")
        # imported here, as Windows lacks them and must be able to import this file
        import fcntl
        import pty
        import termios

        self._terminal, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *self.setup.terminal_size, 0, 0))
        os.write(self._terminal, ENDS_OF_INPUT)
        return open(slave, "rb", buffering=0)

    def _ask(self, command: Command, timeout_seconds: float) -> Answer:
        with contextlib.suppress(BrokenPipeError):  # it died: reading the answer reports how
            os.write(self._command_write, (json.dumps(command) + "\n").encode())
        answer = self._answer(timeout_seconds)
        if self.setup.started is not None and answer.get("wrote"):
            self.setup.started.obstacle = f"a step writes to files: {answer['wrote']}"
        return answer

    def _answer(self, timeout_seconds: float, *, starting: bool = False) -> Answer:
        line = self._read_line(timeout_seconds, starting=starting)
        answer = json.loads(line)
        if answer["event"] == "ended":
            told = answer["status"], answer["error"], answer["steps"], answer.get("note", "")
            raise TrialEnded(*told, script_steps=answer.get("script_steps"), last_line=self._last_line())
        if answer["event"] == "refused":
            raise TrialError(answer["reason"])
        if answer["event"] == "fault":
            raise TrialFault(answer["reason"])
        if answer["event"] == "stopped":
            raise TrialStopped(f"stopped before the script's first write: {answer['reason']}")
        return answer

    def _last_line(self) -> str:
        printed = self.errors if self.setup.errors_apart else _end_of(self.log_path)
        return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")

    def _computed_seconds(self) -> float:
        """CPU time so far; of a fork, that of the process that it comes from with all its forks."""
        process = self._process
        if isinstance(process, ForkOfTrial):
            process = None if self._parent is None else self._parent._process
        return 0.0 if process is None or isinstance(process, ForkOfTrial) else cpu_seconds(process.pid)

    def _location(self) -> str:
        """The line at which the script is; '' where that is unknown, as of a fork."""
        process = self._process
        if process is None or isinstance(process, ForkOfTrial):
            return ""
        return location(process.pid, self._folder / "scratch" / STACKS, self.setup.target.folder)

    def _read_line(self, timeout_seconds: float, *, starting: bool) -> bytes:
        interruptible = self.interruptible and not starting
        more = self._more_if_computing and not starting
        awaited = Patience(timeout_seconds, self._computed_seconds if more else None)
        gone = False
        while b"\n" not in self._buffer:
            patience = awaited.seconds_left
            if self.deadline is not None and interruptible:
                patience = min(patience, self.deadline.grace_seconds_left)
            ready, _, _ = select.select([self._answer_read], [], [], min(max(0.0, patience), STOP_POLL_SECONDS))
            if self.deadline is not None and self.deadline.stopped:
                raise BudgetSpent(self.deadline)
            if not ready and interruptible and self._has_passed():
                raise BudgetSpent(self.deadline)
            if not ready and self._settled is not None and self._settled():
                raise TrialSettled("the processes that the script has started have answered")
            chunk = os.read(self._answer_read, 1 << 16) if ready else b""
            if not chunk and (ready or gone):  # gone: processes that outlive it may hold the pipe open
                assert self._process is not None
                raise TrialDied(self._process.wait())
            if not ready and awaited.is_over():
                raise TrialHangs(awaited.waited_seconds, self._location())
            gone = not ready and not self.alive
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def cpu_seconds(process_id: int) -> float:
    """CPU time so far of this process and everything it started, including what has ended."""
    try:
        first = psutil.Process(process_id)
        return sum(sum(one.cpu_times()[:4]) for one in (first, *descendants(process_id)))
    except psutil.Error:  # it has just ended: the next command will report it
        return 0.0


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_ERROR_BYTES))
        return file.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes] | Forked) -> None:
    """Returns when it has ended. It runs in its own session, and has split itself (isolation.processes): the parent
    sees the process that waits outside, which on SIGTERM first ends all the others."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # children of a process that did not get as far as splitting
    process.wait()


def _piped_in() -> TextIO | None:
    """This process's stdin; None where it is a terminal, or closed."""
    try:
        piped = sys.stdin is not None and not sys.stdin.isatty() and sys.stdin.fileno() >= 0
    except (OSError, ValueError):
        return None
    return sys.stdin if piped else None
