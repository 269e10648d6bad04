"""How many threads share one operation on the CPU."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import settings_changed
from flatout.units import format_seconds

HANDOVER_SECONDS = 10e-6
"""The most that handing a part of one operation to another thread costs, including the wait for it."""

EXPECTED_SHARE_A_THREAD = 0.015
"""Of the most that can be saved. torch does not split small operations in the first place: in fourteen trials on five
public scripts with two threads, two were faster with one."""


class Threads(Lever):
    """The number of threads that share one operation on the CPU (`torch.set_num_threads`).

    With small tensors, handing work to other threads costs more than it saves.
    """

    name = "threads"
    plan_field = "threads"
    recompiles = True
    of_process = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        if observed.threads > machine.cpu.available_cores or not observed.operations_per_step:
            return Saving(expected=0.1, least=-1.0, most=0.9)
        one = (observed.step_seconds or 0.0) / observed.operations_per_step
        most = min(0.9, observed.threads * HANDOVER_SECONDS / max(one, 1e-9))
        share = min(0.2, EXPECTED_SHARE_A_THREAD * observed.threads)
        slower = (1 - most) * observed.product_share(machine)  # with half the threads, products take twice as long
        why = f"an operation takes {format_seconds(one)}"
        return Saving(expected=share * most - slower, least=-1.0, most=most, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the model is on a GPU")
        if observed.threads_set_by_script:
            return refuse(f"it is already set to {observed.threads}")
        available = machine.cpu.available_cores
        physical = machine.cpu.physical_cores or available
        values = {1, available // 4, available // 2, min(physical, available), available} - {0, observed.threads}
        if not values:
            return refuse("there is one core")
        return offer(*sorted(values, reverse=True), reason=f"torch uses {observed.threads} of {available} cores")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        return settings_changed(_here(), threads=int(value))


class _Torch:
    """Its number of threads as an attribute: contexts of several steps may overlap, and end in any order."""

    @property
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    @threads.setter
    def threads(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)


_of_thread = threading.local()


def _here() -> _Torch:
    """That of the calling thread: each has a number of its own."""
    found: _Torch = vars(_of_thread).setdefault("torch", _Torch())
    return found
