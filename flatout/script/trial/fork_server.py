"""Trials that need not load torch, because they are forked from a process that has.

    with ForkServer() as server:                            # loads torch in the background
        setup = TrialSetup(..., fork_server=server)

Loading torch takes seconds, and a tune starts its script a dozen times. Where a fork is not possible, or the script
needs a new process, `is_ready` returns False, and trials start as new processes.

The server is this module, run with a socket and its parent's process id. It loads nothing of the script. It reports
once whether it can be forked, then answers one request at a time:

    start  config, folder, with its descriptors   -> the id of a new process, a trial's `child`
    poll   process id                             -> its exit code, or null while it runs

It computes nothing, so torch has no threads that a fork would lose, and it never touches a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from flatout.environment import trial_environment
from flatout.script.child_command import child_command
from flatout.script.isolation import kernel
from flatout.script.preloaded import Groups, Preloaded, load
from flatout.script.trial import child
from flatout.script.trial.answers import Answer
from flatout.script.trial.forked import KILLED, Forked, count_threads, take_streams
from flatout.script.trial.messages import TrialConfig
from flatout.torch_private.compiler import DYNAMO

MODULES = ("numpy", "torch", DYNAMO)
"""torch imports the last with the first optimizer."""
LIBCUDA = re.compile(r"/\S*/libcuda\.so\S*")
CUDA_ERROR_NOT_INITIALIZED = 3
MOST_PAGES_SHIFTED = 1 << 14
_shift: list[mmap.mmap] = []
"""Held while the process lives; never written, so it takes address space but no memory."""
MESSAGE_BYTES, DESCRIPTORS = 1 << 16, 6
"""Descriptors: stdin, stdout, stderr, then those for commands and answers, and perhaps the socket for forks."""


class ForkServer:
    """One server for all trials of a tune. Every trial must have ended before it is closed."""

    def __init__(self) -> None:
        self.load_seconds = 0.0
        """From its start until it was ready."""
        self.obstacle: str | None = None
        """Why it cannot be forked; '' if it can; None: not reported yet."""
        self._asked = 0
        self._began = time.perf_counter()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                child_command("flatout.script.trial.fork_server", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=trial_environment({}),
                start_new_session=True,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The parent of everything it starts."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Can it be forked? Waits until that is known."""
        if self.obstacle is None:
            told = self._received() or {"obstacle": "it ended", "time": self._began}
            self.obstacle = told["obstacle"]
            self.load_seconds = told["time"] - self._began
        return not self.obstacle

    def start(self, config: Path, streams: Sequence[IO[bytes] | IO[str]], pipes: Sequence[int]) -> Forked | None:
        """Start a trial with this file of settings; None if the server is gone. streams: its stdin, stdout and stderr;
        pipes: for commands and answers, and perhaps the socket for forks."""
        given = [*(stream.fileno() for stream in streams), *pipes]
        pid = self._answer({"config": str(config), "folder": os.getcwd()}, given)
        if pid is None:
            self.obstacle = "it ended"
            return None
        return Forked(pid, self.exit_code)

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a process it started; None while that runs."""
        return self._answer({"poll": pid}, otherwise=KILLED)  # when the server dies, the kernel kills what it started

    def close(self) -> None:
        """End it. What it started must have ended."""
        self.obstacle = self.obstacle or "it was closed"
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _answer(
        self, request: Mapping[str, object], given: Sequence[int] = (), otherwise: int | None = None
    ) -> int | None:
        self._asked += 1
        try:
            socket.send_fds(self._connection, [json.dumps({**request, "number": self._asked}).encode()], given)
            while (told := self._received()) is not None:
                if told["number"] == self._asked:  # Ctrl-C may have left an earlier one unread
                    answer: int | None = told["answer"]
                    return answer
        except OSError:
            pass
        return otherwise

    def _received(self) -> Answer:  # None: it has ended
        message = self._connection.recv(MESSAGE_BYTES)
        return json.loads(message) if message else None


def main(descriptor: int, parent: int) -> NoReturn:
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # killed while this process was being started
    connection = socket.socket(fileno=descriptor)
    obstacle, groups = "", {}
    try:
        groups = dict(load(MODULES[:1]))
        threads = count_threads()
        groups |= load(MODULES[1:])
        obstacle = _obstacle(threads)
    except Exception as error:
        obstacle = f"{type(error).__name__}: {error}"
    connection.send(json.dumps({"obstacle": obstacle, "time": time.perf_counter()}).encode())
    _serve(connection, groups)


def _obstacle(threads: int) -> str:
    """Why this process must not be forked; '' if it may. threads: of numpy's BLAS, which survives a fork."""
    if count_threads() > threads:
        return "importing torch starts threads here"
    if _gpu_was_touched():
        return "importing torch starts the GPU's driver here"
    return ""


def _gpu_was_touched() -> bool:
    """Has this process called cuInit? Torch's CUDA build loads the driver's library; a fork may still initialize it, as
    long as the parent has not."""
    found = LIBCUDA.search(Path("/proc/self/maps").read_text(errors="replace"))
    if found is None:
        return False
    count = ctypes.c_int()
    return bool(ctypes.CDLL(found.group()).cuDeviceGetCount(ctypes.byref(count)) != CUDA_ERROR_NOT_INITIALIZED)


def _serve(connection: socket.socket, groups: Groups) -> NoReturn:
    while True:
        message, given, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                _become_trial(asked["config"], asked["folder"], given, groups)
            for number in given:
                os.close(number)
        connection.send(json.dumps({"number": asked["number"], "answer": answer}).encode())


def _become_trial(config: str, folder: str, given: list[int], groups: Groups) -> NoReturn:
    try:
        os.setsid()
        os.chdir(folder)
        descriptors = take_streams(given)
        _shift_addresses()
        gc.collect()  # it copies pages shared with the server: better now than in the script's first steps
        settings: TrialConfig = json.loads(Path(config).read_text())
        child.begin(settings, descriptors, Preloaded(groups))
    except SystemExit:  # of a process that the script has forked
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _shift_addresses() -> None:
    """Memory placement affects speed by a few per cent over a whole run. The kernel randomizes it for each new process;
    forks would all share one layout, and comparing several of them would not show that variation."""
    pages = int.from_bytes(os.urandom(8), "little") % MOST_PAGES_SHIFTED + 1
    _shift.append(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
