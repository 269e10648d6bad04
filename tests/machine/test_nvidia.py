"""The driver is played by stand-ins for NVML's functions: no GPU is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from flatout.machine import nvidia


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def play(monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., Any]) -> None:
    usual: dict[str, Callable[..., Any]] = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "SystemGetDriverVersion": lambda: "570.86.10",
        "SystemGetCudaDriverVersion_v2": lambda: 12080,
        "DeviceGetCount": lambda: 1,
        "DeviceGetHandleByIndex": lambda index: index,
        "DeviceGetName": lambda handle: "NVIDIA H200",
        "DeviceGetUUID": lambda handle: "GPU-1",
        "DeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=60, used=40),
        "DeviceGetNumGpuCores": lambda handle: 16896,
        "DeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)],
        "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=73),
    }
    for name, answer in (usual | answers).items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


def test_a_driver_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    found = nvidia.read_driver()
    assert (found.version, found.newest_cuda, found.reason) == ("570.86.10", "12.8", None)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.multiprocessors, gpu.compute_capability) == ("NVIDIA H200", 132, (9, 0))
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (100, 60)
    assert [(p.name, p.memory_bytes) for p in gpu.processes] == [(None, None)]


def test_what_the_driver_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["GetCudaComputeCapability", "GetMemoryInfo", "GetNumGpuCores", "GetComputeRunningProcesses", "GetUUID"]
    play(monkeypatch, **{f"Device{name}": refuse for name in names})
    (gpu,) = nvidia.read_driver().gpus
    assert (gpu.compute_capability, gpu.memory_total_bytes, gpu.multiprocessors, gpu.uuid) == (None, None, None, None)
    assert (gpu.fast_dtypes, gpu.processes) == ((), ())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the NVIDIA driver does not answer: RM has detected"),
    ],
)
def test_no_driver_is_an_answer(monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    def init() -> None:
        raise pynvml.NVMLError(code)

    play(monkeypatch, Init=init)
    found = nvidia.read_driver()
    assert found.gpus == ()
    assert (found.reason or "").startswith(reason)
