"""The ranks of a script on several devices of this machine, started and awaited.

    with ranks_prepared(settings) as folder:
        status = start_ranks(command, 2, folder)

A rank of a run is `flatout run` again, with the same options, told by a variable that it is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flatout import environment
from flatout.errors import UsageError
from flatout.machine.detect import detect, usable_cores
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.rank_count import MOST_DIGITS
from flatout.plan_document import short
from flatout.script.replicas.settings import Settings, refusal_of
from flatout.script.work_folder import work_folder
from flatout.units import counted

QUIET = (("WANDB_MODE", "offline"), ("TORCH_CPP_LOG_LEVEL", "ERROR"))
"""Variables of ranks that are a trial: nothing is sent to tracking services; no warning that a trial without a network
finds no name of its own."""


def device_count(asked: str, *, on_cpu: bool) -> tuple[int, tuple[str, ...]]:
    """(ranks, CUDA_VISIBLE_DEVICES of each; empty where they train on the CPU) for '4' or 'auto': all GPUs.

    on_cpu: the GPUs are not to be used. Raises UsageError where there are fewer GPUs, or the number is none.
    """
    machine = detect()
    gpus = [] if on_cpu else machine.usable_gpus
    if asked == "auto":
        if not gpus:
            raise UsageError(
                "--devices is auto, and there is no GPU to count",
                limit=machine.no_devices_reason or "ranks on a CPU share its cores",
                remedy="say how many ranks to start on the CPU: --devices 2",
            )
        count = len(gpus)
    elif asked.isdecimal() and len(asked) <= MOST_DIGITS and int(asked) > 0:
        count = int(asked)
    else:
        raise UsageError(
            f"--devices is {short(asked)}", limit="it is a number from 1, or auto", remedy="use --devices 2"
        )
    if gpus and count > len(gpus):
        raise UsageError(
            f"--devices is {count}, and {counted(len(gpus), 'GPU')} may be used",
            limit="each rank has a GPU of its own",
            remedy=f"use --devices {len(gpus)}, or --device cpu to train on the processor",
        )
    if not gpus and count > (cores := usable_cores()):
        raise UsageError(
            f"--devices is {count}, and {cores} core{'s' * (cores != 1)} may be used",
            limit="ranks on a CPU need a core each",
            remedy=f"use --devices {cores}" if cores > 1 else "train on one device: leave --devices out",
        )
    setting = environment.visible_cuda_devices()
    names = setting.split(",") if setting is not None else [gpu.uuid or str(gpu.index) for gpu in gpus]
    return count, tuple(names[index].strip() for index in range(count)) if gpus else ()


@contextlib.contextmanager
def ranks_prepared(settings: Settings, *shared: Path) -> Iterator[Path]:
    """The folder of a run, with its settings; removed in the end. shared: folders that all ranks may write to, beside
    caches."""
    with work_folder() as folder:
        write_settings(settings, folder, *shared)
        yield folder


def write_settings(settings: Settings, folder: Path, *shared: Path) -> None:
    """What the ranks of a run are told; `shared` as above."""
    caches = (environment.cache_dir(), environment.inductor_folder(), *shared)
    replace(settings, shared=tuple(str(path) for path in caches)).write(folder)


def start_ranks(
    command: Sequence[str],
    devices: int,
    folder: Path,
    *,
    variables: Sequence[tuple[str, str]] = (),
    grace_seconds: float = 30.0,
) -> int:
    """The exit status of the job: 0 where every rank's was. variables: more environment variables of the ranks;
    grace_seconds: between SIGTERM and SIGKILL.

    Raises UsageError or MachineError where a rank refused to go on.
    """
    from flatout.parallel.launching.launch import launch

    status = launch(
        Launch(
            command=tuple(command),
            nproc_per_node=devices,
            quiet=True,
            stdout_of="first",
            grace_seconds=grace_seconds,
            hang_seconds=0.0,  # an evaluation may take any time, and ranks that part say so themselves
            variables=(*environment.ranks_variables(folder).items(), *variables),
        )
    )
    if refusal := refusal_of(folder):
        raise refusal
    return status
