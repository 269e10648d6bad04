"""A wrapper around the calls of one model, for as long as a context lasts.

torch keeps a module's compiled call in an attribute of the instance, which `__call__` uses if it is set. It is the only
place where an instance's call can be replaced without changing its type, its state dict, or what a deep copy of it
calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.subject import Subject, Wrapper
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
    before: Call | None = getattr(model, COMPILED_CALL)
    call: Call = before or plain_call(model)

    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return wrapper(model, lambda: call(*args, **kwargs))

    set_call(model, wrapped)
    try:
        yield calls
    finally:
        set_call(model, before)


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
