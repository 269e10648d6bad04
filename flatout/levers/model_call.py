"""A wrapper around the calls of one model, for as long as a context lasts.

torch keeps a module's compiled call in an attribute of the instance, which `__call__` uses if it is set. It is the only
place where an instance's call can be replaced without changing its type, its state dict, or what a deep copy of it
calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flatout.levers.subject import Subject, Undo, Wrapper
from flatout.replaced import settings_changed
from flatout.torch_private.attributes import COMPILED_CALL, plain_call
from flatout.torch_private.compiler import dynamo_settings

if TYPE_CHECKING:
    from torch.nn import Module

Call = Callable[..., object]
"""What `module(...)` runs."""
RECOMPILE_LIMIT = 64
"""Versions of one function: blocks of several shapes, last batches, evaluation. Past torch's 8 it runs uncompiled."""


@contextlib.contextmanager
def calls_wrapped(model: Module, wrapper: Wrapper) -> Iterator[list[int]]:
    """Put `wrapper(model, call)` around each call of `model`; yields a list that grows by one item per call."""
    calls: list[int] = []
    before, call = getattr(model, COMPILED_CALL), call_of(model)

    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return wrapper(model, lambda: call(*args, **kwargs))

    set_call(model, wrapped)
    try:
        yield calls
    finally:
        set_call(model, before)


def call_of(module: Module) -> Call:
    """What `module(...)` runs."""
    call: Call = getattr(module, COMPILED_CALL) or plain_call(module)
    return call


def calls_put_back(modules: Sequence[Module]) -> Undo[Module] | None:
    """What gives these modules of a model the calls that they have now; None without any.

    It knows them by themselves, as the model may have other layers by then, and keeps none alive.
    """
    before = [(weakref.ref(one), getattr(one, COMPILED_CALL)) for one in modules]

    def undo(model: Module) -> None:
        for reference, call in before:
            if (one := reference()) is not None:
                set_call(one, call)

    return undo if before else None


def set_training_call(subject: Subject, module: Module, call: Call, plain: Call) -> None:
    """Have `module(...)` run `call` where levers act, and `plain` in every other call."""
    import torch

    subject.note_training(module)

    def chosen(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not subject.acts_on(module):
            return plain(*args, **kwargs)
        return call(*args, **kwargs)

    set_call(module, chosen)


def set_call(module: Module, call: Call | None) -> None:
    """Have `module(...)` run `call`; None: the class's own call."""
    module.__dict__[COMPILED_CALL] = call


@contextlib.contextmanager
def versions_allowed() -> Iterator[None]:
    """Let torch compile a function for as many shapes and modes as a training loop may have, and again when hooks are
    added or removed: by default it ignores hooks that were registered after the first compilation."""
    settings = dynamo_settings()
    limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    with settings_changed(settings, recompile_limit=limit, skip_nnmodule_hook_guards=False):
        yield
