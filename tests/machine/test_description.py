import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.machine.description import Gpu, GpuProcess, Machine, fingerprint_of, major
from flatout.machine.nvidia import fast_dtypes, visible

RECORDED = Path(__file__).parents[1] / "recorded" / "machine_two_cores.json"
GIB = 1024**3


@pytest.fixture
def machine() -> Machine:
    return Machine.from_json(json.loads(RECORDED.read_text()))


def gpu(index: int = 0, name: str = "NVIDIA H200") -> Gpu:
    return Gpu(
        name=name,
        index=index,
        uuid=f"GPU-{index}abc",
        compute_capability=(9, 0),
        memory_total_bytes=140 * GIB,
        memory_free_bytes=139 * GIB,
        multiprocessors=132,
        driver="570.1",
        fast_dtypes=fast_dtypes((9, 0)),
        processes=(GpuProcess(pid=7, name=None, memory_bytes=GIB),),
    )


def test_a_machine_survives_json(machine: Machine) -> None:
    whole = replace(machine, devices=(gpu(),), hidden_devices=("Tesla T4",))
    assert whole.ceilings is not None
    assert Machine.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert Machine.from_json(machine.with_ceilings(None).to_json()).ceilings is None


def test_the_fingerprint_is_of_the_hardware_alone(machine: Machine) -> None:
    cpu, memory = machine.cpu, machine.memory_total_bytes
    own = fingerprint_of(cpu, memory, ())
    assert own == machine.fingerprint
    assert fingerprint_of(cpu, memory + 1_000_000, ()) == own  # another kernel keeps a little more for itself
    assert fingerprint_of(cpu, memory, (replace(gpu(), memory_free_bytes=0),)) == fingerprint_of(cpu, memory, (gpu(),))
    others = [
        fingerprint_of(replace(cpu, available_cores=1), memory, ()),
        fingerprint_of(replace(cpu, model_id="AuthenticAMD-25-1-1"), memory, ()),
        fingerprint_of(cpu, memory * 2, ()),
        fingerprint_of(cpu, memory, (gpu(),)),
        fingerprint_of(cpu, memory, (gpu(), gpu(1))),
    ]
    assert len({own, *others}) == 6


def test_a_gpu_counts_only_if_torch_can_drive_it(machine: Machine) -> None:
    beside = replace(machine, devices=(gpu(),))
    assert (beside.device_kind, beside.fast_dtypes) == ("cpu", machine.cpu.fast_dtypes)
    built = replace(beside, versions=replace(machine.versions, cuda="13.0", driver_cuda="13.1"))
    assert built.device_kind == "cuda"
    assert "fp8" in built.fast_dtypes
    assert replace(built, versions=replace(built.versions, driver_cuda="12.8")).usable_gpus == ()
    assert replace(built, versions=replace(built.versions, cuda="12.9", driver_cuda="12.4")).device_kind == "cuda"


def test_torch_numbers_the_gpus_that_it_sees(machine: Machine) -> None:
    seen = replace(machine, devices=visible((gpu(0, "A"), gpu(1, "B"), gpu(2, "C")), "2,0"))
    names = [found and found.name for found in map(seen.gpu, ("cuda", "cuda:0", "cuda:1", "cuda:2", "cpu"))]
    assert names == ["C", "C", "A", None, None]


@pytest.mark.parametrize(("version", "number"), [("12.8", 12), ("13", 13), (None, None), ("", None), ("x.1", None)])
def test_major(version: str | None, number: int | None) -> None:
    assert major(version) == number


def test_fast_dtypes_by_generation() -> None:
    assert fast_dtypes((7, 0)) == ("fp32", "fp16")
    assert fast_dtypes((7, 5)) == ("fp32", "fp16", "int8")
    assert fast_dtypes((8, 6)) == ("fp32", "tf32", "bf16", "fp16", "int8")
    assert fast_dtypes((8, 9)) == ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
    assert fast_dtypes(None) == ()


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-1", [1]),
        ("0,0", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(setting: str | None, indices: list[int]) -> None:
    assert [g.index for g in visible((gpu(0), gpu(1), gpu(2)), setting)] == indices
