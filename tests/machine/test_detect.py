import json
import os
import subprocess
import sys

import psutil
import pytest

from flatout.diagnose.machine_checks import gather_facts
from flatout.machine import detect as detect_module
from flatout.machine.description import Gpu, Machine
from flatout.machine.detect import available_cores, cpu_fast_dtypes, detect, model_id, parse_cpuinfo
from flatout.machine.nvidia import Driver

# What detection may not do: import torch (the user's script sets it up first), or fork anything from CUDA.
PROBE = """
import json, sys
from flatout.machine.detect import detect
found = detect()
assert "torch" not in sys.modules, "torch was imported"
print(json.dumps(found.to_json()))
"""


def test_detection_reads_and_does_nothing_else() -> None:
    ended = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    found = Machine.from_json(json.loads(ended.stdout))
    assert found.cpu.available_cores >= 1
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes
    assert found.versions.torch is not None
    assert (found.no_devices_reason is None) == bool(found.devices)


def test_the_fingerprint_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect().fingerprint == detect().fingerprint
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
        everywhere = detect()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
        assert detect().cpu.available_cores == 1
        assert detect().fingerprint != everywhere.fingerprint


@pytest.mark.parametrize(
    ("logical", "allowed", "quota", "cores", "reason"),
    [
        (8, 8, None, 8, None),
        (8, 2, None, 2, "the CPU affinity allows 2 of 8 cores"),
        (8, 8, 1.5, 1, "the cgroup allows 1.5 of 8 cores"),
        (8, 8, 0.5, 1, "the cgroup allows 0.5 of 8 cores"),
        (8, 2, 4.0, 2, "the CPU affinity allows 2 of 8 cores"),
        (8, 8, 16.0, 8, None),
    ],
)
def test_cores_that_can_really_be_used(
    logical: int, allowed: int, quota: float | None, cores: int, reason: str | None
) -> None:
    assert available_cores(logical, allowed, quota) == (cores, reason)


def test_processors_of_both_makers_and_arm() -> None:
    text = (
        "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: avx2 amx_bf16 amx_int8\n\nprocessor\t: 1\nflags : x"
    )
    info = parse_cpuinfo(text)
    assert info["model name"] == "Intel(R) Xeon(R)"
    assert cpu_fast_dtypes(info["flags"].split()) == ("fp32", "bf16", "int8")
    assert cpu_fast_dtypes(["avx512f", "avx512_bf16"]) == ("fp32", "bf16")
    assert cpu_fast_dtypes(["avx512_fp16"]) == ("fp32", "fp16")
    assert cpu_fast_dtypes(["asimdhp", "bf16", "i8mm"]) == ("fp32", "bf16", "fp16", "int8")
    assert cpu_fast_dtypes([]) == ("fp32",)
    assert parse_cpuinfo("") == {}
    arm = "processor: 0\nCPU implementer: 0x41\nCPU architecture: 8\nCPU variant: 0x1\nCPU part: 0xd40\nCPU revision: 2"
    assert model_id(parse_cpuinfo(arm)) == "0x41-0xd40-0x1-2"
    assert model_id({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "207"}) == "GenuineIntel-6-207-?"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("", "CUDA_VISIBLE_DEVICES hides them all"),
        ("MIG-7e8f", "CUDA_VISIBLE_DEVICES names a MIG instance, of which Flatout knows nothing"),
    ],
)
def test_why_no_gpu_is_seen(setting: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Driver(version="580.1", gpus=(Gpu(name="NVIDIA H200", index=0, uuid="GPU-1"),))
    monkeypatch.setattr(detect_module, "read_driver", lambda: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = detect()
    assert (found.devices, found.hidden_devices, found.no_devices_reason) == ((), ("NVIDIA H200",), reason)


def test_without_proc_the_machine_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a chroot."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path))
    for name in ("virtual_memory", "cpu_count", "cpu_percent"):
        monkeypatch.setattr(psutil, name, missing)
    monkeypatch.setattr(detect_module, "_read", lambda path: "")
    found = detect()
    assert found.memory_total_bytes >= found.memory_available_bytes > 0
    assert found.cpu.physical_cores is None


def test_no_proc_and_a_compiler_of_blanks_are_no_end_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", missing)
    monkeypatch.setenv("CXX", "  ")
    found = gather_facts()
    assert (found.busy_cores, found.cpp_compiler) == (0.0, "g++")
