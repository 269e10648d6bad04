"""The server of prepared_python: imports once, then forks a process for each job that comes over its socket.

It computes nothing, so it has no threads that a fork could lose.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import types
import warnings
from typing import Any

MESSAGE_BYTES = 1 << 16


def import_once() -> None:
    """What nearly every process of the tests imports; a warning of an import is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import numpy  # noqa: F401
        import sklearn.datasets
        import sklearn.model_selection  # noqa: F401
        import torch._dynamo  # what making an optimizer imports
        import torch.distributed
        import torch.nn.parallel
        import torch.utils.data  # noqa: F401

        import flatout

        for name in ("Checkpoints", "TrainStep", "batches", "evaluate", "fit", "models", "supervised"):
            getattr(flatout, name)


def next_job(connection: socket.socket) -> dict[str, Any]:
    """Serve until the other end is closed; returns in the forked processes only, each with its job."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "wait" in request:
            status = os.waitpid(request["wait"], 0)[1]
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
        for file in files:
            os.close(file)
        if pid == 0:
            return request["job"]  # type: ignore[no-any-return]
        connection.send(str(pid).encode())


def become(job: dict[str, Any]) -> None:
    """Run it as `python -c CODE ...` or `python PATH ...` would."""
    if job["folder"]:
        os.chdir(job["folder"])
    for action in job["warnings"]:
        warnings.simplefilter(action)
    if job["path"]:
        sys.argv = [job["path"], *job["arguments"]]
        sys.path[0] = os.path.dirname(job["path"])
        runpy.run_path(job["path"], run_name="__main__")
        return
    sys.argv = ["-c", *job["arguments"]]
    sys.path[0] = ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(job["code"], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    import_once()
    become(next_job(socket.socket(fileno=int(sys.argv[1]))))
