import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import MachineError
from flatout.machine import bandwidth_peak, gemm_peak, measured_peaks, probe, with_ceilings
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Machine
from flatout.machine.disk_peak import disk_peak, file_system_of
from flatout.machine.kept_ceilings import load_ceilings, save_ceilings
from flatout.machine.measured_peaks import measure_ceilings
from flatout.machine.nvidia_sensors import GpuReading
from flatout.machine.probe import peak_of
from flatout.timing import Measurement

RECORDED = Path(__file__).parents[1] / "recorded" / "machine_two_cores.json"
MIB = 1024**2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    return Machine.from_json(json.loads(RECORDED.read_text()))


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_peak, "_CPU_SIZES", (32, 64))
    monkeypatch.setattr(bandwidth_peak, "_CPU_ARRAY_BYTES", 16 * MIB)
    monkeypatch.setattr(bandwidth_peak, "l3_bytes", lambda: 0)
    monkeypatch.setattr(measured_peaks, "disk_peak", lambda folder, seconds: (None, "not in this test"))


@pytest.mark.usefixtures("small_probes")
def test_every_ceiling_is_measured_or_has_a_reason(machine: Machine) -> None:
    told: list[str] = []
    found = measure_ceilings(machine, quick=True, progress=told.append)
    assert {"fp32", "bf16"} <= found.gemm_flops_per_second.keys()
    for name, peak in {**found.gemm_flops_per_second, **found.rates()}.items():
        assert (peak is None) == (name in found.reasons), name
        assert peak is None or 0 < peak.low <= peak.value <= peak.high
    assert found.reasons["host_to_device_pinned_bytes_per_second"] == "no GPU that torch can use"
    assert told[0] == "gemm fp32"
    assert len(told) == 4 + 8
    assert Ceilings.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_peak_is_that_of_the_fastest_quarter() -> None:
    found = peak_of(Measurement(name="", samples_seconds=(1.0, 2.0, 2.0, 4.0, 40.0)), 8, "B/s", "8 B")
    assert (found.value, found.low, found.high, found.samples) == (4, 2, 8, 5)


def test_a_dtype_without_instructions_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def slow(size: int, dtype: str, device: str, seconds: float) -> Measurement:
        tried.append(size)
        return Measurement(name="", samples_seconds=(0.03,))

    monkeypatch.setattr(gemm_peak, "_time_product", slow)
    peak, _ = gemm_peak.gemm_peak("fp16", "cpu", 0.4)
    assert tried == [256]
    assert peak is not None
    assert peak.how == "256 x 256 x 256"


@pytest.mark.parametrize(("call_seconds", "calls_a_sample"), [(0.001, 8), (0.5, 1)])
def test_long_calls_are_not_queued_on_a_gpu(
    call_seconds: float, calls_a_sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoGpu:
        def __init__(self, index: int) -> None: ...

        def synchronize(self) -> None: ...

    def measured(function: Callable[[], object], **limits: object) -> Measurement:
        function()
        return Measurement(name="", samples_seconds=(8.0,))

    calls: list[None] = []
    monkeypatch.setattr(probe, "CudaDevice", NoGpu)
    monkeypatch.setattr(probe, "_second_call_seconds", lambda function, synchronize: call_seconds)
    monkeypatch.setattr(probe, "measure", measured)
    found = probe.timed(lambda: calls.append(None), "cuda", 0.01)
    assert (len(calls), found.samples_seconds) == (calls_a_sample, (8.0 / calls_a_sample,))


def test_a_gpu_is_asked_for_a_small_product_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def slow(size: int, dtype: str, device: str, seconds: float) -> Measurement:
        tried.append(size)
        return Measurement(name="", samples_seconds=(0.03,))

    monkeypatch.setattr(gemm_peak, "_time_product", slow)
    gemm_peak.gemm_peak("fp16", "cuda", 0.4)
    assert tried == [256]


def test_a_dtype_that_torch_refuses_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Measurement:
        raise RuntimeError('"_int_mm" not implemented\nand a stack')

    monkeypatch.setattr(gemm_peak, "_time_product", refuse)
    assert gemm_peak.gemm_peak("int8", "cpu", 0.4) == (None, '"_int_mm" not implemented')


def test_ceilings_are_kept_by_machine_and_torch(machine: Machine) -> None:
    assert load_ceilings(machine) is None
    assert machine.ceilings is not None
    path = save_ceilings(machine, machine.ceilings)
    assert load_ceilings(machine) == machine.ceilings
    assert load_ceilings(replace(machine, fingerprint="another")) is None
    assert load_ceilings(replace(machine, versions=replace(machine.versions, torch="2.12"))) is None
    assert list(path.parent.iterdir()) == [path]  # nothing temporary is left


def test_a_busy_minute_lowers_nothing(machine: Machine) -> None:
    assert machine.ceilings is not None
    quiet = replace(machine.ceilings, contended=False)
    fp32, int8 = quiet.gemm_flops_per_second["fp32"], quiet.gemm_flops_per_second["int8"]
    gemm = {"fp32": replace(fp32, value=1.0), "int8": replace(int8, value=9e15)}
    busy = replace(quiet, contended=True, gemm_flops_per_second=gemm, disk_read_bytes_per_second=None)
    save_ceilings(machine, quiet)
    save_ceilings(machine, busy)
    kept = load_ceilings(machine)
    assert kept is not None
    assert kept.gemm_flops_per_second == {**quiet.gemm_flops_per_second, "int8": gemm["int8"]}
    assert kept.disk_read_bytes_per_second == quiet.disk_read_bytes_per_second
    assert kept.contended is False
    save_ceilings(machine, replace(busy, contended=False))  # a quiet one replaces all
    assert load_ceilings(machine) == replace(busy, contended=False)


def test_fewer_threads_lower_nothing(machine: Machine) -> None:
    assert machine.ceilings is not None
    before = replace(machine.ceilings, contended=False, threads=4)
    fp32 = before.gemm_flops_per_second["fp32"]
    save_ceilings(machine, before)
    save_ceilings(machine, replace(before, threads=1, gemm_flops_per_second={"fp32": replace(fp32, value=1.0)}))
    assert load_ceilings(machine) == before


def test_what_was_measured_in_a_busy_minute_is_measured_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.ceilings is not None
    quiet = replace(machine.ceilings, contended=False)
    measured: list[Ceilings] = []

    def measure(*_: object, **__: object) -> Ceilings:
        measured.append(quiet)
        return quiet

    monkeypatch.setattr(with_ceilings, "detect", lambda: machine.with_ceilings(load_ceilings(machine)))
    monkeypatch.setattr(with_ceilings, "measure_ceilings", measure)
    save_ceilings(machine, replace(quiet, contended=True))
    assert with_ceilings.machine_with_ceilings(lambda _: None).ceilings == quiet
    assert with_ceilings.machine_with_ceilings(lambda _: None).ceilings == quiet
    assert len(measured) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "3", '{"device": "cpu"}', '{"gemm_flops_per_second": 1}', "\x00"])
