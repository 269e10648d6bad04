"""Updates in backward for an unmodified script: each weight is updated as soon as its gradient is ready, and the
gradient is freed, so that the gradients are never all held at once.

    loss.backward()         # updates by the script's own optimizer, one weight at a time
    optimizer.step()        # finds no gradient left

The weights are bit-identical if nothing can look at weights or gradients in between. So it acts only on backward passes
that the source shows to be followed directly by the step (`flatout.levers.call_site`), with gradients freed before, and
on optimizers that update each parameter independently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flatout.levers.autocast import Autocast
from flatout.levers.lever import COSTS_TIME, Lever, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class OptimizerInBackward(Lever):
    """Update each weight as soon as its gradient is ready, and free the gradient.

    Only where the source shows `optimizer.step()` right after `backward()` with nothing in between that could look
    at weights or gradients. Every other pass runs as written, and reading a freed gradient raises an error. It saves
    memory, so `flatout tune` tries it only with `--fit`.
    """

    name = "updates in backward"
    plan_field = "optimizer_in_backward"
    usual_saving = COSTS_TIME

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("there is no optimizer object")
        for reason in (observed.differentiates_twice, observed.captures_graphs):
            if reason:
                return refuse(reason)
        if observed.compiled_in_script:
            return refuse("torch.compile is already used, and compiled code produces all gradients at once")
        if observed.scaler_in_script or "fp16" in Autocast().applies(machine, observed).values:
            return refuse("fp16 scales the loss, and needs all gradients before the first update")
        if observed.gradients_zeroed:
            return refuse("zero_grad fills gradients with zeros here, and does not free them")
        unknown = "what happens between backward and the optimizer's step was not examined"
        for obstacle in (observed.reads_gradients, observed.update_obstacle):
            if obstacle is None or obstacle:
                return refuse(unknown if obstacle is None else obstacle)
        return offer(True, reason="saves memory: gradients are never all held at once")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        from flatout.levers.grad_attribute import zero_grad_replaced
        from flatout.levers.updating_passes import ConsumedGradients, UpdatingPasses

        guards = contextlib.ExitStack()
        consumed = ConsumedGradients(guards.close)
        guards.enter_context(consumed.guarded())
        guards.enter_context(zero_grad_replaced(consumed.zero_grad))
        passes = UpdatingPasses(subject, consumed, subject.reporter(self.name))
        try:
            with subject.around_backward(passes.around):
                yield
        finally:
            consumed.close()
