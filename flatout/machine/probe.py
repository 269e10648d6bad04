"""What every probe of a ceiling shares: how it is timed, and how samples become a Peak."""

from __future__ import annotations

import time
from collections.abc import Callable

from flatout.machine.ceilings import Peak
from flatout.machine.device import CpuDevice, CudaDevice
from flatout.statistics import quantile
from flatout.timing import Measurement, measure

# On a GPU so many calls are queued before the wait: a wait of 10 µs would spoil work of 100 µs. Calls of such a length
# are not: the wait is nothing compared with them, and eight of them may take longer than the probe is given.
_CUDA_QUEUE = 8
_LONG_CALL_SECONDS = 0.02


def timed(function: Callable[[], object], device: str, max_seconds: float) -> Measurement:
    """Seconds per call, bounded; the device has finished when a sample ends."""
    synchronize = CpuDevice().synchronize if device == "cpu" else CudaDevice(0).synchronize
    queue = 1
    if device != "cpu" and _second_call_seconds(function, synchronize) < _LONG_CALL_SECONDS:
        queue = _CUDA_QUEUE
    calls: Callable[[], object] = function if queue == 1 else lambda: [function() for _ in range(queue)]
    least = 0.8 * max_seconds
    found = measure(calls, synchronize=synchronize, warmup=1, min_samples=5, min_seconds=least, max_seconds=max_seconds)
    seconds = tuple(sample / queue for sample in found.samples_seconds)
    return Measurement(name=found.name, samples_seconds=seconds, calls_per_sample=found.calls_per_sample * queue)


def _second_call_seconds(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """The first call loads kernels and libraries."""
    function()
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def peak_of(found: Measurement, work: float, unit: str, how: str) -> Peak:
    """Work per second, as the fastest quarter of the samples reached it.

    Disturbance only ever slows: the median on a busy machine is below what the machine can do, and the very best
    sample is luck. The spread goes from the rate that the slowest quarter missed to the best.
    """
    return Peak(
        value=work / quantile(found.samples_seconds, 0.25),
        low=work / quantile(found.samples_seconds, 0.75),
        high=work / min(found.samples_seconds),
        samples=len(found.samples_seconds),
        unit=unit,
        how=how,
    )
