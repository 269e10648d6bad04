"""`dispatch` and `tensors` for code that is imported before torch and runs often: there, an import statement takes as
long as what it imports for. Importing this imports nothing of torch; the first call does."""

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
