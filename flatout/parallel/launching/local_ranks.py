"""The ranks of this machine: started, watched, and ended with all that they have started themselves.

Each leads a session of its own: Ctrl-C in the terminal reaches it once, from us, and its children can be found. What it
leaves behind has a moment to end by itself (multiprocessing cleans up that way), then it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout import environment
from flatout.descendants import descendants
from flatout.errors import MachineError
from flatout.machine.detect import usable_cores
from flatout.parallel import heartbeat
from flatout.parallel.heartbeat import Beat
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.companions import Guard
from flatout.parallel.launching.failure import RankEnd, dumped_stack, last_exception
from flatout.parallel.launching.messages import Place, RankBeat, Stands
from flatout.parallel.launching.output import Output, Stream

OUTPUT_SECONDS = 1.0
"""After a rank's end, until what it wrote has been read."""
LEFTOVER_SECONDS = 3.0
"""That processes which a rank leaves behind have to end by themselves; then as much from SIGTERM to SIGKILL."""
KILLED_SECONDS = 20.0
"""After SIGKILL: a process that is still there waits for hardware, and is left to the system."""
DUMP_SECONDS = 3.0
DUMPED_SECONDS = 0.3
"""Without another line: the stack is complete."""
FAILING_SECONDS = 5.0
"""After its traceback a rank is taken to be about to end."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    beat_file: Path
    descriptor: int | None
    """Readable when the process has ended; None: this system has no such thing."""
    stderr: Stream | None
    streams: list[Stream]
    ended_at: float | None = None
    reported: bool = False
    gone: bool = False
    """Nothing is left of it, nor of what it started."""
    gave_up: bool = False

    @property
    def group(self) -> int:
        return self.process.pid


class LocalRanks:
    """Those of one attempt after another."""

    def __init__(self, request: Launch, output: Output, guard: Guard) -> None:
        self._request, self._output, self._guard = request, output, guard
        self._ranks: list[_Rank] = []
        self._machine = 0
        self._kill_at: float | None = None
        """When SIGKILL is due, or was sent."""
        self._killed = False
        self._ended_by_us = False
        self._dump_at: float | None = None

    def start(self, place: Place, variables: dict[str, str]) -> None:
        """Raises MachineError where the command cannot be started; nothing runs then."""
        assert all(one.gone for one in self._ranks)
        self._ranks, self._kill_at, self._killed, self._ended_by_us = [], None, False, False
        self._dump_at = None
        self._machine = place.machine
        try:
            for local in range(self._request.nproc_per_node):
                self._ranks.append(self._started(place, local, variables))
        except OSError as error:
            self.end(at_once=True)
            raise MachineError(
                f"cannot start {self._request.command[0]}: {error.strerror or error}",
                limit="each rank is a process that runs this command",
            ) from error

    def _started(self, place: Place, local: int, variables: dict[str, str]) -> _Rank:
        number = place.first_rank + local
        beat_file = self._guard.folder / f"beat-{place.attempt}-{local}"
        heartbeat.make_file(beat_file)
        alone = place.ranks == 1
        silent = self._request.stdout_of == "first" and number != 0
        process = subprocess.Popen(
            self._request.command,
            env=environment.rank_environment(
                {**self._own_variables(place, local, beat_file), **dict(self._request.variables)},
                {**variables, **self._default_variables()},
            ),
            stdin=None if alone else subprocess.DEVNULL,
            stdout=None if alone else subprocess.DEVNULL if silent else subprocess.PIPE,
            stderr=None if alone else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._guard.watch(process.pid)
        heartbeat.name_process(beat_file, process.pid)
        streams, stderr = [], None
        prefix = b"[%d] " % number if self._request.nproc_per_node > 1 else b""
        if process.stdout is not None:
            out = b"" if self._request.stdout_of == "first" else prefix
            streams.append(self._output.follow(_detached(process.stdout), error=False, prefix=out))
        if process.stderr is not None:
            stderr = self._output.follow(_detached(process.stderr), error=True, prefix=prefix)
            streams.append(stderr)
        return _Rank(
            number=number,
            process=process,
            beat_file=beat_file,
            descriptor=_end_descriptor(process.pid),
            stderr=stderr,
            streams=streams,
        )

    def _own_variables(self, place: Place, local: int, beat_file: Path) -> dict[str, str]:
        """torchrun's, by which scripts and libraries find out who they are; and ours."""
        here, rank = self._request.nproc_per_node, place.first_rank + local
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": str(here),
            "GROUP_RANK": str(place.machine),
            "GROUP_WORLD_SIZE": str(place.machines),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(place.ranks),
            "ROLE_NAME": "default",
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RUN_ID": place.run,
            "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._request.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there; rank 0 need not make one
            environment.HEARTBEAT: str(beat_file),
        }

    def _default_variables(self) -> dict[str, str]:
        """Where the user has set none: threads, so that ranks do not take each other's cores; and lines that come when
        they are printed, also those of a rank that is killed."""
        alone = self._request.nproc_per_node == self._request.nnodes == 1
        unbuffered = {} if alone else {"PYTHONUNBUFFERED": "1"}
        return {"OMP_NUM_THREADS": str(threads_of_rank(self._request.nproc_per_node)), **unbuffered}

    # what became of them

    def descriptors(self) -> Iterator[int]:
        """Readable when a rank has ended."""
        return (one.descriptor for one in self._ranks if one.descriptor is not None and one.ended_at is None)

    @property
    def are_quick_to_see(self) -> bool:
        """Do the descriptors tell of every end?"""
        return all(one.descriptor is not None for one in self._ranks)

    @property
    def all_gone(self) -> bool:
        return all(one.gone and one.reported for one in self._ranks)

    def ended(self) -> list[RankEnd]:
        """Those that have ended since the last call; also goes on with ending and cleaning up."""
        now = time.monotonic()
        if self._kill_at is not None and not self._killed and now >= self._kill_at:
            self._kill(now)
        found = []
        for one in self._ranks:
            if one.ended_at is None and self._has_ended(one, now):
                one.ended_at = now
                if one.descriptor is not None:
                    os.close(one.descriptor)
                    one.descriptor = None
            if one.ended_at is not None and not one.reported and self._was_read(one, now):
                one.reported = True
                found.append(self._end_of(one, now))
            if one.ended_at is not None and not one.gone:
                self._clean_up(one, now)
        if self._ended_by_us and all(one.gone for one in self._ranks):
            self._ended_by_us = False
            self._kill_strays()
        return found

    def _has_ended(self, one: _Rank, now: float) -> bool:
        if one.process.poll() is not None:
            return True
        one.gave_up = self._killed and self._kill_at is not None and now - self._kill_at > KILLED_SECONDS
        return one.gave_up

    def _was_read(self, one: _Rank, now: float) -> bool:
        """Has all that it wrote arrived? A process that it left behind may hold its pipes open."""
        assert one.ended_at is not None
        return now - one.ended_at > OUTPUT_SECONDS or not any(stream.thread.is_alive() for stream in one.streams)

    def _end_of(self, one: _Rank, now: float) -> RankEnd:
        code = -signal.SIGKILL if one.process.returncode is None else one.process.returncode
        assert one.ended_at is not None
        exception, where, waited = None, None, False
        moment = one.ended_at
        if code and one.stderr is not None:
            exception, where, waited = last_exception(one.stderr.tail)
            if exception is not None and code > 0 and one.stderr.traceback_at is not None:
                moment = one.stderr.traceback_at
        return RankEnd(
            rank=one.number,
            machine=self._machine,
            status=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            seconds_ago=now - moment,
            exception=exception,
            where=where,
            in_collective=waited,
        )

    def failing(self) -> tuple[int, ...]:
        """Those that have just printed a traceback, and run still."""
        since = time.monotonic() - FAILING_SECONDS
        return tuple(one.number for one in self._running() if one.stderr and (one.stderr.traceback_at or 0.0) > since)

    def _running(self) -> list[_Rank]:
        return [one for one in self._ranks if one.ended_at is None]

    # ending

    def forward(self, number: int) -> None:
        """This signal, which ends most programs, to the ranks but not to what they started."""
        self._ended_by_us = True
        self._send(number)

    def _send(self, number: int) -> None:
        for one in self._running():
            with contextlib.suppress(OSError):
                one.process.send_signal(number)

    def end(self, *, at_once: bool = False) -> None:
        """Ask them to end, and kill after the grace those that do not."""
        now = time.monotonic()
        self._ended_by_us = True
        if at_once or self._request.grace_seconds == 0:
            self._kill(now)
        elif self._kill_at is None:
            self._kill_at = now + self._request.grace_seconds
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # one that is stopped could not end

    def _kill(self, now: float) -> None:
        if not self._killed:
            self._killed, self._kill_at = True, now
        for one in self._ranks:
            if not one.gone:
                _signal_group(one.group, signal.SIGKILL)

    def _clean_up(self, one: _Rank, now: float) -> None:
        """End what a rank that has ended left behind."""
        assert one.ended_at is not None
        _reap(one.group)
        since = now - one.ended_at
        if one.gave_up or since > 2 * LEFTOVER_SECONDS + KILLED_SECONDS or not _signal_group(one.group, 0):
            one.gone = True
            self._guard.forget(one.group)
        elif self._killed or since > 2 * LEFTOVER_SECONDS:
            _signal_group(one.group, signal.SIGKILL)
        elif since > LEFTOVER_SECONDS:
            _signal_group(one.group, signal.SIGTERM)

    def _kill_strays(self) -> None:
        """What ranks put into sessions of their own. It came to us when its parent ended; its environment is theirs."""
        mine = str(self._guard.folder)
        with contextlib.suppress(psutil.Error):
            for child in descendants():
                with contextlib.suppress(psutil.Error, OSError):
                    if child.environ().get(environment.HEARTBEAT, "").startswith(mine):
                        child.kill()
                        os.waitpid(child.pid, 0)

    def close(self) -> None:
        """Leave nothing, whatever state they are in."""
        if not all(one.gone for one in self._ranks):
            self.end(at_once=True)
        while not all(one.gone for one in self._ranks):
            self.ended()
            time.sleep(0.01)

    # how far they are

    def beats(self) -> tuple[RankBeat, ...]:
        """Of those that run and have trained."""
        now = time.monotonic()
        return tuple(
            RankBeat(
                rank=one.number, beats=beat.beats, step=beat.step, age_seconds=now - beat.at_seconds, inside=beat.inside
            )
            for one, beat in self._beating()
        )

    def _beating(self) -> list[tuple[_Rank, Beat]]:
        found = [(one, heartbeat.read_beat(one.beat_file)) for one in self._running()]
        return [(one, beat) for one, beat in found if beat is not None]

    def dump(self) -> None:
        """Let those that can print their stacks."""
        self._dump_at = time.monotonic()
        for one, beat in self._beating():
            if one.stderr is not None:
                one.stderr.tail = b""
            with contextlib.suppress(OSError):
                if beat.dumps and os.getpgid(beat.pid) == one.group:
                    os.kill(beat.pid, signal.SIGUSR1)

    def dumped(self) -> tuple[Stands, ...] | None:
        """Where they are, once all have printed it or the time for it is over; None: not yet, or not asked for."""
        if self._dump_at is None:
            return None
        now = time.monotonic()
        found = []
        for one, beat in self._beating():
            stack = dumped_stack(one.stderr.tail) if one.stderr is not None else None
            if stack is not None and one.stderr is not None and now - one.stderr.heard_at > DUMPED_SECONDS:
                found.append(Stands(rank=one.number, where=stack[0], in_users_code=stack[1]))
            elif beat.dumps and now - self._dump_at < DUMP_SECONDS:
                return None
        self._dump_at = None
        return tuple(found)


def threads_of_rank(ranks: int) -> int:
    """Of each of so many ranks on this machine, where the user has set none."""
    usable = usable_cores()
    cores = min(usable, psutil.cpu_count(logical=False) or usable)  # two threads of a core would share its units
    return max(1, cores // ranks)


def _detached(pipe: object) -> int:
    """The pipe's descriptor, which its reader closes."""
    number = int(pipe.fileno())  # type: ignore[attr-defined]  # an unbuffered pipe of Popen
    copy = os.dup(number)
    pipe.close()  # type: ignore[attr-defined]
    return copy


def _end_descriptor(pid: int) -> int | None:
    opened = getattr(os, "pidfd_open", None)
    if opened is None:
        return None
    try:
        return int(opened(pid))
    except OSError:  # an old kernel, or a container that forbids it
        return None


def _signal_group(group: int, number: int) -> bool:
    """False: there is nobody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody in it has become another user
        return number == 0
    return True


def _reap(group: int) -> None:
    """Of a group whose leader has ended: those that came to us when their parent ended, and have ended too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
