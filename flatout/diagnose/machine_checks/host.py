"""Are the processor's cores, memory and a compiler available?"""

from __future__ import annotations

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks.facts import Facts
from flatout.machine.description import GIB, Machine
from flatout.units import format_bytes

_LITTLE_MEMORY_BYTES = 2 * GIB
_LITTLE_SHARED_BYTES = 256 * 1024**2  # a container's default of 64 MiB is far below
_BUSY_SHARE = 0.25


def threads_too_many(machine: Machine, facts: Facts) -> Finding | None:
    threads, cores = facts.torch_threads, machine.cpu.available_cores
    if threads is None or threads <= cores:
        return None
    return Finding(
        name="threads_too_many",
        severity="warning",
        title="torch runs more threads than there are cores",
        evidence=f"{threads} threads on {_cores(machine)}: they wait for one another in every operation",
        remedy=f"use {cores} threads",
        next_command=f"export OMP_NUM_THREADS={cores}",
    )


def threads_too_few(machine: Machine, facts: Facts) -> Finding | None:
    cores = machine.cpu.physical_cores or machine.cpu.available_cores
    cores = min(cores, machine.cpu.available_cores)
    if facts.omp_num_threads is None or machine.usable_gpus or facts.omp_num_threads * 2 > cores:
        return None
    return Finding(
        name="threads_too_few",
        severity="warning",
        title=f"OMP_NUM_THREADS={facts.omp_num_threads} leaves cores idle",
        evidence=f"{cores} cores are available to this process (torchrun sets 1 where it is not set)",
        remedy=f"set it to the cores that one process may use: {cores} if it runs alone",
        next_command=f"export OMP_NUM_THREADS={cores}",
        cost_share=1 - facts.omp_num_threads / cores,
    )


def cores_limited(machine: Machine, facts: Facts) -> Finding | None:
    cpu = machine.cpu
    if cpu.limited_by is None:
        return None
    return Finding(
        name="cores_limited",
        severity="note",
        title=f"{cpu.available_cores} of {cpu.logical_cores} cores may be used",
        evidence=cpu.limited_by,
        remedy="ask for more where the process or container is started (docker --cpus, taskset, the job's request)",
    )


def memory_low(machine: Machine, facts: Facts) -> Finding | None:
    available = machine.memory_available_bytes
    if available >= min(_LITTLE_MEMORY_BYTES, machine.memory_total_bytes // 4):
        return None
    limited = f" ({machine.memory_limited_by})" if machine.memory_limited_by else ""
    return Finding(
        name="memory_low",
        severity="warning",
        title="little memory is available",
        evidence=f"{format_bytes(available)} of {format_bytes(machine.memory_total_bytes)}{limited}",
        remedy="end the processes that use it; with this little, loading a model may be killed without a message",
        next_command="ps aux --sort=-rss | head",
        cost_bytes=machine.memory_total_bytes - available,
    )


def shared_memory_small(machine: Machine, facts: Facts) -> Finding | None:
    size = facts.shared_memory_bytes
    if size is None or size >= _LITTLE_SHARED_BYTES:
        return None
    return Finding(
        name="shared_memory_small",
        severity="warning",
        title="/dev/shm is too small for loader workers",
        evidence=f"{format_bytes(size)}: loader workers pass batches through it; full, it kills them ('Bus error')",
        remedy="start the container with more (docker run --shm-size=8g, or --ipc=host), or use num_workers=0",
        next_command="df -h /dev/shm",
    )


def compiler_missing(machine: Machine, facts: Facts) -> Finding | None:
    if facts.cpp_compiler_path is not None:
        return None
    on_cpu = not machine.usable_gpus
    return Finding(
        name="compiler_missing",
        severity="warning" if on_cpu else "note",
        title="no C++ compiler: torch.compile cannot work" + ("" if on_cpu else " for the CPU's part"),
        evidence=f"{facts.cpp_compiler!r} is not on the PATH",
        remedy="install one, or name yours in CXX",
        next_command="apt-get install g++",
    )


def machine_busy(machine: Machine, facts: Facts) -> Finding | None:
    cores = machine.cpu.logical_cores
    if facts.busy_cores < max(0.5, _BUSY_SHARE * cores):
        return None
    return Finding(
        name="machine_busy",
        severity="note",
        title="other processes are keeping the CPU busy",
        evidence=f"{facts.busy_cores:g} of {cores} cores were busy during the check",
        remedy="figures measured now may be lower than the machine can do; interleaved comparisons remain valid",
        cost_share=facts.busy_cores / cores,
    )


def _cores(machine: Machine) -> str:
    cpu = machine.cpu
    return f"{cpu.available_cores} cores" + (f" ({cpu.limited_by})" if cpu.limited_by else "")
