import pytest
import torch

from flatout.errors import MachineError
from flatout.machine.device import CpuDevice, CudaDevice, wait_for_gpus
from flatout.machine.process_memory import resident_bytes
from flatout.timing import measure
from flatout.torch_private import tensors
from tests.fake_device import FakeDevice


def test_the_cpu_is_a_device() -> None:
    device = CpuDevice()
    start, end = device.mark(), device.mark()
    device.synchronize()
    assert device.elapsed_seconds(start, end) >= 0
    device.reset_peak()
    peak = device.memory_peak_bytes()
    assert peak is None or peak >= 0.9 * resident_bytes()  # the kernel counts in batches


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


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(MachineError, match="no CUDA device 99"):
        CudaDevice(99)
