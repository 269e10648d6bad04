import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks import CHECKS, Facts, check_machine, gather_facts
from flatout.diagnose.machine_checks.facts import count_nvidia_pci_devices
from flatout.machine.description import Gpu, GpuProcess, Machine

RECORDED = Path(__file__).parents[1] / "recorded" / "machine_two_cores.json"
GIB = 1024**3
H200 = Gpu(
    name="NVIDIA H200",
    index=0,
    compute_capability=(9, 0),
    memory_total_bytes=140 * GIB,
    memory_free_bytes=139 * GIB,
    driver="580.1",
)
WELL = Facts()


@pytest.fixture
def cpu_machine() -> Machine:
    return Machine.from_json(json.loads(RECORDED.read_text()))


@pytest.fixture
def gpu_machine(cpu_machine: Machine) -> Machine:
    return with_versions(replace(cpu_machine, devices=(H200,)), torch="2.13.0+cu130", cuda="13.0", driver_cuda="13.0")


def with_versions(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, versions=replace(machine.versions, **changes))


def with_cpu(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, cpu=replace(machine.cpu, **changes))


def only(machine: Machine, facts: Facts) -> Finding:
    (finding,) = check_machine(machine, facts)
    return finding


def test_a_machine_on_which_all_is_well_has_no_findings(cpu_machine: Machine, gpu_machine: Machine) -> None:
    assert check_machine(cpu_machine, WELL) == ()
    assert check_machine(gpu_machine, WELL) == ()


def test_torch_missing_or_broken_makes_the_machine_unusable(cpu_machine: Machine) -> None:
    absent = with_versions(cpu_machine, torch=None)
    found = only(absent, Facts(torch_error="ModuleNotFoundError: No module named 'torch'"))
    assert (found.name, found.severity, found.next_command) == ("torch_missing", "unusable", "pip install torch")
    broken = only(cpu_machine, Facts(torch_error="OSError: libtorch.so: cannot open shared object file"))
    assert broken.title == "torch cannot be imported"
    assert "libtorch.so" in broken.evidence


@pytest.mark.parametrize(("version", "old"), [("2.10.1", True), ("1.13", True), ("2.11.0", False), ("3.0", False)])
def test_torch_too_old(cpu_machine: Machine, version: str, old: bool) -> None:
    found = check_machine(with_versions(cpu_machine, torch=version), WELL)
    assert [(f.name, f.severity) for f in found] == ([("torch_too_old", "unusable")] if old else [])


@pytest.mark.parametrize(
    ("driver_cuda", "index"), [("13.0", "cu130"), ("12.8", "cu126"), (None, "flatout check --install pip")]
)
def test_a_cpu_build_beside_a_gpu(gpu_machine: Machine, driver_cuda: str | None, index: str) -> None:
    found = only(with_versions(gpu_machine, cuda=None, driver_cuda=driver_cuda), WELL)
    assert found.name == "torch_for_cpu_only"
    assert "NVIDIA H200" in found.evidence
    assert (found.next_command or "").endswith(index)


def test_a_driver_too_old_for_the_build(gpu_machine: Machine) -> None:
    found = only(with_versions(gpu_machine, driver="570.86", driver_cuda="12.8"), WELL)
    assert found.name == "driver_too_old"
    assert found.evidence == "driver 570.86 serves CUDA up to 12.8, torch needs 13.0"
    assert check_machine(with_versions(gpu_machine, cuda="12.9", driver_cuda="12.4"), WELL) == ()


def test_a_gpu_too_old_for_the_build(gpu_machine: Machine) -> None:
    volta = replace(H200, name="Tesla V100-SXM2-16GB", compute_capability=(7, 0))
    found = only(replace(gpu_machine, devices=(volta,)), WELL)
    assert found.name == "gpu_too_old"
    assert found.evidence == "compute capability 7.0; builds with CUDA 13.0 start at 7.5"


def test_a_gpu_without_a_driver(cpu_machine: Machine) -> None:
    found = only(cpu_machine, Facts(nvidia_pci_devices=1))
    assert found.name == "gpu_without_driver"
    assert "no NVIDIA driver" in found.evidence


def test_hidden_gpus(gpu_machine: Machine) -> None:
    all_hidden = replace(gpu_machine, devices=(), hidden_devices=("NVIDIA H200",))
    assert only(all_hidden, Facts(cuda_visible_devices="", nvidia_pci_devices=1)).severity == "warning"
    some = replace(gpu_machine, hidden_devices=("NVIDIA H200",))
    assert only(some, Facts(cuda_visible_devices="0")).severity == "note"
    part = only(all_hidden, Facts(cuda_visible_devices="MIG-7e8f", nvidia_pci_devices=1))
    assert (part.severity, part.title) == (
        "note",
        "CUDA_VISIBLE_DEVICES names a MIG instance, of which Flatout knows nothing",
    )


