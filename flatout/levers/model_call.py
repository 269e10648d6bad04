"""A wrapper around the calls of one model, for as long as a context lasts.

torch keeps a module's compiled call in an attribute of the instance that its `__call__` asks for first. That is the one
place where an instance's call can be replaced without changing its type, its state dict, or what a deep copy of it
calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from flatout.levers.subject import Subject
from flatout.replaced import settings_changed
from flatout.torch_private.attributes import COMPILED_CALL, plain_call
from flatout.torch_private.compiler import dynamo_settings

RECOMPILE_LIMIT = 64
"""Versions of one function: blocks of several shapes, last batches, evaluation. Past torch's 8 it runs untraced."""


@contextlib.contextmanager
def calls_wrapped(model: Any, wrapper: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[list[int]]:
    """Put `wrapper(model, call)` around each call of `model`; yields a list that grows by one at each."""
    calls: list[int] = []
    before = getattr(model, COMPILED_CALL)
    call = before or plain_call(model)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return wrapper(model, lambda: call(*args, **kwargs))

    set_call(model, wrapped)
    try:
        yield calls
    finally:
        set_call(model, before)


def set_training_call(subject: Subject, module: Any, call: Any, plain: Any) -> None:
    """Have `module(...)` run `call` where levers act, and `plain` in every other call."""
    import torch

    subject.note_training(module)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not subject.acts_on(module):
            return plain(*args, **kwargs)
        return call(*args, **kwargs)

    set_call(module, chosen)


def set_call(module: Any, call: Any) -> None:
    """Have `module(...)` run `call`; None: what the module's class says."""
    module.__dict__[COMPILED_CALL] = call


@contextlib.contextmanager
def versions_allowed() -> Iterator[None]:
    """Let torch trace a function for as many shapes and modes as a training loop may have, and anew where hooks come
    or go: its default is to ignore a hook that was not there at first."""
    settings = dynamo_settings()
    limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    with settings_changed(settings, recompile_limit=limit, skip_nnmodule_hook_guards=False):
        yield
