"""Processes that need not load torch, because they are forked from one that has: 0.2 s each and not 3 s.

    def test_...(python):                              # python("train.py", cwd=folder), python("-m", "flatout", ...)
    @pytest.mark.usefixtures("forked_trials")          # trials are forked too
    @pytest.mark.usefixtures("forked_trials", "brief") # and compared for no longer than a test of something else needs

Everything else about them is as always: arguments, pipes, isolation, end. Not for tests of what happens before torch is
loaded (what is set in the environment for it, a script that never loads it), nor of times.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from flatout.script.child_command import child_command
from flatout.script.trial import fork_server
from flatout.script.trial import process as trial_process
from flatout.script.trial.fork_server import Forked
from flatout.tuning import last_comparison, prover, training_search, windows
from tests.fork_server import MESSAGE_BYTES, next_process
from tests.new_process import become

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.002


class ForkServer:
    """Starts with the first process. `of_this_process`: the others are copies of it as it is then."""

    def __init__(self, *, of_this_process: bool = False) -> None:
        self._of_this_process = of_this_process
        self._connection: socket.socket | None = None
        self._wait: Callable[[], object] = lambda: None

    def start(
        self,
        words: Sequence[str],
        *,
        streams: Sequence[int],
        folder: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> Forked:
        """`python WORDS`, see `become`; streams: descriptors of its stdin, stdout and stderr."""
        asked = {"words": list(words), "folder": str(folder), "environment": dict(environment)}
        asked["descriptors"] = [0, 1, 2, *pass_fds]
        return Forked(int(self.ask(asked, [*streams, *pass_fds])), self.exit_code)

    def exit_code(self, pid: int) -> int | None:
        """None while it runs."""
        code: int | None = json.loads(self.ask({"poll": pid}))
        return code

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> bytes:
        message = json.dumps(request).encode()
        assert len(message) < MESSAGE_BYTES
        connection = self._connected()
        socket.send_fds(connection, [message], descriptors)
        answer = connection.recv(MESSAGE_BYTES)
        assert answer, "the server ended: see its error above"
        return answer

    @property
    def pid(self) -> int:
        """The parent of all that it starts."""
        self._connected()
        return self._pid

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._pid = self._forked(theirs) if self._of_this_process else self._started(theirs)
        return self._connection

    def _started(self, theirs: socket.socket) -> int:
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._wait = process.wait
        return process.pid

    def _forked(self, theirs: socket.socket) -> int:
        pid = os.fork()
        if pid:
            self._wait = lambda: os.waitpid(pid, 0)
            return pid
        assert self._connection is not None
        self._connection.close()  # or its end would never be seen
        status = 1
        try:
            become(**next_process(theirs))
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def close(self) -> None:
        """End the server; what it started must have been waited for."""
        if self._connection is not None:
            # A process that a test forked, say a loader's worker, holds this end too: closing it alone would tell the
            # server nothing while that lives.
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None
            self._wait()


class Python:
    """python(*words, cwd=folder, env=None): what `python WORDS` gives."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    def __call__(
        self, *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.together(words, cwd=cwd, env=env)[0]

    def together(
        self, *commands: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """All at once, until the last has ended."""
        with contextlib.ExitStack() as stack:
            files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
            processes = []
            for words, (out, error) in zip(commands, files, strict=True):
                processes.append(self.start(*words, stdout=out, stderr=error, cwd=cwd, env=env))
                stack.callback(processes[-1].wait)
                stack.callback(processes[-1].kill)  # after an alarm
            codes = [process.wait() for process in processes]
            return [
                subprocess.CompletedProcess(words, code, _text(out), _text(error))
                for words, code, (out, error) in zip(commands, codes, files, strict=True)
            ]

    def start(
        self,
        *words: str,
        stdout: IO[bytes],
        stderr: IO[bytes],
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> Forked:
        """Wait for it before the test ends."""
        with open(os.devnull, "rb") as nothing:
            streams = [stream.fileno() for stream in (nothing, stdout, stderr)]
            return self.server.start(words, streams=streams, folder=cwd, environment=os.environ if env is None else env)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


class _Subprocess:
    """The module `subprocess`, where the `child_command` of a module is forked."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(
        self,
        command: Sequence[str],
        *,
        stdin: Any,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        start_new_session: bool,
    ) -> Forked:
        assert list(command[:3]) == child_command("")[:3], command
        assert start_new_session
        words = list(command[1:])
        if words[-1] == str(os.getpid()):  # a fork server, told whose child it is
            words[-1] = str(self._server.pid)
        else:
            config = Path(words[3])
            config.write_text(json.dumps({**json.loads(config.read_text()), "parent": self._server.pid}))
        with open(os.devnull, "r+b") as nothing:
            given = [nothing if stream == subprocess.DEVNULL else stream for stream in (stdin, stdout, stderr)]
            streams = [given[1].fileno() if stream == subprocess.STDOUT else stream.fileno() for stream in given]
            return self._server.start(words, streams=streams, folder=Path.cwd(), environment=env, pass_fds=pass_fds)


def fork_trials(replace: Callable[[Any, str, Any], None], server: ForkServer | None = None) -> None:
    """replace: `setattr`, or a test's own, which is taken back. server: by default copies of this process."""
    if server is None:
        server = ForkServer(of_this_process=True)
        atexit.register(server.close)
    assert server.pid  # it has started, before there are pipes of trials that it would hold open
    for module in (trial_process, fork_server):
        replace(module, "subprocess", _Subprocess(server))


def brief_comparisons(replace: Callable[[Any, str, Any], None]) -> None:
    """A tune whose budget is long, for a busy machine, need not use it up. replace: as above."""
    replace(training_search, "COMPARISON_SECONDS", 6.0)
    # As many pairs of processes as are wanted, and more where a busy machine made those contradict each other.
    replace(last_comparison, "NARROW_ENOUGH", 0.5)
    replace(last_comparison, "LEAST_SECONDS", 0.5)
    replace(last_comparison, "MOST_SECONDS", 0.5)
    replace(last_comparison, "WANTED_PROCESS_PAIRS", 2)
    replace(prover, "WANTED_STEPS", dict.fromkeys(prover.WANTED_STEPS, 60))
    replace(windows, "PAIR_SECONDS", 0.06)  # two turns of each arm


@pytest.fixture(scope="session")
def python() -> Iterator[Python]:
    server = ForkServer()
    yield Python(server)
    server.close()


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch, python: Python) -> None:
    fork_trials(monkeypatch.setattr, python.server)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    brief_comparisons(monkeypatch.setattr)
