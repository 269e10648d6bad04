"""Flush denormal numbers to zero: saturated softmaxes and decayed moments are full of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.denormals import flush_denormals


class FlushDenormals(Lever):
    """Values below 1.2e-38 become 0 in every compute thread."""

    name = "denormals flushed"
    plan_field = "flush_denormals"
    exactness = "rounding"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the script trains on a GPU, which is not slowed by denormals")
        if observed.flush_denormals:
            return refuse("the script flushes them already")
        return offer(True, reason="some CPUs compute with denormals many times slower")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        return flush_denormals()
