"""A determinism check inside its process: digests of the weights after some steps of a script, and the step time."""

from __future__ import annotations

import itertools
import sys

from flatout.machine.device import Device, Mark
from flatout.script.deterministic import make_deterministic, weights_digests
from flatout.script.device_calls import device_of
from flatout.script.trial.isolated_child import IsolatedChild
from flatout.script.trial.messages import DeterminismAnswer
from flatout.script.watch import Watch
from flatout.statistics import median


class DeterminismWatch:
    """Ends the process after its steps."""

    def __init__(self, child: IsolatedChild, *, steps: int, deterministic: bool) -> None:
        self.watch = Watch()
        self._child, self._wanted, self._deterministic = child, steps, deterministic
        self._device: Device | None = None
        self._marks: list[Mark] = []
        """Ends of steps; the script's first may not have been recognized."""
        self.watch.at_boundary.append(child.guarded(self._boundary))

    @property
    def steps(self) -> int:
        return self.watch.finder.steps

    def install(self) -> None:
        if self._deterministic:
            make_deterministic()
        self._child.on_torch([self.watch.install])

    def ended(self) -> DeterminismAnswer:
        return self._answer(ended=True)

    def _boundary(self) -> None:
        if self.watch.finder.kind is None:
            return
        if self._device is None:
            self._device = device_of(self.watch.subject)
        self._marks.append(self._device.mark())
        if self.steps >= self._wanted:
            self._child.finish(self._answer(ended=False))

    def _answer(self, *, ended: bool) -> DeterminismAnswer:
        seconds: list[float] = []
        if self._device is not None:
            self._device.synchronize()
            seconds = [self._device.elapsed_seconds(*pair) for pair in itertools.pairwise(self._marks)]
        return {
            "event": "determinism",
            "ended": ended,
            "steps": self.steps,
            "step_seconds": median(seconds) if seconds else None,
            "weights": weights_digests(self.watch.subject) if "torch" in sys.modules else [],
        }
