"""Which calls of a model the levers act on: those that train, as a trial has seen them and no others.

A trial proves a lever on training steps. The script's evaluation, what it does after training, and what takes a model
apart (tracing, torch.func) run exactly as the script has them. What activation checkpointing recomputes runs as it did
in forward.
"""

from __future__ import annotations

import weakref
from typing import Any

from flatout.torch_private.compiler import fx_trace_is_under_way
from flatout.torch_private.late import dispatch


def is_plain_training() -> bool:
    """Is an ordinary forward under way that will be differentiated? Not inside a backward pass; not under torch.func,
    and not while the call is being traced."""
    return bool(dispatch().current_graph_task() == -1) and _is_differentiated()


def is_recomputation() -> bool:
    """Does a backward pass run part of a forward again that was an ordinary one?

    So does `torch.utils.checkpoint` with use_reentrant=False. The other kind, and functions with a backward of their
    own, ran their forward without gradients, as plain calls, and call them again as such.
    """
    return dispatch().current_graph_task() != -1 and _saves_for("_recomputation_hook") and _is_differentiated()


def _is_differentiated() -> bool:
    import torch

    private = dispatch()
    return (
        torch.is_grad_enabled()
        and private.transform_level() is None
        and private.jit_trace_under_way() is None
        and not fx_trace_is_under_way()
    )


def _saves_for(hook: str) -> bool:
    """Does `torch.utils.checkpoint` take what is now saved for backward, through the hook of this name?"""
    hooks = dispatch().saved_tensor_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return False
    return bool(hooks[0].__qualname__.startswith(hook))


class TrainingModes:
    """Whether modules are in training mode while they train: a frozen backbone, or all of a script, may never be."""

    def __init__(self) -> None:
        self._modes: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def note(self, module: Any) -> None:
        """`module` is training now, in the mode that it is in."""
        key = id(module)
        if key not in self._modes:
            self._modes[key] = weakref.ref(module, lambda _: self._modes.pop(key, None)), bool(module.training)

    def is_as_in_training(self, module: Any) -> bool:
        """True too for one that nothing is known of."""
        known = self._modes.get(id(module))
        return known is None or known[1] == bool(module.training)


class CheckpointedCalls:
    """Modules of which a whole outermost call was checkpointed, `checkpoint(model, x)`. In a recomputation theirs are
    outermost calls again; those of other modules were inside one."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[Any]] = {}

    def note(self, module: Any) -> None:
        """An outermost call of `module` begins."""
        key = id(module)
        if _saves_for("_checkpoint_hook") and key not in self._modules:
            self._modules[key] = weakref.ref(module, lambda _: self._modules.pop(key, None))

    def __contains__(self, module: object) -> bool:
        return id(module) in self._modules
