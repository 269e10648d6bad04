"""The device seam: everything that differs between a CPU, a GPU, a scripted one and a recorded one.

An accelerator works behind the program, so time is read from marks that the device itself passes: `mark()` costs no
wait, and `elapsed_seconds` waits only for its two marks. On the CPU a mark is a reading of the clock. FakeDevice runs
on a clock that the test moves; ReplayedDevice gives the answers that a real device once gave.

>>> device = CpuDevice()
>>> start = device.mark(); end = device.mark()
>>> device.elapsed_seconds(start, end) >= 0
True
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from flatout.errors import MachineError, UsageError
from flatout.machine.description import Machine


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point in a device's work: host seconds, or the device's own event."""

    seconds: float | None = None
    event: Any = None


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
        """A mark behind the work queued so far; no wait."""

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """The device's own time between two marks; waits for the later one."""

    def captures(self) -> bool:
        """Is work only recorded now, for a CUDA graph? Nothing runs then, and to wait would break the recording off."""

    def memory_allocated_bytes(self) -> int | None:
        """Held now by tensors (CUDA) or resident in the process (CPU); None: unknown."""

    def memory_peak_bytes(self) -> int | None:
        """The most that was held since `reset_peak`, or since the start where that cannot be reset; None: unknown."""

    def reset_peak(self) -> None:
        """Start a new peak, where the device can."""


def device_for(machine: Machine) -> Device:
    """The device on which work should run on this machine: its first usable GPU, else the CPU."""
    return CudaDevice(0) if machine.usable_gpus else CpuDevice()


def placement(name: str) -> Any:
    """The torch.device of this name, where tensors are to be put. Raises MachineError where there is no such GPU.

    This is where a run that moves a script to the GPU first touches CUDA.
    """
    import torch

    return torch.device(CudaDevice(0).name if name == "cuda" else name)


def device_name(device: Any) -> str:
    """A torch.device as ceilings are kept by: 'cpu', 'cuda:0'; CUDA without a number is the current device."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


class CpuDevice:
    """The processor: work is done when the call returns, so a mark is the clock."""

    kind = "cpu"
    name = "cpu"

    def synchronize(self) -> None:
        """Nothing runs behind the program."""

    def mark(self) -> Mark:
        return Mark(seconds=time.perf_counter())

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        assert start.seconds is not None, "a mark of another device"
        assert end.seconds is not None, "a mark of another device"
        return end.seconds - start.seconds

    def captures(self) -> bool:
        return False

    def memory_allocated_bytes(self) -> int | None:
        return int(psutil.Process().memory_info().rss)

    def memory_peak_bytes(self) -> int | None:
        """The kernel's high-water mark of resident memory; None where /proc does not tell."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024 if peaks else None

    def reset_peak(self) -> None:
        """Ask the kernel to start its high-water mark anew; where it refuses, the peak stays the process's own."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return


class CudaDevice:
    """One CUDA GPU, timed by its own events. The first question starts CUDA in this process."""

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
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event)) / 1000  # CUDA counts milliseconds

    def captures(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def memory_allocated_bytes(self) -> int | None:
        return int(self._cuda.memory_allocated(self._index))

    def memory_peak_bytes(self) -> int | None:
        return int(self._cuda.max_memory_allocated(self._index))

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)


class FakeDevice:
    """A device on a clock that the test moves: `work(seconds)` is queued, `synchronize` lets it happen."""

    def __init__(self, *, kind: str = "cuda", name: str = "cuda:0") -> None:
        self.kind, self.name = kind, name
        self.now_seconds = 0.0
        self.synchronizations = 0
        self.is_capturing = False
        self._queued_seconds = 0.0
        self._allocated_bytes = self._peak_bytes = 0

    def work(self, seconds: float) -> None:
        """Queue that much work; the host goes on at once."""
        self._queued_seconds += seconds

    def allocate(self, count_bytes: int) -> None:
        """Hold more memory (or less, if negative)."""
        self._allocated_bytes += count_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def clock(self) -> float:
        """The host's clock, for `timing.measure(clock=...)`."""
        return self.now_seconds

    def synchronize(self) -> None:
        self.synchronizations += 1
        self.now_seconds, self._queued_seconds = self.now_seconds + self._queued_seconds, 0.0

    def mark(self) -> Mark:
        return Mark(seconds=self.now_seconds + self._queued_seconds)

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        return (end.seconds or 0.0) - (start.seconds or 0.0)

    def captures(self) -> bool:
        return self.is_capturing

    def memory_allocated_bytes(self) -> int | None:
        return self._allocated_bytes

    def memory_peak_bytes(self) -> int | None:
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._allocated_bytes


class RecordingDevice:
    """Passes every question on to a real device and keeps the answers, for a ReplayedDevice."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kind, self.name = device.kind, device.name
        self._answers: list[dict[str, Any]] = []

    def synchronize(self) -> None:
        self._device.synchronize()

    def mark(self) -> Mark:
        return self._device.mark()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        return float(self._keep("elapsed_seconds", self._device.elapsed_seconds(start, end)))

    def captures(self) -> bool:
        return self._device.captures()

    def memory_allocated_bytes(self) -> int | None:
        return self._keep("memory_allocated_bytes", self._device.memory_allocated_bytes())

    def memory_peak_bytes(self) -> int | None:
        return self._keep("memory_peak_bytes", self._device.memory_peak_bytes())

    def reset_peak(self) -> None:
        self._device.reset_peak()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "answers": self._answers}

    def _keep(self, question: str, answer: Any) -> Any:
        self._answers.append({"question": question, "answer": answer})
        return answer


class ReplayedDevice:
    """Gives the recorded answers in their order; a question that was not asked then is an error, not a guess."""

    def __init__(self, log: Mapping[str, Any]) -> None:
        self.kind, self.name = str(log["kind"]), str(log["name"])
        self._answers: Sequence[Mapping[str, Any]] = log["answers"]
        self._next = 0

    @classmethod
    def from_file(cls, path: Path) -> ReplayedDevice:
        return cls(json.loads(path.read_text()))

    def synchronize(self) -> None:
        """The work was done when the log was written."""

    def mark(self) -> Mark:
        return Mark()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        return float(self._answer("elapsed_seconds"))

    def captures(self) -> bool:
        return False

    def memory_allocated_bytes(self) -> int | None:
        return self._answer("memory_allocated_bytes")

    def memory_peak_bytes(self) -> int | None:
        return self._answer("memory_peak_bytes")

    def reset_peak(self) -> None:
        """Peaks are in the log."""

    def _answer(self, question: str) -> Any:
        recorded = self._answers[self._next]["question"] if self._next < len(self._answers) else "the end of the log"
        if recorded != question:
            raise UsageError(f"asked for {question}", limit=f"the log has {recorded}", remedy="record it again")
        self._next += 1
        return self._answers[self._next - 1]["answer"]
