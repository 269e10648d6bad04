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
from typing import Any, NoReturn

from flatout.environment import trial_environment
from flatout.errors import FlatoutError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.launch import launch
from flatout.parallel.preflight import preflight
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.isolation import enter, kernel
from flatout.script.isolation.namespaces import own_network
from flatout.script.replicas.refusal import refusal_of
from flatout.script.replicas.settings import Settings
from flatout.script.replicas.starting import DevicesRequest, start_ranks
from flatout.tuning.devices_proof import QUIET, prove_devices
from flatout.tuning.ranks.job import ERRORS, ISOLATION, REQUEST, RESULT, SCRATCH
from flatout.whole_files import written_whole

GRACE_SECONDS = 3.0
"""A rank of a trial has nothing to save."""


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != request["parent"]:
        return 1  # it was killed while this process started
    signal.signal(signal.SIGTERM, _leave)
    work: dict[str, Callable[[Path, dict[str, Any]], object]] = {
        "replicas": _replicas,
        "ranks": _ranks,
        "own-ranks": _own_ranks,
        "module": _module,
        "collectives": _collectives,
        "proof": _proof,
    }
    try:
        if request["kind"] in ("ranks", "own-ranks", "module"):
            _isolate(folder, request)
        elif not request["allow_network"]:
            own_network()
        found: dict[str, object] = {"found": work[request["kind"]](folder, request)}
    except FlatoutError as error:
        kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in ERRORS), "")
        found = {"error": {"kind": kind, "what": error.what, "limit": error.limit, "remedy": error.remedy}}
    with written_whole(folder / RESULT) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _isolate(folder: Path, request: dict[str, Any]) -> None:
    """Returns in a new process. A guard inside each rank would not do: they load each other's files."""
    shared = [Path(path) for path in request["shared"]]
    found = enter(folder / SCRATCH, shared, "overlay", allow_network=request["allow_network"])
    (folder / ISOLATION).write_text(json.dumps(asdict(found)), encoding="utf-8")


def _ranks(folder: Path, request: dict[str, Any]) -> int:
    """To their end; returns the exit status."""
    command = child_command("flatout.script.trial.rank_child", str(folder))
    return launch(
        Launch(
            command=tuple(command),
            nproc_per_node=request["devices"],
            quiet=True,
            grace_seconds=GRACE_SECONDS,
            hang_seconds=0.0,  # they wait for commands
            variables=tuple((name, value) for name, value in request["variables"]),
        )
    )


def _own_ranks(folder: Path, request: dict[str, Any]) -> int:
    """The script, to its end; returns its exit status."""
    command = child_command("flatout.script.trial.rank_starter", str(folder))
    return subprocess.run(command, env=trial_environment(dict(request["variables"]))).returncode


def _module(folder: Path, request: dict[str, Any]) -> int:
    """To its end; returns the exit status. Raises what it refuses with."""
    target = Target.from_command(request["target"])
    command = child_command(str(target.module), *target.arguments)
    if request["devices"] == 1:
        status = subprocess.run(command, env=trial_environment(dict(request["variables"]))).returncode
    else:
        status = launch(
            Launch(
                command=tuple(command),
                nproc_per_node=request["devices"],
                quiet=True,
                grace_seconds=GRACE_SECONDS,
                hang_seconds=0.0,
                variables=tuple((name, value) for name, value in request["variables"]),
            )
        )
    if refusal := refusal_of(folder):
        raise refusal
    return status


def _replicas(folder: Path, request: dict[str, Any]) -> int:
    """To their end; returns the exit status."""
    target = Target.from_command(request["target"])
    command = child_command("flatout.script.replicas.commanded", str(folder), *target.command)
    asked = DevicesRequest(target=target, devices=request["devices"], variables=QUIET, grace_seconds=GRACE_SECONDS)
    return start_ranks(asked, folder, command)


def _collectives(folder: Path, request: dict[str, Any]) -> object:
    """Of each collective, the seconds by bytes."""
    settings = Settings.read(folder)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(settings.visible[: request["devices"]])} if settings.visible else {}
    asked = Launch(
        command=(sys.executable,),
        nproc_per_node=request["devices"],
        quiet=True,
        variables=(*visible.items(), *QUIET),
    )
    found = preflight(asked, seconds=request["seconds"])
    return {
        one.name: [[size.size_bytes, size.median_seconds] for size in one.sizes] for one in found.timings.collectives
    }


def _proof(folder: Path, request: dict[str, Any]) -> object:
    target = Target.from_command(request["target"])
    settings, steps = Settings.read(folder), request["steps"]
    return prove_devices(target, request["devices"], settings, steps=steps, over_seeds=False).to_json()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Between two launches, which take over the signals: clean up on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
