"""How many threads share one operation on the CPU: small tensors lose more by handing work over than they gain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class Threads(Lever):
    """torch.set_num_threads."""

    name = "threads"
    plan_field = "threads"
    exactness = "rounding"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the script trains on a GPU")
        if observed.threads_set_by_script:
            return refuse(f"the script sets {observed.threads} threads itself")
        available = machine.cpu.available_cores
        physical = machine.cpu.physical_cores or available
        values = {1, available // 4, available // 2, min(physical, available), available} - {0, observed.threads}
        if not values:
            return refuse("there is one core")
        return offer(*sorted(values, reverse=True), reason=f"torch uses {observed.threads} of {available} cores")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(value)
        try:
            yield
        finally:
            torch.set_num_threads(before)
