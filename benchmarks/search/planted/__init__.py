"""A lever that does nothing, or takes off a known share of a step, for `benchmarks.search.planted`."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class WastesNothing(Lever):
    """What the script wastes is no longer wasted; nothing, if that is nothing."""

    name = "planted"
    plan_field = "cudnn_benchmark"  # any field will do: nothing is saved
    exactness = "bit-identical"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer(True, reason="planted")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        builtins.wastes_nothing = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            builtins.wastes_nothing = False  # type: ignore[attr-defined]


LEVERS = (WastesNothing(),)
