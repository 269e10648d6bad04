"""Access to `dispatch` and `tensors` from code that is imported before torch and runs often, where an import statement
would cost more than the call it is for. Importing this imports nothing of torch; the first call does."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def dispatch() -> ModuleType:
    """`flatout.torch_private.dispatch`."""
    from flatout.torch_private import dispatch

    return dispatch


@functools.cache
def tensors() -> ModuleType:
    """`flatout.torch_private.tensors`."""
    from flatout.torch_private import tensors

    return tensors
