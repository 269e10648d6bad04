"""`zero_grad(set_to_none=False)` frees gradients instead of filling them with zeros: backward need not add to zeros.

For the script nothing changes. A freed gradient becomes a tensor of zeros again as soon as anything reads `.grad`: an
optimizer (which skips parameters without a gradient, but moves those with a zero gradient if it has momentum or decay),
a clip, a hook, the script itself. One that backward left in shared memory is copied, as adding to zeros would have
done. 0 + -0 is 0, and a fresh gradient may hold -0: that is why it claims only 'rounding'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.machine.process_memory import page_fault_seconds
from flatout.replaced import replaced

PASSES_OVER_GRADIENTS = 4
"""Filling them with zeros is one, adding to them three: two reads and one write."""
OPERATIONS_A_GRADIENT = 2
LOOK_SECONDS = 3e-6
"""To check what holds a gradient, before it is freed and when there is a new one."""
BYTES_OF_FP32, PAGE_BYTES = 4, 4096


class GradientsToNone(Lever):
    """Free gradients where a script calls `zero_grad(set_to_none=False)`, so that backward need not add to zeros.

    A freed gradient reads as zeros, so weight decay and momentum still move parameters that got no gradient. A
    gradient that is held elsewhere is set to zero as written. Only the sign of a zero may differ.
    """

    name = "gradients set to None"
    plan_field = "zero_grad"
    names_value = False

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        if observed.gradients_zeroed is None:
            return Saving(expected=0.0, least=0.0, most=0.0, why="no call of zero_grad was seen")
        gained, step_seconds = _zeroing_seconds(machine, observed), observed.step_seconds
        if gained is None or not step_seconds:
            return Saving(expected=0.01, least=-0.05, most=0.3)
        lost, at_most = _freeing_seconds(observed)
        return Saving(
            expected=(gained - lost) / step_seconds,
            least=-2 * at_most / step_seconds,
            most=min(0.8, 2 * gained / step_seconds),
            why=f"zeros and additions to them take {gained / step_seconds:.1%} of a step",
        )

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.gradients_zeroed is False:
            return refuse("zero_grad frees the gradients already")
        if not observed.optimizers:
            return refuse("the script has no optimizer object")
        if observed.compiled_in_script:
            return refuse("the script compiles, and compiled code reads gradients without going through Python")
        if observed.differentiates_twice:
            return refuse(observed.differentiates_twice)
        if observed.captures_graphs:
            return refuse(f"{observed.captures_graphs}: a captured graph writes to the gradients' memory")
        return offer("none", reason="the script's zero_grad fills gradients with zeros, and backward adds to them")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch

        from flatout.levers.freed_gradients import FreedGradients
        from flatout.levers.grad_attribute import zero_grad_replaced

        freed = FreedGradients(subject.reporter(self.name))
        with (
            freed.read_as_zeros(),
            zero_grad_replaced(freed.zero_grad),
            replaced(torch.autograd, "backward", freed.after_backward),
        ):
            yield


def _zeroing_seconds(machine: Machine, observed: Observed) -> float | None:
    """The time to fill the gradients and to add to them, at the rates of this machine; None: not measured."""
    rates = observed.ceilings(machine)
    if rates is None or rates.memory_copy_bytes_per_second is None or rates.launches_per_second is None:
        return None
    memory = PASSES_OVER_GRADIENTS * _gradient_bytes(observed) / rates.memory_copy_bytes_per_second.value
    return memory + OPERATIONS_A_GRADIENT * _gradients(observed) / rates.launches_per_second.value


def _freeing_seconds(observed: Observed) -> tuple[float, float]:
    """(the expected cost of freeing gradients and allocating new ones, the highest cost).

    On a CPU, memory returned to the system has to be faulted in again page by page. A process whose allocator keeps
    freed memory has almost no page faults.
    """
    looks = LOOK_SECONDS * _gradients(observed)
    if observed.device != "cpu":
        return looks, looks
    pages = _gradient_bytes(observed) / PAGE_BYTES
    faults = pages if observed.page_faults_per_step is None else min(pages, observed.page_faults_per_step)
    return looks + faults * page_fault_seconds(), looks + pages * page_fault_seconds()


def _gradient_bytes(observed: Observed) -> int:
    return BYTES_OF_FP32 * sum(one.parameters for one in observed.modules)


def _gradients(observed: Observed) -> int:
    return sum(one.parameters for one in observed.optimizers)
