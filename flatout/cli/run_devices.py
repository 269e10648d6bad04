"""flatout run --devices: the same script on several devices, and what to know of it, on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, cast, get_args

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.script.entry import Target
    from flatout.script.replicas.settings import Batch, Facts, Loss, Settings

OWN = {"--devices": True, "--batch": True, "--loss": True}
"""Options of this kind of run that take a value."""
SWITCHES = ("--allow-local-batchnorm", "--all-ranks-write", "--prove")


def run_on_devices(target: Target, options: dict[str, str]) -> int | None:
    """Returns the exit status; None: the options ask for no such run, or for one device, which is a plain run."""
    if "--devices" not in options:
        if stray := [name for name in (*OWN, *SWITCHES) if name in options]:
            raise UsageError(
                f"{stray[0]} without --devices", limit="it is for several devices", remedy="add --devices auto"
            )
        return None
    from flatout import environment
    from flatout.cli.ended_by_signal import signals_as_exits
    from flatout.script.replicas.settings import Facts, Settings
    from flatout.script.replicas.starting import DevicesRequest, device_count, ranks_prepared, start_ranks

    if environment.rank() is not None:
        raise UsageError(
            "--devices in a process that a launcher has started",
            limit="it starts the processes of this machine itself",
            remedy="start it without torchrun, or leave --devices out",
        )
    device = options.get("--device")
    if device not in (None, "cpu"):
        raise UsageError(
            f"--device {device} with --devices", limit="each rank has a GPU of its own", remedy="leave --device out"
        )
    count, visible = device_count(options["--devices"], on_cpu=device == "cpu")
    settings = Settings(
        batch=_batch(options.get("--batch", "global")),
        loss=_loss(options.get("--loss")),
        allow_local_batchnorm="--allow-local-batchnorm" in options,
        isolated="--all-ranks-write" not in options,
        visible=visible,
    )
    target.check()
    if "--prove" in options:
        return _prove(target, count, settings, allow_network="--allow-network" in options)
    if count == 1:
        return None
    words: list[str] = []
    for name, value in options.items():
        if name not in OWN and name not in SWITCHES:
            words += [name, value] if value else [name]
    request = DevicesRequest(
        target=target, devices=count, options=tuple(words), deterministic="--deterministic" in options
    )
    with ranks_prepared(settings) as folder, signals_as_exits():
        status = start_ranks(request, folder)
        facts = Facts.read(folder)
    if facts is not None and status == 0 and "--quiet" not in options:
        _say(facts, settings)
    return status


def _prove(target: Target, count: int, settings: Settings, *, allow_network: bool) -> int:
    """Exit code 0: equal to rounding; 1: different; 4: not comparable."""
    from flatout.cli.ended_by_signal import signals_as_exits
    from flatout.report.devices_text import proof_text
    from flatout.script.isolation.namespaces import own_network
    from flatout.tuning.devices_proof import prove_devices

    if count == 1:
        raise UsageError("--prove with one device", limit="it is compared with several", remedy="use --devices 2")
    if not settings.isolated:
        raise UsageError("--all-ranks-write with --prove", limit="trials write none of the script's files")
    if not allow_network:
        own_network()  # of this process, and so of all trials: they reach each other alone
    try:
        with signals_as_exits():
            proof = prove_devices(target, count, settings)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
    print(proof_text(proof))
    return {"equal to rounding": 0, "different": 1, "not comparable": 4}[proof.verdict]


def _say(facts: Facts, settings: Settings) -> None:
    from flatout.report.devices_text import sharing_lines

    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.writelines(f"flatout: {line}\n" for line in sharing_lines(facts, settings))
        sys.stderr.flush()


def _batch(value: str) -> Batch:
    from flatout.script.replicas.settings import Batch

    return cast("Batch", _one_of("--batch", value, get_args(Batch)))


def _loss(value: str | None) -> Loss | None:
    from flatout.script.replicas.settings import Loss

    return None if value is None else cast("Loss", _one_of("--loss", value, get_args(Loss)))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}", limit=f"it is one of {', '.join(allowed)}")
    return value
