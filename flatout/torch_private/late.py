"""Access to `dispatch` and `tensors` from code that is imported before torch and runs often, where an import statement
would cost more than the call it is for. Importing this imports nothing of torch; the first call does."""

from __future__ import annotations

from types import ModuleType

_modules: list[ModuleType] = []


def dispatch() -> ModuleType:
    """`flatout.torch_private.dispatch`."""
    if not _modules:
        _import()
    return _modules[0]


def tensors() -> ModuleType:
    """`flatout.torch_private.tensors`."""
    if not _modules:
        _import()
    return _modules[1]


def _import() -> None:
    from flatout.torch_private import dispatch, tensors

    _modules[:] = dispatch, tensors
