"""A progress bar for `fit`: rate, time left, loss, memory, share of the machine's measured ceiling.

It reads the loss at most twice a second, because that waits for the device. Without a terminal it shows nothing.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flatout.flops import count_step
from flatout.machine.process_memory import resident_bytes
from flatout.terminal import is_terminal
from flatout.units import format_bytes

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID
    from torch import Tensor
REFRESH_SECONDS = 0.5
COUNTED_STEP = 3
"""The step whose operations are counted, which slows it down."""


class Progress:
    """Use as a context; call `step_begins` before and `step_ended` after each step."""

    def __init__(self, total_steps: int | None, done: int, *, shown: bool | None = None) -> None:
        self.shown = is_terminal(sys.stderr) if shown is None else shown
        self._total, self._done, self._steps = total_steps, done, 0
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._counting: Callable[[], float] | None = None
        self._flops: float | None = None
        self._ceiling: tuple[float, str] | None = None
        self._samples = 0
        self._drawn_at, self._drawn_steps, self._drawn_samples = time.perf_counter(), 0, 0

    def __enter__(self) -> Progress:
        if not self.shown:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._bar.add_task("", total=self._total, completed=self._done)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._counting is not None:
            self._counting()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done + self._steps)
            self._bar.stop()

    def step_begins(self) -> None:
        """Just before a step's forward pass."""
        if self.shown and self._ceiling is not None and self._steps == COUNTED_STEP and self._counting is None:
            self._counting = count_step()

    def step_ended(self, loss: Tensor, samples: int) -> None:
        """`loss` is a device tensor; it is read only when something is drawn."""
        if not self.shown:
            return
        self._steps, self._samples = self._steps + 1, self._samples + samples
        if self._steps == 1:
            self._ceiling = _ceiling(loss.device)
        if self._counting is not None:
            self._flops, self._counting = self._counting() or None, None
        now = time.perf_counter()
        if now - self._drawn_at < REFRESH_SECONDS:
            return
        value = float(loss)
        seconds = time.perf_counter() - self._drawn_at
        steps, samples = self._steps - self._drawn_steps, self._samples - self._drawn_samples
        self._drawn_at, self._drawn_steps, self._drawn_samples = time.perf_counter(), self._steps, self._samples
        text = self._text(value, steps / seconds, samples / seconds, loss.device)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done + self._steps, description=text)

    def say_figures(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Print an epoch's figures above the bar."""
        if figures and self._bar is not None:
            text = f"epoch {epoch}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            self._bar.console.print(text, highlight=False, markup=False)

    def _text(self, loss: float, rate: float, samples_per_second: float, device: torch.device) -> str:
        parts = [f"loss {loss:.4g}", f"{samples_per_second:,.0f} samples/s"]
        parts.append(format_bytes(_memory_bytes(device)))
        if self._flops is not None and self._ceiling is not None:
            ceiling, dtype = self._ceiling
            parts.append(f"{self._flops * rate / ceiling:.1%} of the {dtype} ceiling")
        return " · ".join(parts)


def _ceiling(device: torch.device) -> tuple[float, str] | None:
    """(FLOP/s, dtype) of the fastest matrix product on that device, if it was measured before."""
    from flatout.machine.detect import detect
    from flatout.machine.device import device_name
    from flatout.machine.kept_ceilings import load_ceilings

    ceilings = load_ceilings(detect(), device_name(device))
    best = ceilings.best_gemm() if ceilings is not None else None
    return None if best is None else (best[1].value, best[0])


def _memory_bytes(device: torch.device) -> int:
    """What torch's allocator holds of a GPU; on the CPU the resident memory of this process."""
    torch = sys.modules["torch"]
    with contextlib.suppress(RuntimeError):
        if device.type == "cuda":
            return int(torch.cuda.memory_reserved(device))
    return resident_bytes()
