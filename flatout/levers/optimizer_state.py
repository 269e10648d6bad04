"""Adam's moments in 8 bits for an unmodified script: its own optimizer steps as ever, but for the large parameters.

Right before each of its steps the large parameters are stepped by `flatout.levers.low_bit`, and its own step sees a
stand-in of the optimizer without them. Everything happens where the script's step stands, so clipping, scaling,
accumulation and skipped steps mean what they meant. `state_dict` holds plain moments: the script loads what it saves
with or without this lever.

It saves memory, not time, so `flatout tune` tries it only where steps have to fit (--fit).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import COSTS_TIME, Lever, Saving, Verdict, offer, refuse
from flatout.levers.low_bit import LowBitOptimizer, import_torchao, low_bit_obstacle, without_codes
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine


class LowBitState(Lever):
    """Hold Adam's two moments in 8 bits (needs torchao).

    For `torch.optim.Adam` and `AdamW` that are stepped without a closure, and parameters of at least 4,096
    elements. `state_dict` holds plain moments, so a script loads what it saved with or without this lever. It saves
    memory and takes time, so `flatout tune` tries it only with `--fit`.
    """

    name = "optimizer state"
    plan_field = "optimizer_state"
    compiles = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return COSTS_TIME

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("the script has no optimizer object")
        if observed.compiled_in_script:
            return refuse("the script compiles, and the 8-bit update kernel is compiled too")
        if observed.captures_graphs:
            return refuse(f"{observed.captures_graphs}: a captured graph writes to the moments' memory")
        obstacles = [seen.low_bit_obstacle for seen in observed.optimizers]
        if "" not in obstacles:
            return refuse(obstacles[0] or "whether the optimizer's state can be held in 8 bits was not examined")
        if observed.reads_optimizer_state is None or observed.reads_optimizer_state:
            return refuse(observed.reads_optimizer_state or "whether the script reads that state was not examined")
        return offer("8bit", reason="saves memory, costs time")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import_torchao()  # now, not in the midst of the script's first step

        def visit(optimizer: Any) -> Undo[Any] | None:
            return None if low_bit_obstacle(optimizer) else _hold_in_codes(optimizer, self._tell(subject))

        with subject.optimizers.each(visit):
            yield

    def _tell(self, subject: Subject) -> Any:
        return lambda why: subject.note_incident(self.name, why)

    def label(self, value: Any) -> str:
        return f"{self.name} in {str(value).removesuffix('bit')} bits"


class _LargeFirst:
    """A hook before each step of an optimizer."""

    def __init__(self, optimizer: Any, tell: Any) -> None:
        self._low_bit: LowBitOptimizer | None = LowBitOptimizer(optimizer)
        self._tell = tell

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        obstacle = self._obstacle(optimizer, args, kwargs)
        if obstacle:
            self._tell(obstacle)
            self.close()
        if self._low_bit is None:
            return None
        self._low_bit.step_large()
        return (_stand_in(optimizer, self._low_bit.small_groups()), *args[1:]), kwargs

    def close(self) -> None:
        """The state is the optimizer's own again."""
        if self._low_bit is not None:
            self._low_bit.close()
        self._low_bit = None

    @staticmethod
    def _obstacle(optimizer: Any, args: Any, kwargs: Any) -> str:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        if closure is not None:
            return "the optimizer's step was given a closure, which forms the gradients"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "the gradient scaler leaves it to the optimizer's kernel to unscale"
        return low_bit_obstacle(optimizer) or ""


def _hold_in_codes(optimizer: Any, tell: Any) -> Undo[Any]:
    hook = _LargeFirst(optimizer, tell)
    handles = (
        optimizer.register_step_pre_hook(hook),
        optimizer.register_state_dict_post_hook(lambda optimizer, state: without_codes(state)),
    )
    alive = weakref.ref(hook)  # the optimizer has it, and may go with it

    def undo(optimizer: Any) -> None:
        held = alive()
        for handle in handles:
            handle.remove()
        if held is not None:
            held.close()

    return undo


def _stand_in(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """The optimizer over these groups: a step that raises leaves nothing changed."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer), param_groups=groups)
    return other