def test_an_occupied_gpu_names_who_holds_it_and_where_to_go(gpu_machine: Machine) -> None:
    held = replace(H200, processes=(GpuProcess(pid=7, name="python", memory_bytes=20 * GIB),))
    found = only(replace(gpu_machine, devices=(held, replace(H200, index=1))), WELL)
    assert found.evidence == "python (pid 7): 20 GiB"
    assert (found.cost_bytes, found.next_command) == (20 * GIB, "export CUDA_VISIBLE_DEVICES=1")
    assert only(replace(gpu_machine, devices=(held,)), WELL).next_command == "nvidia-smi --id=0"
    idle = replace(H200, processes=(GpuProcess(pid=7, name="Xorg", memory_bytes=4 * 1024**2),))
    assert check_machine(replace(gpu_machine, devices=(idle,)), WELL) == ()


def test_little_free_gpu_memory(gpu_machine: Machine) -> None:
    found = only(replace(gpu_machine, devices=(replace(H200, memory_free_bytes=14 * GIB),)), WELL)
    assert found.evidence == "14 GiB of 140 GiB"
    assert found.cost_share == pytest.approx(0.9)
    unknown = replace(H200, memory_free_bytes=None)
    assert check_machine(replace(gpu_machine, devices=(unknown,)), WELL) == ()


def test_more_threads_than_cores(cpu_machine: Machine) -> None:
    limited = with_cpu(cpu_machine, logical_cores=64, available_cores=4, limited_by="the cgroup allows 4 of 64 cores")
    found = {f.name: f for f in check_machine(limited, Facts(torch_threads=32, omp_num_threads=32))}
    assert found.keys() == {"threads_too_many", "cores_limited"}
    assert found["threads_too_many"].next_command == "export OMP_NUM_THREADS=4"
    assert found["cores_limited"].severity == "note"


def test_one_thread_on_many_cores(cpu_machine: Machine, gpu_machine: Machine) -> None:
    many = {"logical_cores": 32, "physical_cores": 16, "available_cores": 32}
    found = only(with_cpu(cpu_machine, **many), Facts(torch_threads=1, omp_num_threads=1))
    assert (found.name, found.next_command) == ("threads_too_few", "export OMP_NUM_THREADS=16")
    assert found.cost_share == pytest.approx(15 / 16)
    assert check_machine(with_cpu(gpu_machine, **many), Facts(torch_threads=1, omp_num_threads=1)) == ()
    assert check_machine(with_cpu(cpu_machine, **many), Facts(torch_threads=16, omp_num_threads=16)) == ()


def test_no_compiler(cpu_machine: Machine, gpu_machine: Machine) -> None:
    none = Facts(cpp_compiler="g++", cpp_compiler_path=None)
    assert only(cpu_machine, none).severity == "warning"
    assert only(gpu_machine, none).severity == "note"


def test_little_memory_shared_memory_and_quiet(cpu_machine: Machine) -> None:
    assert only(replace(cpu_machine, memory_available_bytes=GIB), WELL).name == "memory_low"
    small = only(cpu_machine, Facts(shared_memory_bytes=64 * 1024**2))
    assert "64 MiB" in small.evidence
    assert check_machine(cpu_machine, Facts(shared_memory_bytes=None)) == ()
    assert only(cpu_machine, Facts(busy_cores=1.0)).name == "machine_busy"
    assert check_machine(with_cpu(cpu_machine, logical_cores=64), Facts(busy_cores=3.0)) == ()


def test_every_finding_says_what_to_do_and_survives_json(gpu_machine: Machine) -> None:
    bad = with_versions(with_cpu(gpu_machine, available_cores=1, limited_by="x"), torch="2.0", driver_cuda="12.0")
    found = check_machine(bad, Facts(torch_error="x", torch_threads=9, cpp_compiler_path=None, shared_memory_bytes=1))
    assert len(found) >= 7
    for finding in found:
        assert finding.evidence
        assert finding.remedy
        assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    assert len({f.name for f in found}) == len(found)
    assert {f.name for f in found} <= {check.__name__ for check in CHECKS}


def test_facts_of_this_machine_can_be_gathered(tmp_path: Path) -> None:
    found = gather_facts()
    assert found.torch_error is None
    assert (found.torch_threads or 0) >= 1
    for name, vendor, kind in (("gpu", "0x10de", "0x030200"), ("audio", "0x10de", "0x040300"), ("nic", "0x8086", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert count_nvidia_pci_devices(tmp_path) == 1
    assert count_nvidia_pci_devices(tmp_path / "absent") == 0
