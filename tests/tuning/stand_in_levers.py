"""The lever that moves a script, with the stand-in accelerator in the GPU's place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.levers.fused_optimizer import FusedOptimizer
from flatout.levers.lever import Verdict, offer
from flatout.levers.moved_to_device import MovedToDevice
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class MovedToStandIn(MovedToDevice):
    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer("cuda", reason="a stand-in for it")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        sys.path.insert(0, str(Path(__file__).parents[1] / "levers" / "standins"))
        import accelerator

        accelerator.load()
        with super().apply(subject, accelerator.NAME):
            yield


LEVERS = (MovedToStandIn(), FusedOptimizer())
"""The second sees the device that the first has left the script on."""
