"""Which GPU a script sees: the one that was asked for, or none.

A script that asks for "cuda" gets its first GPU; which one that is, or whether there is any, is decided before CUDA
starts. So neither the script nor its trials need to know.
"""

from __future__ import annotations

import re

from flatout import environment
from flatout.errors import UsageError
from flatout.machine.description import Machine
from flatout.machine.detect import detect


def show_only(device: str | None) -> None:
    """Let this process, and those that it starts, see one GPU ('cuda:1', or 'cuda' for the first) or none ('cpu').

    None leaves all of them. Numbers are those of `flatout check`. Raises UsageError, listing the devices
    that are available, where there is no such device.
    """
    if device is not None:
        environment.show_cuda_devices(visible_setting(device, "--device"))


def visible_setting(device: str, name: str = "device") -> str:
    """CUDA_VISIBLE_DEVICES by which that device alone is seen; `name` is the argument's, in the error."""
    if device == "cpu":
        return ""
    machine, number = detect(), re.fullmatch(r"cuda(?::(\d+))?", device)
    index = int(number[1] or 0) if number else len(machine.usable_gpus)
    if index >= len(machine.usable_gpus):
        remedy = "see what is here with: flatout check" if number else "name one of these"
        raise UsageError(f"{name} is {device!r}", limit=_available(machine), remedy=remedy)
    setting, gpu = environment.visible_cuda_devices(), machine.usable_gpus[index]
    return gpu.uuid or str(gpu.index) if setting is None else setting.split(",")[index].strip()


def _available(machine: Machine) -> str:
    gpus = [f"cuda:{number} ({gpu.name})" for number, gpu in enumerate(machine.usable_gpus)]
    if gpus:
        return f"available are cpu, {', '.join(gpus)}"
    return (
        f"only cpu is available: {machine.no_devices_reason or 'torch is a build for the CPU, or for a newer driver'}"
    )
