"""The device seam: everything that differs between a CPU and a GPU.

An accelerator works asynchronously, so time is read from marks that the device itself passes: `mark()` costs no
wait, and `elapsed_seconds` waits only for its two marks. On the CPU a mark is a reading of the clock.

>>> device = CpuDevice()
>>> start = device.mark(); end = device.mark()
>>> device.elapsed_seconds(start, end) >= 0
True
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flatout.errors import MachineError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point in a device's work: host seconds, or the device's own event."""

    seconds: float | None = None
    event: torch.cuda.Event | None = None


class Device(Protocol):
    """What Flatout asks of a device."""

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def name(self) -> str:
        """What torch calls it: "cpu", "cuda:0"."""

    def synchronize(self) -> None:
        """Wait until all work that was queued is done."""

    def mark(self) -> Mark:
        """A mark after the work queued so far; does not wait."""

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """The device's own time between two marks; waits for the later one."""

    def captures(self) -> bool:
        """Is a CUDA graph being captured? Then nothing runs yet, and waiting would end the capture with an error."""

    def memory_peak_bytes(self) -> int | None:
        """The most held since `reset_peak`, or since the start where that cannot be reset: by tensors (CUDA), or
        resident in the process (CPU). None: unknown."""

    def reset_peak(self) -> None:
        """Start a new peak, where the device can."""


def placement(name: str) -> torch.device:
    """The torch.device of this name, where tensors are to be put. Raises MachineError where there is no such GPU.

    This is where a run that moves a script to the GPU first touches CUDA.
    """
    import torch

    return torch.device(CudaDevice(0).name if name == "cuda" else name)


def device_name(device: torch.device) -> str:
    """The name under which ceilings are kept: 'cpu', 'cuda:0'; CUDA without a number is the current device."""
    return f"cuda:{device_index(device)}" if device.type == "cuda" else device.type


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of one without a number, that of the current device, which starts CUDA."""
    if device.index is not None:
        return device.index
    import torch

    return torch.cuda.current_device()


def wait_for_gpus() -> None:
    """Until the work of every GPU is done that this process uses. Starts CUDA on none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    from flatout.torch_private.tensors import has_cuda_context

    for index in range(torch.cuda.device_count()):
        if has_cuda_context(index):
            torch.cuda.synchronize(index)


class CpuDevice:
    """The processor: work is done when the call returns, so a mark is a reading of the clock."""

    kind = "cpu"
    name = "cpu"

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""

    def mark(self) -> Mark:
        return Mark(seconds=time.perf_counter())

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        assert start.seconds is not None, "a mark of another device"
        assert end.seconds is not None, "a mark of another device"
        return end.seconds - start.seconds

    def captures(self) -> bool:
        return False

    def memory_peak_bytes(self) -> int | None:
        """The kernel's high-water mark of resident memory; None without /proc."""
        try:
            status = Path("/proc/self/status").read_text(errors="replace")
        except OSError:
            return None
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024 if peaks else None

    def reset_peak(self) -> None:
        """Reset the kernel's high-water mark; where it refuses, the peak remains that since the process started."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return


class CudaDevice:
    """One CUDA GPU, timed by its own events. The first query starts CUDA in this process."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        import torch

        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise MachineError(
                f"no CUDA device {index}",
                limit=f"torch sees {torch.cuda.device_count()}",
                remedy="see what is wrong with: flatout check",
            )
        self._cuda = torch.cuda
        self._index = index

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    def synchronize(self) -> None:
        self._cuda.synchronize(self._index)

    def mark(self) -> Mark:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return Mark(event=event)

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        assert start.event is not None, "a mark of another device"
        assert end.event is not None, "a mark of another device"
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event)) / 1000  # CUDA counts milliseconds

    def captures(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def memory_peak_bytes(self) -> int | None:
        return int(self._cuda.max_memory_allocated(self._index))

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)
