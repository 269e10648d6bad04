"""Does the installed torch fit this machine?"""

from __future__ import annotations

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks.facts import Facts
from flatout.machine.description import Machine, major
from flatout.machine.torch_builds import wheel_index

_OLDEST_TORCH = (2, 11)
# The oldest GPU generation for which the binaries of a CUDA major version still contain code (CUDA release notes).
_OLDEST_CAPABILITY = {11: (3, 5), 12: (5, 0), 13: (7, 5)}


def torch_missing(machine: Machine, facts: Facts) -> Finding | None:
    if facts.torch_error is None:
        return None
    installed = machine.versions.torch
    return Finding(
        name="torch_missing",
        severity="unusable",
        title="torch cannot be imported" if installed else "torch is not installed",
        evidence=f"`import torch` ended with {facts.torch_error}",
        remedy="reinstall it" if installed else "install it",
        next_command="pip install --force-reinstall torch" if installed else "pip install torch",
    )


def torch_too_old(machine: Machine, facts: Facts) -> Finding | None:
    version = machine.versions.torch
    if version is None or (parsed := _two_numbers(version)) is None or parsed >= _OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, _OLDEST_TORCH))
    return Finding(
        name="torch_too_old",
        severity="unusable",
        title=f"torch {version} is too old",
        evidence=f"Flatout is built on torch {oldest} or newer",
        remedy="upgrade it",
        next_command=f"pip install --upgrade 'torch>={oldest}'",
    )


def torch_for_cpu_only(machine: Machine, facts: Facts) -> Finding | None:
    if not machine.devices or machine.versions.torch is None or machine.versions.cuda is not None:
        return None
    return Finding(
        name="torch_for_cpu_only",
        severity="warning",
        title="torch is a CPU-only build, but there is a GPU",
        evidence=f"{machine.devices[0].name} is here, and torch {machine.versions.torch} cannot use it",
        remedy="install a build with CUDA",
        next_command=_reinstall(machine),
    )


def _reinstall(machine: Machine) -> str:
    """The line that installs the build that fits; where the table lacks it, the command that says why."""
    index = wheel_index(machine)
    return f"pip install --force-reinstall torch --index-url {index}" if index else "flatout check --install pip"


def driver_too_old(machine: Machine, facts: Facts) -> Finding | None:
    built, served = major(machine.versions.cuda), major(machine.versions.driver_cuda)
    if built is None or served is None or served >= built:
        return None
    versions = machine.versions
    return Finding(
        name="driver_too_old",
        severity="warning",
        title="the GPU driver is too old for this torch",
        evidence=f"driver {versions.driver} serves CUDA up to {versions.driver_cuda}, torch needs {versions.cuda}",
        remedy="upgrade the driver, or install a torch build made for its CUDA",
        next_command=_reinstall(machine),
    )


def gpu_too_old(machine: Machine, facts: Facts) -> Finding | None:
    oldest = _OLDEST_CAPABILITY.get(major(machine.versions.cuda) or 0)
    old = [g for g in machine.devices if oldest and g.compute_capability and g.compute_capability < oldest]
    if not old or oldest is None or old[0].compute_capability is None:
        return None
    have, need = (f"{a}.{b}" for a, b in (old[0].compute_capability, oldest))
    return Finding(
        name="gpu_too_old",
        severity="warning",
        title=f"{old[0].name} is too old for this torch",
        evidence=f"compute capability {have}; builds with CUDA {machine.versions.cuda} start at {need}",
        remedy="install a torch build made with an older CUDA",
        next_command=_reinstall(machine),
    )


def _two_numbers(version: str) -> tuple[int, int] | None:
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdecimal() for p in parts) else None
