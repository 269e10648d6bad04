import json
import os
import subprocess
import sys

import pytest

from flatout.machine.description import Machine
from flatout.machine.detect import available_cores, cpu_fast_dtypes, detect, parse_cpuinfo

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