def test_a_damaged_cache_is_ignored(machine: Machine, damage: str) -> None:
    assert machine.ceilings is not None
    save_ceilings(machine, machine.ceilings).write_text(damage)
    assert load_ceilings(machine) is None


def test_a_cache_that_cannot_be_written_is_a_clear_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    assert machine.ceilings is not None
    with pytest.raises(MachineError, match="FLATOUT_CACHE_DIR"):
        save_ceilings(machine, machine.ceilings)


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    peak, reason = disk_peak(tmp_path, 0.01, size_bytes=2 * MIB)
    assert peak is not None or "in memory" in reason
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert disk_peak(tmp_path / "file" / "x", 0.01)[0] is None


def test_the_file_system_is_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\nc /elsewhere xfs rw 0 0\n")
    assert file_system_of(tmp_path / "x", mounts) == "tmpfs"
    assert file_system_of(Path("/"), mounts) == "ext4"
    assert file_system_of(Path("/"), tmp_path / "absent") is None


def test_an_array_is_larger_than_all_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("393216K\n")
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
    (tmp_path / "cpufreq").mkdir()
    assert bandwidth_peak.l3_bytes(tmp_path) == 768 * MIB
    assert bandwidth_peak.l3_bytes(tmp_path / "absent") == 0
    monkeypatch.setattr(bandwidth_peak, "l3_bytes", lambda: 768 * MIB)
    assert bandwidth_peak.array_bytes("cpu", 64 * 1024 * MIB) == 3 * 1024 * MIB


def test_peaks_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_peak, "l3_bytes", lambda: 32 * MIB)
    assert bandwidth_peak.array_bytes("cpu", 64 * 1024 * MIB) == 512 * MIB
    assert bandwidth_peak.array_bytes("cpu", 800 * MIB) == 100 * MIB
    assert bandwidth_peak.array_bytes("cuda", None) == 2048 * MIB


def test_a_peak_survives_json() -> None:
    peak = Peak(value=2.0, low=1.0, high=3.0, samples=4, unit="B/s", how="x")
    assert Peak.from_json(peak.to_json()) == peak


def test_ceilings_of_one_device_are_not_those_of_another(machine: Machine) -> None:
    assert machine.ceilings is not None
    of_cpu = machine.ceilings
    of_gpu = replace(of_cpu, device="cuda:0", memory_read_bytes_per_second=None)
    assert {save_ceilings(machine, of_cpu), save_ceilings(machine, of_gpu)} == set(
        save_ceilings(machine, of_cpu).parent.iterdir()
    )
    assert load_ceilings(machine, "cpu") == of_cpu
    assert load_ceilings(machine, "cuda:0") == of_gpu
    assert load_ceilings(machine, "cuda:1") is None
    assert load_ceilings(machine) == of_cpu  # where work should run on this machine


@pytest.mark.parametrize(("share", "busy"), [(None, False), (0.0, False), (0.6, True)])
def test_a_gpu_that_others_use_gives_contended_ceilings(
    share: float | None, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def read(self) -> tuple[GpuReading, ...]:
            other = GpuReading(clock_seconds=0.0, index=0, name="other", uuid="GPU-other", busy_share=1.0)
            return other, GpuReading(clock_seconds=0.0, index=1, name="own", uuid="GPU-own", busy_share=share)

        def close(self) -> None:
            pass

    monkeypatch.setattr(measured_peaks, "NvidiaSensors", Driver)
    assert measured_peaks._gpu_is_busy("GPU-own") is busy


def test_mounts_may_have_any_name(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    place = tmp_path / "my disk"
    escaped = str(place).replace(" ", "\\040")
    mounts.write_bytes(f"/dev/a / ext4 rw 0 0\n/dev/b {escaped} xfs rw 0 0\n".encode() + b"/dev/c /m\xe9 vfat rw 0 0\n")
    assert file_system_of(place / "x", mounts) == "xfs"
    assert file_system_of(tmp_path, mounts) == "ext4"
