"""What the machine checks know besides the Machine: gathered once, so that every check is a pure function of values."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout import environment

_NVIDIA_PCI_VENDOR = "0x10de"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of this process and its surroundings. The defaults are those of a machine without problems."""

    torch_error: str | None = None  # why `import torch` failed
    torch_threads: int | None = None
    omp_num_threads: int | None = None
    cuda_visible_devices: str | None = None
    cpp_compiler: str = "g++"
    cpp_compiler_path: str | None = "/usr/bin/g++"
    shared_memory_bytes: int | None = None  # size of /dev/shm; None: there is none
    nvidia_pci_devices: int = 0  # display adapters on the bus, whether or not a driver runs them
    busy_cores: float = 0.0  # kept busy by others while this was read


def gather_facts() -> Facts:
    """Imports torch (that is one of the checks), and watches the processor for a fifth of a second."""
    busy_share = _busy_share()
    threads, error = _import_torch()
    compiler = environment.cpp_compiler()
    return Facts(
        torch_error=error,
        torch_threads=threads,
        omp_num_threads=environment.omp_num_threads(),
        cuda_visible_devices=environment.visible_cuda_devices(),
        cpp_compiler=compiler,
        cpp_compiler_path=shutil.which(next(iter(compiler.split()), "")),
        shared_memory_bytes=_size_of(Path("/dev/shm")),
        nvidia_pci_devices=count_nvidia_pci_devices(),
        busy_cores=round(busy_share * (psutil.cpu_count() or 1), 1),
    )


def _busy_share() -> float:
    """Of all cores, in a fifth of a second; 0 where the system does not say."""
    try:
        return float(psutil.cpu_percent(interval=0.2)) / 100
    except OSError:  # no /proc is mounted
        return 0.0


def _import_torch() -> tuple[int | None, str | None]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's cannot be loaded
        return None, f"{type(error).__name__}: {error}"
    return torch.get_num_threads(), None


def _size_of(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def count_nvidia_pci_devices(bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's display and 3D controllers (class 0x03....)."""
    return sum(
        _first_line(device / "vendor") == _NVIDIA_PCI_VENDOR and _first_line(device / "class").startswith("0x03")
        for device in (bus.iterdir() if bus.is_dir() else ())
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
