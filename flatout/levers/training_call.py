"""Which calls of a model the levers act on: those that train, and no others.

A trial proves a lever on training steps alone. Evaluation, what the script does after training, and what takes a model
apart (tracing, torch.func) run exactly as written. What activation checkpointing recomputes runs as it did in forward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

from flatout.torch_private.compiler import fx_trace_is_under_way
from flatout.torch_private.late import dispatch


def is_plain_training() -> bool:
    """Is this an ordinary forward that will be differentiated: not inside a backward pass, under torch.func or while
    being traced?"""
    return bool(dispatch().current_graph_task() == -1) and _is_differentiated()


def is_recomputation() -> bool:
    """Is a backward pass recomputing part of an ordinary forward?

    `torch.utils.checkpoint` with use_reentrant=False does. Reentrant checkpoints, and functions with a backward of
    their own, ran their forward without gradients, as plain calls, and recompute it in the same way.
    """
    return dispatch().current_graph_task() != -1 and is_checkpointing("_recomputation_hook") and _is_differentiated()


def _is_differentiated() -> bool:
    import torch

    private = dispatch()
    return (
        torch.is_grad_enabled()
        and private.transform_level() is None
        and private.jit_trace_under_way() is None
        and not fx_trace_is_under_way()
    )


def is_checkpointing(hook: str = "") -> bool:
    """Do tensors saved for backward now go to `torch.utils.checkpoint`? hook: only through the hook of this name."""
    hooks = dispatch().saved_tensor_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return False
    return bool(hooks[0].__qualname__.startswith(hook))


class TrainingModes:
    """The mode (`module.training`) that modules are in while they train: a frozen backbone, or a whole script, may
    train in evaluation mode."""

    def __init__(self) -> None:
        self._modes: dict[int, tuple[weakref.ref[Module], bool]] = {}

    def note(self, module: Module) -> None:
        """`module` is training now, in the mode that it is in."""
        key = id(module)
        if key not in self._modes:
            self._modes[key] = weakref.ref(module, lambda _: self._modes.pop(key, None)), bool(module.training)

    def is_as_in_training(self, module: Module) -> bool:
        """Is it in the mode it trains in? True for unknown modules."""
        known = self._modes.get(id(module))
        return known is None or known[1] == bool(module.training)


class CheckpointedCalls:
    """Modules of which a whole outermost call was checkpointed, `checkpoint(model, x)`. When recomputed, their calls
    are outermost again; those of other modules were inside one."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[Module]] = {}

    def note(self, module: Module) -> None:
        """An outermost call of `module` begins."""
        key = id(module)
        if is_checkpointing("_checkpoint_hook") and key not in self._modules:
            self._modules[key] = weakref.ref(module, lambda _: self._modules.pop(key, None))

    def __contains__(self, module: object) -> bool:
        return id(module) in self._modules
