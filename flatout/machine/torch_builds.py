"""Which build of torch fits a machine, and the lines that install it with the matching torchvision and torchaudio.

Everything comes from torch_builds.toml, which names its sources. What it does not say is unknown, with the reason: a
wrong line costs a download of gigabytes and an environment.

>>> install_advice(machine, "pip").lines
('pip install torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0 --index-url https://download.pytorch.org/whl/cpu',)
"""

from __future__ import annotations

import functools
import platform
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from flatout import environment
from flatout.decoding import decode
from flatout.errors import UsageError
from flatout.machine.description import Gpu, Machine, major
from flatout.machine.nvidia import NAMES_MIG, names_mig

Installer = Literal["pip", "conda"]
DEFAULT_TORCH = "2.13.0"
"""Where no torch is installed and none is named: the version that Flatout is developed with."""
WHEELS = "https://download.pytorch.org/whl/"
AMD_DRIVER = Path("/dev/kfd")


@dataclass(frozen=True, kw_only=True)
class InstallAdvice:
    """What to type to install torch on a machine, or why that is not known."""

    installer: Installer
    torch: str
    build: str | None
    """'cpu', 'cu130', ...; None: unknown, or the one of the package index."""
    lines: tuple[str, ...]
    """Shell commands in their order; none where they are unknown."""
    reason: str
    """Why this build; where there are no lines: why it is unknown."""
    sources: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Release:
    """One version of torch, and what goes with it."""

    cuda: tuple[str, ...]
    torchvision: str
    torchaudio: str


@dataclass(frozen=True, kw_only=True)
class _Table:
    """torch_builds.toml."""

    sources: Mapping[str, str]
    torch: Mapping[str, _Release]
    capabilities: Mapping[str, tuple[str, str]]
    drivers: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class _Build:
    name: str | None
    reason: str
    known: bool = True


def install_advice(machine: Machine, installer: str, torch: str | None = None) -> InstallAdvice:
    """The lines for this machine. `torch`: a version as '2.13.0'; None: the installed one, else DEFAULT_TORCH.

    Raises UsageError for another installer than pip or conda.
    """
    if installer not in get_args(Installer):
        raise UsageError(f"--install is {installer!r}", limit="it is one of pip, conda")
    kind: Installer = "conda" if installer == "conda" else "pip"
    version = (torch or machine.versions.torch or DEFAULT_TORCH).partition("+")[0]
    found = _table().torch.get(version)
    if found is None:
        known = ", ".join(_table().torch)
        reason = f"the table of builds does not have torch {version} (it has {known}); see https://pytorch.org"
        return InstallAdvice(installer=kind, torch=version, build=None, lines=(), reason=reason)
    build = _build(machine, version, found.cuda)
    if not build.known:
        return InstallAdvice(installer=kind, torch=version, build=None, lines=(), reason=build.reason)
    packages = f"torch=={version} torchvision=={found.torchvision} torchaudio=={found.torchaudio}"
    index = f" --index-url {WHEELS}{build.name}" if build.name else ""
    pip = f"pip install {packages}{index}"
    used = ["torch", "torchvision", "torchaudio", *(["driver"] if (build.name or "").startswith("cu") else [])]
    return InstallAdvice(
        installer=kind,
        torch=version,
        build=build.name,
        lines=(pip,) if kind == "pip" else _with_conda(pip),
        reason=build.reason,
        sources=tuple(_table().sources[name] for name in [*used, *(["conda"] if kind == "conda" else [])]),
    )


def wheel_index(machine: Machine) -> str | None:
    """The index of the wheels that fit, for the torch that is installed or the default one; None: unknown."""
    version = (machine.versions.torch or DEFAULT_TORCH).partition("+")[0]
    found = _table().torch.get(version) or _table().torch[DEFAULT_TORCH]
    build = _build(machine, version, found.cuda)
    return f"{WHEELS}{build.name}" if build.known and build.name else None


