"""Flush denormal numbers to zero: saturated softmaxes and decayed moments contain many of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.denormals import flush_denormals

DOUBT = 3.0
"""A factor on the predicted cost: operations differ in how much denormal numbers slow them."""


class FlushDenormals(Lever):
    """Treat values below 1.2e-38 as 0 in every compute thread: CPUs compute with denormal numbers slowly.

    Saturated softmaxes and decayed moments contain many of them.
    """

    name = "flush denormals"
    plan_field = "flush_denormals"
    of_process = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.denormal_share
        if share is None:
            return Saving(expected=0.01, least=-0.02, most=0.5)
        if not share:
            return Saving(expected=0.0, least=-0.02, most=0.0, why="a step has no denormal numbers")
        slowdown = observed.denormal_slowdown or 1.0
        added = share * (slowdown - 1)  # relative to a step without denormals
        most = DOUBT * added / (1 + DOUBT * added)
        why = f"{share:.2g} of a step's values are denormal, which take x{slowdown:.1f} here"
        return Saving(expected=added / (1 + added), least=-0.02, most=most, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the model is on a GPU, which is not slowed by denormals")
        if observed.flush_denormals:
            return refuse("they are already flushed")
        return offer(True, reason="some CPUs compute with denormals many times slower")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        return flush_denormals()
