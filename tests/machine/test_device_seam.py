import json
from pathlib import Path

import pytest
import torch

from flatout.errors import MachineError, UsageError
from flatout.machine.device import (
    CpuDevice,
    CudaDevice,
    Device,
    FakeDevice,
    RecordingDevice,
    ReplayedDevice,
    wait_for_gpus,
)
from flatout.timing import measure
from flatout.torch_private import tensors

RECORDED = Path(__file__).parents[1] / "recorded"


def use(device: Device) -> tuple[float, int | None, int | None]:
    start = device.mark()
    end = device.mark()
    device.synchronize()
    return device.elapsed_seconds(start, end), device.memory_allocated_bytes(), device.memory_peak_bytes()


def test_the_cpu_is_a_device() -> None:
    device = CpuDevice()
    elapsed, allocated, peak = use(device)
    assert elapsed >= 0
    assert allocated is not None
    assert peak is None or peak >= 0.9 * allocated  # the kernel counts in batches
    device.reset_peak()


def test_every_gpu_in_use_is_waited_for_and_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(tensors, "has_cuda_context", lambda index: index != 1)
    wait_for_gpus()
    assert waited == [0, 2]


def test_a_fake_device_runs_behind_the_program() -> None:
    device = FakeDevice()
    start = device.mark()
    device.work(0.5)
    assert device.clock() == 0.0
    assert device.elapsed_seconds(start, device.mark()) == 0.5
    found = measure(
        lambda: device.work(2.0), synchronize=device.synchronize, clock=device.clock, min_seconds=0, max_seconds=99
    )
    assert set(found.samples_seconds) == {2.0}
    device.allocate(100)
    device.allocate(-60)
    assert (device.memory_allocated_bytes(), device.memory_peak_bytes()) == (40, 100)
    device.reset_peak()
    assert device.memory_peak_bytes() == 40


def test_a_recorded_device_is_replayed() -> None:
    fake = FakeDevice()
    fake.allocate(7)
    recording = RecordingDevice(fake)
    seen = use(recording)
    assert use(ReplayedDevice(json.loads(json.dumps(recording.to_json())))) == seen
    assert use(ReplayedDevice.from_file(RECORDED / "device_log.json")) == (0.0125, 1048576, 4194304)


def test_a_question_that_was_not_recorded_is_an_error() -> None:
    device = ReplayedDevice({"kind": "cpu", "name": "cpu", "answers": [{"question": "x", "answer": 1}]})
    with pytest.raises(UsageError, match="the log has x"):
        device.memory_peak_bytes()
    with pytest.raises(UsageError, match="end of the log"):
        ReplayedDevice({"kind": "cpu", "name": "cpu", "answers": []}).memory_peak_bytes()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(MachineError, match="no CUDA device 99"):
        CudaDevice(99)
