"""The process of a `RanksJob`: leaves the machine's network, does what was asked, and writes the result to its
folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flatout.decoding import decode
from flatout.environment import trial_environment
from flatout.errors import FlatoutError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.launch import launch
from flatout.parallel.preflight import preflight
from flatout.script.child_command import child_command
from flatout.script.isolation import enter, kernel
from flatout.script.isolation.namespaces import own_network
from flatout.script.replicas.settings import Settings, refusal_of
from flatout.script.replicas.starting import QUIET, start_ranks
from flatout.tuning.devices_proof import prove_devices
from flatout.tuning.ranks.job import ERRORS, ISOLATION, REQUEST, RESULT, SCRATCH, JobRequest
from flatout.whole_files import written_whole

GRACE_SECONDS = 3.0
"""A rank of a trial has nothing to save."""
COLLECTIVES_SECONDS = 2.0


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    told = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    request = decode(JobRequest, told["request"])
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != told["parent"]:
        return 1  # it was killed while this process started
    signal.signal(signal.SIGTERM, _leave)
    work: dict[str, Callable[[Path, JobRequest], object]] = {
        "replicas": _replicas,
        "ranks": _ranks,
        "own-ranks": _own_ranks,
        "module": _module,
        "collectives": _collectives,
        "proof": _proof,
    }
    try:
        if request.kind in ("ranks", "own-ranks", "module"):
            _isolate(folder, request)
        elif not request.allow_network:
            own_network()
        found: dict[str, object] = {"found": work[request.kind](folder, request)}
    except FlatoutError as error:
        kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in ERRORS), "")
        found = {"error": {"kind": kind, "what": error.what, "limit": error.limit, "remedy": error.remedy}}
    with written_whole(folder / RESULT) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _isolate(folder: Path, request: JobRequest) -> None:
    """Returns in a new process. A guard inside each rank would not do: they load each other's files."""
    shared = [Path(path) for path in request.shared]
    found = enter(folder / SCRATCH, shared, "overlay", allow_network=request.allow_network)
    (folder / ISOLATION).write_text(json.dumps(asdict(found)), encoding="utf-8")


def _launched(request: JobRequest, command: Sequence[str]) -> int:
    """Ranks, to their end; returns the exit status."""
    return launch(
        Launch(
            command=tuple(command),
            nproc_per_node=request.devices,
            quiet=True,
            grace_seconds=GRACE_SECONDS,
            hang_seconds=0.0,  # they wait for commands
            variables=request.variables,
        )
    )


def _alone(request: JobRequest, command: Sequence[str]) -> int:
    """One process, to its end; returns the exit status."""
    return subprocess.run(command, env=trial_environment(dict(request.variables))).returncode


def _ranks(folder: Path, request: JobRequest) -> int:
    return _launched(request, child_command("flatout.script.trial.commanded_rank", str(folder)))


def _own_ranks(folder: Path, request: JobRequest) -> int:
    return _alone(request, child_command("flatout.script.trial.rank_starter", str(folder)))


def _module(folder: Path, request: JobRequest) -> int:
    """Raises what it refuses with."""
    command = child_command(str(request.target.module), *request.target.arguments)
    status = (_alone if request.devices == 1 else _launched)(request, command)
    if refusal := refusal_of(folder):
        raise refusal
    return status


def _replicas(folder: Path, request: JobRequest) -> int:
    command = child_command("flatout.script.replicas.trial_rank", str(folder), *request.target.command)
    return start_ranks(command, request.devices, folder, variables=QUIET, grace_seconds=GRACE_SECONDS)


def _collectives(folder: Path, request: JobRequest) -> object:
    """Of each collective, the seconds by bytes."""
    visible = Settings.read(folder).visible[: request.devices]
    gpus = (("CUDA_VISIBLE_DEVICES", ",".join(visible)),) if visible else ()
    asked = Launch(command=(sys.executable,), nproc_per_node=request.devices, quiet=True, variables=(*gpus, *QUIET))
    found = preflight(asked, seconds=COLLECTIVES_SECONDS)
    return {
        one.name: [[size.size_bytes, size.median_seconds] for size in one.sizes] for one in found.timings.collectives
    }


def _proof(folder: Path, request: JobRequest) -> object:
    settings, steps = Settings.read(folder), request.steps
    return prove_devices(request.target, request.devices, settings, steps=steps, over_seeds=False).to_json()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Between two launches, which take over the signals: clean up on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
