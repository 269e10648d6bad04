"""A process that has loaded torch and nothing of the script, and forks itself for each trial.

Started by `flatout.tuning.fork_server`, with a socket to talk over and the number of its parent's process. It says once
whether it can be forked, then answers one request at a time:

    start  config, folder, with five descriptors  -> the number of a new process, `flatout.script.trial_child`
    poll   number                                 -> its exit code, or null while it runs

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
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from flatout.script import trial_child
from flatout.script.isolation import kernel
from flatout.script.preloaded import Groups, Preloaded, load

MODULES = ("numpy", "torch", "torch._dynamo")
"""torch imports the last with the first optimizer."""
LIBCUDA = re.compile(r"/\S*/libcuda\.so\S*")
CUDA_ERROR_NOT_INITIALIZED = 3
MOST_PAGES_SHIFTED = 1 << 14
_shift: list[mmap.mmap] = []
"""Held for as long as the process lives; it is never written, so it takes addresses and no memory."""
MESSAGE_BYTES, STREAMS, DESCRIPTORS = 1 << 16, 3, 5
"""Descriptors: stdin, stdout, stderr, then those for commands and answers."""


def main(descriptor: int, parent: int) -> NoReturn:
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # killed while this process was being started
    connection = socket.socket(fileno=descriptor)
    obstacle, groups = "", {}
    try:
        groups = dict(load(MODULES[:1]))
        threads = _threads()
        groups |= load(MODULES[1:])
        obstacle = _obstacle(threads)
    except Exception as error:
        obstacle = f"{type(error).__name__}: {error}"
    connection.send(json.dumps({"obstacle": obstacle, "time": time.perf_counter()}).encode())
    _serve(connection, groups)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _obstacle(threads: int) -> str:
    """Why this process must not be forked; '' if it may. threads: those of numpy's BLAS, which survives a fork."""
    if _threads() > threads:
        return "importing torch starts threads here"
    if _gpu_was_touched():
        return "importing torch starts the GPU's driver here"
    return ""


def _gpu_was_touched() -> bool:
    """Has this process called cuInit? Torch's CUDA build loads the driver's library with its own; a fork may still
    start it, as long as the parent has not."""
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
        for number, stream in enumerate(given[:STREAMS]):
            os.dup2(stream, number)
            os.close(stream)
        _shift_addresses()
        gc.collect()  # it copies pages that are shared with the server: now, and not in the script's first steps
        settings: dict[str, Any] = json.loads(Path(config).read_text())
        commands, answers = given[STREAMS:]
        trial_child.begin(settings, commands, answers, Preloaded(groups))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _shift_addresses() -> None:
    """Where memory lies costs a few per cent for a whole run. Each new process has its own place for it, chosen by the
    kernel; forks would all have one, and comparing several of them would tell nothing of that."""
    pages = int.from_bytes(os.urandom(8), "little") % MOST_PAGES_SHIFTED + 1
    _shift.append(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
