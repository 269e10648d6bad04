"""On a real GPU, where there is one."""

import os

import pytest
import torch

from flatout.machine.detect import detect
from flatout.machine.device import CudaDevice
from flatout.machine.measured_peaks import measure_ceilings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_marks_are_the_devices_own_time() -> None:
    device = CudaDevice(0)
    a = torch.randn(4096, 4096, device="cuda")
    device.reset_peak()
    before = torch.cuda.memory_allocated(0)
    start = device.mark()
    product = a @ a
    end = device.mark()
    assert device.elapsed_seconds(start, end) > 0
    assert (device.memory_peak_bytes() or 0) >= before + product.nbytes
    device.synchronize()


def test_the_driver_and_torch_speak_of_the_same_gpu() -> None:
    (first, *_) = detect().usable_gpus
    properties = torch.cuda.get_device_properties(0)
    assert first.name == properties.name
    assert first.compute_capability == (properties.major, properties.minor)
    assert first.multiprocessors in (properties.multi_processor_count, None)  # None: the driver does not tell


@pytest.mark.skipif("STAND_IN" in os.environ, reason="the stand-in has no speed of its own")
def test_ceilings_of_a_gpu_are_whole() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    found = measure_ceilings(detect(), quick=True)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert {"fp32", "bf16", "fp16"} <= found.gemm_flops_per_second.keys()
    transfers = [peak for name, peak in found.rates().items() if "host" in name]
    assert all(peak is not None and peak.low <= peak.value <= peak.high for peak in transfers)
