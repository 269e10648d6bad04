"""Can the GPUs be reached, and are they free?"""

from __future__ import annotations

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks.facts import Facts
from flatout.machine.description import Gpu, GpuProcess, Machine
from flatout.machine.nvidia import NAMES_MIG, names_mig
from flatout.units import format_bytes

_LITTLE_FREE_SHARE = 0.5
_IDLE_PROCESS_BYTES = 64 * 1024**2  # a process that only opened the device holds no more


def gpu_without_driver(machine: Machine, facts: Facts) -> Finding | None:
    if machine.devices or machine.hidden_devices or not facts.nvidia_pci_devices:
        return None
    return Finding(
        name="gpu_without_driver",
        severity="warning",
        title="a GPU without a working driver",
        evidence=f"{facts.nvidia_pci_devices} NVIDIA GPU on the PCI bus, but {machine.no_devices_reason}",
        remedy="install the NVIDIA driver (in a container: start it with access to the GPU); after an upgrade, reboot",
        next_command="nvidia-smi",
    )


def gpu_hidden(machine: Machine, facts: Facts) -> Finding | None:
    if not machine.hidden_devices or facts.cuda_visible_devices is None:
        return None
    all_hidden = not machine.devices
    if names_mig(facts.cuda_visible_devices):
        return Finding(
            name="gpu_hidden",
            severity="note",
            title=f"CUDA_VISIBLE_DEVICES {NAMES_MIG}",
            evidence=f"it is {facts.cuda_visible_devices!r}: torch uses that instance, whose ceilings are not measured",
            remedy="name whole GPUs, by number or as GPU-..., to have them measured",
            next_command="nvidia-smi -L",
        )
    return Finding(
        name="gpu_hidden",
        severity="warning" if all_hidden else "note",
        title=f"CUDA_VISIBLE_DEVICES hides {'every' if all_hidden else 'a'} GPU",
        evidence=f"it is {facts.cuda_visible_devices!r} and hides {', '.join(machine.hidden_devices)}",
        remedy="unset it if that was not meant",
        next_command="unset CUDA_VISIBLE_DEVICES",
    )


def gpu_occupied(machine: Machine, facts: Facts) -> Finding | None:
    for gpu in machine.devices:
        busy = [p for p in gpu.processes if p.memory_bytes is None or p.memory_bytes > _IDLE_PROCESS_BYTES]
        if busy:
            return Finding(
                name="gpu_occupied",
                severity="warning",
                title=f"other processes are using GPU {gpu.index} ({gpu.name})",
                evidence="; ".join(map(_process_text, busy)),
                remedy="wait for them, end them if they are yours, or take another GPU",
                next_command=_other_gpu(machine, gpu) or f"nvidia-smi --id={gpu.index}",
                cost_bytes=sum(p.memory_bytes or 0 for p in busy) or None,
            )
    return None


def _process_text(process: GpuProcess) -> str:
    name = process.name or "a process of another user or container"
    held = "memory unknown" if process.memory_bytes is None else format_bytes(process.memory_bytes)
    return f"{name} (pid {process.pid}): {held}"


def _other_gpu(machine: Machine, occupied: Gpu) -> str | None:
    idle = [gpu.index for gpu in machine.devices if gpu is not occupied and not gpu.processes]
    return f"export CUDA_VISIBLE_DEVICES={idle[0]}" if idle else None


def gpu_memory_low(machine: Machine, facts: Facts) -> Finding | None:
    for gpu in machine.devices:
        if gpu.memory_free_bytes is None or not gpu.memory_total_bytes:
            continue
        share = gpu.memory_free_bytes / gpu.memory_total_bytes
        if share < _LITTLE_FREE_SHARE:
            return Finding(
                name="gpu_memory_low",
                severity="warning",
                title=f"little memory is free on GPU {gpu.index} ({gpu.name})",
                evidence=f"{format_bytes(gpu.memory_free_bytes)} of {format_bytes(gpu.memory_total_bytes)}",
                remedy="see who holds it; a batch that fits an empty GPU will not fit this one",
                next_command=f"nvidia-smi --id={gpu.index}",
                cost_bytes=gpu.memory_total_bytes - gpu.memory_free_bytes,
                cost_share=1 - share,
            )
    return None