def _with_conda(pip: str) -> tuple[str, ...]:
    """A conda environment filled by pip: PyTorch publishes only wheels."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = "conda create --name flatout --channel conda-forge --override-channels"
    return (f"{environment} python={python} pip", f"conda run --name flatout {pip}")


def _build(machine: Machine, version: str, built: Sequence[str]) -> _Build:
    system, processor = platform.system(), platform.machine().lower()
    if system == "Darwin":
        return _Build(name=None, reason="on macOS there is one build, for the CPU and Apple's GPU")
    if system not in ("Linux", "Windows") or processor not in ("x86_64", "amd64"):
        return _Build(
            name=None, known=False, reason=f"the table has builds for x86-64; this is {system} on {processor}"
        )
    if machine.devices:
        return _cuda_build(machine, machine.devices, version, built)
    if AMD_DRIVER.exists():
        return _Build(name=None, known=False, reason="there is an AMD GPU, and the table has no ROCm builds")
    if machine.versions.driver is not None and machine.hidden_devices:
        if names_mig(environment.visible_cuda_devices()):
            return _Build(name=None, known=False, reason=f"CUDA_VISIBLE_DEVICES {NAMES_MIG}")
        return _Build(name="cpu", reason="CUDA_VISIBLE_DEVICES hides the GPUs")
    return _Build(name="cpu", reason=f"no NVIDIA GPU ({machine.no_devices_reason})")


def _cuda_build(machine: Machine, gpus: tuple[Gpu, ...], version: str, built: Sequence[str]) -> _Build:
    """The newest CUDA that the driver supports; within a major version an older driver runs newer builds too."""
    versions = machine.versions
    served = _numbers(versions.driver_cuda)
    if served is None:
        return _Build(name=None, known=False, reason="the driver does not say which CUDA it serves")
    fitting = [cuda for cuda in built if all(_holds_code(cuda, gpu) for gpu in gpus)]
    by_version = sorted(((_pair(cuda), cuda) for cuda in fitting), reverse=True)
    direct = [cuda for pair, cuda in by_version if pair <= served]
    compatible = [
        cuda for pair, cuda in reversed(by_version) if pair[0] == served[0] and _driver_is_enough(machine, pair)
    ]
    if not direct and not compatible:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        what = f"driver {versions.driver} serves CUDA up to {versions.driver_cuda}"
        reason = f"{what}, and torch {version} is built for {', '.join(built)}: none of them fits {names}"
        return _Build(name=None, known=False, reason=reason)
    cuda = direct[0] if direct else compatible[0]
    how = "" if direct else " (by minor version compatibility)"
    return _Build(
        name=f"cu{cuda.replace('.', '')}",
        reason=f"{gpus[0].name}, driver {versions.driver} serves CUDA {versions.driver_cuda}{how}",
    )


def _holds_code(cuda: str, gpu: Gpu) -> bool:
    """Whether the build can run on it; assumed for a GPU of unknown compute capability."""
    if gpu.compute_capability is None:
        return True
    first, last = _table().capabilities[cuda]
    return _pair(first) <= gpu.compute_capability and gpu.compute_capability[0] <= _pair(last)[0]


def _driver_is_enough(machine: Machine, cuda: tuple[int, int]) -> bool:
    driver, least = major(machine.versions.driver), _table().drivers.get(str(cuda[0]))
    return least is not None and driver is not None and driver >= least


def _numbers(version: str | None) -> tuple[int, int] | None:
    parts = (version or "").split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdecimal() for part in parts) else None


def _pair(version: str) -> tuple[int, int]:
    found = _numbers(version)
    assert found is not None, "the table has major and minor numbers"
    return found


@functools.cache
def _table() -> _Table:
    text = resources.files("flatout.machine").joinpath("torch_builds.toml").read_text(encoding="utf-8")
    return decode(_Table, tomllib.loads(text))
