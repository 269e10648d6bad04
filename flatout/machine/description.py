"""What a machine is, as a value: read once by `detect`, passed to all that depends on it, written to every document.

`fingerprint` says whether two figures may be compared: it is the same after a reboot or an upgrade of torch, and
another one when the processor, the cores or the memory that may be used, or the visible GPUs differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from flatout.decoding import decode
from flatout.machine.ceilings import Ceilings
from flatout.notebook_tables import table_html
from flatout.units import format_bytes, format_rate

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor, and how much of it this process may use."""

    name: str
    model_id: str  # vendor-family-model-stepping: clouds hide the name, never this
    physical_cores: int | None  # None: the system does not report it
    logical_cores: int
    available_cores: int  # what affinity and cgroup leave: the number of threads that makes sense
    limited_by: str | None = None  # why available_cores is below logical_cores
    features: tuple[str, ...] = ()  # those that matter for matrix products: avx512_bf16, amx_bf16, ...
    fast_dtypes: tuple[str, ...] = ("fp32",)  # those with instructions of their own

    @property
    def multiplies_bf16(self) -> bool:
        """Has an x86 processor instructions for products of bf16: on matrix units (AMX), or on vectors (AVX-512)?"""
        return not {"amx_bf16", "avx512_bf16"}.isdisjoint(self.features)


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process other than this one on a GPU."""

    pid: int
    name: str | None  # None: it belongs to another user or container
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that this process may use. What the driver does not report is None."""

    name: str
    index: int  # as the driver counts
    uuid: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    multiprocessors: int | None = None
    driver: str | None = None
    fast_dtypes: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Of what is installed; None: not installed, or it does not say."""

    python: str
    operating_system: str
    flatout: str
    torch: str | None = None
    cuda: str | None = None  # the CUDA that torch was built with; None: a build for the CPU only
    cudnn: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver can serve


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that Flatout knows of the machine. Memory figures respect the limits of the cgroup."""

    fingerprint: str
    cpu: Cpu
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limited_by: str | None = None
    devices: tuple[Gpu, ...] = ()
    hidden_devices: tuple[str, ...] = ()  # names of GPUs that CUDA_VISIBLE_DEVICES hides
    no_devices_reason: str | None = None
    versions: Versions
    ceilings: Ceilings | None = None

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the installed torch can drive: none with a build for the CPU or a driver too old for it."""
        cuda, served = major(self.versions.cuda), major(self.versions.driver_cuda)
        if cuda is None or (served is not None and served < cuda):
            return ()
        return self.devices

    def gpu(self, device: str) -> Gpu | None:
        """The one that torch calls 'cuda' or 'cuda:1', which numbers those that it sees; None for the CPU, or where the
        GPUs were not detected."""
        kind, _, number = device.partition(":")
        if kind != "cuda":
            return None
        place = int(number or 0)
        return self.devices[place] if place < len(self.devices) else None

    @property
    def device_kind(self) -> str:
        """Where work should run here: "cuda" or "cpu"."""
        return "cuda" if self.usable_gpus else "cpu"

    @property
    def device_name(self) -> str:
        """The same as torch names it: "cuda:0" or "cpu"."""
        return "cuda:0" if self.usable_gpus else "cpu"

    @property
    def fast_dtypes(self) -> tuple[str, ...]:
        """Of the device where work should run."""
        return self.usable_gpus[0].fast_dtypes if self.usable_gpus else self.cpu.fast_dtypes

    def _repr_html_(self) -> str:
        """In a notebook: the processor, memory, GPUs, torch, and what was measured."""
        cpu = self.cpu
        rows = [
            ("processor", f"{cpu.name}, {cpu.available_cores} cores; fast in {', '.join(cpu.fast_dtypes)}"),
            ("memory", format_bytes(self.memory_total_bytes)),
            ("GPU", ", ".join(gpu.name for gpu in self.devices) or f"none: {self.no_devices_reason}"),
            ("torch", self.versions.torch or "not installed"),
        ]
        products = self.ceilings.gemm_flops_per_second if self.ceilings is not None else {}
        rows += [(f"{dtype} product", format_rate(peak.value, peak.unit)) for dtype, peak in products.items()]
        return table_html("Machine", rows)

    def with_ceilings(self, ceilings: Ceilings | None) -> Machine:
        return replace(self, ceilings=ceilings)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Machine:
        """Keys that are no fields are left out: a document may say more of the machine than this."""
        return decode(cls, {one.name: data[one.name] for one in fields(cls) if one.name in data})


def major(version: str | None) -> int | None:
    """'12.8' -> 12."""
    head = (version or "").split(".")[0]
    return int(head) if head.isdecimal() else None


def fingerprint_of(cpu: Cpu, memory_total_bytes: int, devices: tuple[Gpu, ...]) -> str:
    """Twelve hexadecimal digits. Memory is rounded to GiB: a kernel reserves a little more or less for itself."""
    parts = [cpu.name, cpu.model_id, str(cpu.available_cores), str(round(memory_total_bytes / GIB))]
    parts += [f"{gpu.name}/{round((gpu.memory_total_bytes or 0) / GIB)}" for gpu in devices]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
