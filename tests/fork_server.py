"""Forks a process for each request that comes over its socket: of one that has loaded torch, or of the process that
it was forked from. It computes nothing, so it has no threads that a fork could lose.

    python -m tests.fork_server DESCRIPTOR
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tests.busy_ceilings import keep_busy_ceilings
from tests.new_process import become, python_path

MESSAGE_BYTES, MOST_DESCRIPTORS = 1 << 17, 16


def load() -> None:
    """What nearly every process of the tests imports; a warning of an import is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import numpy  # noqa: F401
        import sklearn.datasets
        import sklearn.model_selection  # noqa: F401
        import torch._dynamo
        import torch.distributed
        import torch.nn.parallel
        import torch.utils.data

        import flatout
        import flatout.application.live_run
        import flatout.script.runner
        import flatout.script.trial.setup

        torch.optim.SGD([torch.zeros(1)], 0.1)  # imports more with the first optimizer
        for name in ("Checkpoints", "TrainStep", "batches", "evaluate", "fit", "models", "supervised"):
            getattr(flatout, name)
    _keep(sys.modules)


def _keep(modules: Mapping[str, ModuleType]) -> None:
    """To free at its end what was loaded before the fork would take each process 0.3 s, most of it to copy the pages
    that it shares with the server. What it made itself it clears, flushes and destroys as always."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([dict(vars(module)) for module in modules.values()]))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # the last that is registered is called first: these before the libraries' destructors
        libc.on_exit(libc._exit, None)  # with the exit status
        libc.__cxa_atexit(libc.fflush, None, None)


def next_process(connection: socket.socket) -> dict[str, Any]:
    """Serve until the other end is closed; returns in forked processes only, each with what it is to become."""
    gc.collect()
    if "triton" in sys.modules:  # it tells at the end of what was not collected
        gc.unfreeze()
    else:
        gc.freeze()  # no collection of a forked process walks through what was there before
    python_path()
    while True:
        message, given, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            return {**asked, "descriptors": dict(zip(asked["descriptors"], given, strict=True))}
        for number in given:
            os.close(number)
        connection.send(str(pid).encode())


if __name__ == "__main__":
    load()
    keep_busy_ceilings(setattr)
    become(**next_process(socket.socket(fileno=int(sys.argv[1]))))
