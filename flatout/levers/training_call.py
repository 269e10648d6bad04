"""Which calls of a model the levers act on: those that train, as a trial has seen them and no others.

A trial proves a lever on training steps. The script's evaluation, what it does after training, and what takes a model
apart (tracing, torch.func, the recomputation of a checkpointed part) run exactly as the script has them.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any


def is_plain_training() -> bool:
    """Is an ordinary forward under way that will be differentiated? Not inside a backward pass, which calls what it
    recomputes as it was first called; not under torch.func, and not while the call is being traced."""
    import torch

    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
        and not _is_fx_tracing()
    )


def _is_fx_tracing() -> bool:
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    return tracer is not None and tracer.is_fx_symbolic_tracing()


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
