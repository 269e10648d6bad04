"""Adam's moments in 8 bits for an unmodified script: its own optimizer still steps the small parameters.

Right before each of its steps `flatout.levers.low_bit` steps the large parameters, and its own step runs on a copy of
the optimizer without them. Everything happens at the script's own step, so clipping, scaling, accumulation and skipped
steps work as before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import COSTS_TIME, Lever, Value, Verdict, offer, refuse
from flatout.levers.low_bit import LowBitOptimizer, import_torchao, low_bit_obstacle
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import Args, Kwargs


class LowBitState(Lever):
    """Hold Adam's two moments in 8 bits (needs torchao).

    For `torch.optim.Adam` and `AdamW` stepped without a closure, and parameters of at least 4,096 elements.
    `state_dict` holds plain moments, so a script can load what it saved with or without this lever. It saves memory
    and takes time, so `flatout tune` tries it only with `--fit`.
    """

    name = "optimizer state"
    plan_field = "optimizer_state"
    usual_saving = COSTS_TIME
    compiles = True

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("there is no optimizer object")
        if observed.compiled_in_script:
            return refuse("torch.compile is already used, and the 8-bit update kernel is compiled too")
        if observed.captures_graphs:
            return refuse(f"{observed.captures_graphs}: a captured graph writes to the moments' memory")
        obstacles = [seen.low_bit_obstacle for seen in observed.optimizers]
        if "" not in obstacles:
            return refuse(obstacles[0] or "whether the optimizer's state can be held in 8 bits was not examined")
        if observed.reads_optimizer_state is None or observed.reads_optimizer_state:
            return refuse(observed.reads_optimizer_state or "whether anything reads that state was not examined")
        return offer("8bit", reason="saves memory, costs time")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import_torchao()  # now, not during the script's first step

        def visit(optimizer: Optimizer) -> Undo[Optimizer] | None:
            return None if low_bit_obstacle(optimizer) else _hold_in_codes(optimizer, subject.reporter(self.name))

        with subject.optimizers.each(visit):
            yield

    def label(self, value: Value) -> str:
        return f"{self.name} in {str(value).removesuffix('bit')} bits"


class _LargeFirst:
    """A hook before each step of an optimizer."""

    def __init__(self, optimizer: Optimizer, report: Callable[[str], None]) -> None:
        self._low_bit: LowBitOptimizer | None = LowBitOptimizer(optimizer)
        self._report = report

    def __call__(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        obstacle = self._obstacle(optimizer, args, kwargs)
        if obstacle:
            self._report(obstacle)
            self.close()
        if self._low_bit is None:
            return None
        return self._low_bit.step_large(optimizer, args, kwargs)

    def close(self) -> None:
        """Give the state back to the optimizer."""
        if self._low_bit is not None:
            self._low_bit.close()
        self._low_bit = None

    @staticmethod
    def _obstacle(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> str:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        if closure is not None:
            return "the optimizer's step got a closure, which computes the gradients"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "the gradient scaler leaves unscaling to the optimizer's kernel"
        return low_bit_obstacle(optimizer) or ""


def _hold_in_codes(optimizer: Optimizer, report: Callable[[str], None]) -> Undo[Optimizer]:
    hook = _LargeFirst(optimizer, report)
    handle = optimizer.register_step_pre_hook(hook)
    alive = weakref.ref(hook)  # it belongs to the optimizer, and may be freed with it

    def undo(optimizer: Optimizer) -> None:
        held = alive()
        handle.remove()
        if held is not None:
            held.close()

    return undo
