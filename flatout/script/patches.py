"""Reversible attribute patches, and a hook that runs once a package has been imported.

Patches go on entry points (a function in a module, a method on a class); no type is replaced, so `isinstance` and
pickling go on working. The script imports torch itself, when it wants to: it may first set variables that torch's
libraries read as they load.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MISSING = object()


class Patches:
    """A stack of attribute replacements that `undo` takes back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(original)`; the original's name, doc and signature are kept on the wrapper."""
        own = vars(owner).get(name, _MISSING)
        original = getattr(owner, name)
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        setattr(owner, name, replacement)
        self._undo.append((owner, name, own))

    def undo(self) -> None:
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def __len__(self) -> int:
        return len(self._undo)


class ImportWatch:
    """Calls back once, right after a package's own code has run. Install it at the head of `sys.meta_path`."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = dict(callbacks)
        self._searching = False

    def install(self) -> None:
        for name in list(self._waiting):
            if name in sys.modules:
                self._waiting.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting or self._searching:
            return None
        self._searching = True  # the search below asks us again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            callback = self._waiting.pop(name, None)  # only now: many look for a package and never load it
            if callback is not None:
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
