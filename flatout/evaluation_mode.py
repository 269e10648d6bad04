"""A model in evaluation mode for a while."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

_LOCKS: weakref.WeakKeyDictionary[Module, threading.RLock] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode for every module; afterwards each has the mode that it had (a frozen batch norm stays frozen).

    Another thread that wants the same waits: the first to leave would put modules back into training under the other's
    pass.
    """
    with _LOCKS.setdefault(model, threading.RLock()):
        trained = [module for module in model.modules() if module.training]
        if trained:  # generation comes here for each token, and one walk over the modules is enough then
            model.eval()
        try:
            yield
        finally:
            for module in trained:
                module.training = True
