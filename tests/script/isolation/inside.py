"""Runs a piece of Python inside an isolation, for tests of what a trial can reach.

    python inside.py '{"scratch": ..., "code": ..., "user": 0, "mode": "overlay", "processes": "namespace"}'

The code finds `isolation` and everything imported below. It is compiled here, because another user may not be able to
read this interpreter's library.
"""

from __future__ import annotations

import ctypes
import encodings.idna
import json
import multiprocessing
import multiprocessing.popen_fork
import multiprocessing.queues
import multiprocessing.resource_tracker
import multiprocessing.shared_memory
import multiprocessing.synchronize
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from flatout.errors import MachineError
from flatout.script.isolation import enter, kernel

AT_HAND = (
    *(ctypes, encodings, multiprocessing, os, pty, signal, socket, subprocess, sys, threading, time),
    *(Path, MachineError),
)


def refuse(flag: int) -> None:
    """As a kernel does that has no such namespace, or gives it to nobody."""
    real = kernel.unshare

    def unshare(flags: int) -> None:
        if flags & flag:
            raise PermissionError(1, "unshare: Operation not permitted")
        real(flags)

    kernel.unshare = unshare


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["user"]:
        os.setgroups([])
        os.setgid(asked["user"])
        os.setuid(asked["user"])
    if asked["processes"] == "reaper":
        refuse(kernel.CLONE_NEWPID)
    if asked["network_refused"]:
        refuse(kernel.CLONE_NEWNET)
    os.chdir(asked["home"])
    isolation = enter(Path(asked["scratch"]), (), asked["mode"], allow_network=asked["allow_network"])
    assert isolation.processes == asked["processes"], isolation
    exec(compile(asked["code"], "inside", "exec"), {**globals(), "isolation": isolation, "home": Path(asked["home"])})


if __name__ == "__main__":
    main()
