"""Reversible attribute patches, and a hook that runs once a package has been imported.

Patches go on entry points (a function in a module, a method on a class); no type is replaced, so `isinstance` and
pickling keep working. The script imports torch itself, when it wants to: it may first set environment variables that
torch's libraries read when they load.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar  # Any: results of the script's calls

from flatout.tracebacks import leave_no_frame

F = TypeVar("F", bound=Callable[..., object])
S = TypeVar("S")

_MISSING = object()


class _Patch:
    """One attribute and our wrapper for it. The wrapper is made once, so that a script that kept it finds the same one.

    Other code that holds the wrapper, or the original, may compare it or restore it later, so from then on the
    attribute is left alone; a wrapper that stays passes calls through.
    """

    def __init__(self, owner: object, name: str, make: Callable[[F], Callable[..., object]]) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _MISSING)
        original = getattr(owner, name)
        self.wrapper = make(original)
        self.covered = False
        """Did other code wrap ours while it was in place? Then calls reach it through that."""
        functools.update_wrapper(self.wrapper, original)
        setattr(owner, name, self.wrapper)
        del original
        self._wrapper_references = sys.getrefcount(self.wrapper)
        self._own_references = sys.getrefcount(self.own) + 1  # one more once it is back in place

    def take_off(self) -> None:
        self.covered = self._current() is not self.wrapper and self._current() is not self.own
        if self._current() is not self.wrapper or sys.getrefcount(self.wrapper) > self._wrapper_references:
            return
        if self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)

    def put_on(self) -> bool:
        """Returns whether calls go through our wrapper now."""
        if self._current() is not self.own:
            return self.is_reached
        if self.own is not _MISSING and sys.getrefcount(self.own) > self._own_references:
            return False
        setattr(self.owner, self.name, self.wrapper)
        return True

    @property
    def is_reached(self) -> bool:
        return self._current() is self.wrapper or (self.covered and self._current() is not self.own)

    def accept_references(self) -> None:
        """References to the original that exist by now are not the script's."""
        if self._current() is self.own and self.own is not _MISSING:
            self._own_references = sys.getrefcount(self.own)

    def _current(self) -> object:
        return vars(self.owner).get(self.name, _MISSING)


class Patches:
    """Attribute replacements. `undo` removes those that are still ours; the others must pass calls through then.

    Where a script has replaced or wrapped ours, its version stays: nothing is removed, and nothing is put on top.
    """

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def replace(self, owner: object, name: str, make: Callable[[F], Callable[..., object]]) -> None:
        """Set `owner.name` to `make(original)`; the original's name, doc and signature are kept on the wrapper."""
        self._patches.append(_Patch(owner, name, make))

    def undo(self) -> None:
        for patch in reversed(self._patches):
            patch.take_off()

    def redo(self) -> bool:
        """Put all of them on again, or none; returns whether calls go through all of them now."""
        if all(patch.put_on() for patch in self._patches):
            return True
        self.undo()
        return False

    @property
    def are_reached(self) -> bool:
        return all(patch.is_reached for patch in self._patches)

    def accept_references(self) -> None:
        for patch in self._patches:
            patch.accept_references()

    def __len__(self) -> int:
        return len(self._patches)


def noting(note: Callable[..., None]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """For `Patches.replace`: call `note` with the arguments before each call."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            try:
                note(*args, **kwargs)
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call

    return make


def around(
    before: Callable[..., S | None], after: Callable[[S, Any], None]
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """For `Patches.replace`: `before(arguments)`, the call, then `after` with what `before` has returned and the call's
    result, None if it failed. Where `before` returns None the call is left alone."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            known = result = None
            try:
                known = before(*args, **kwargs)
                result = original(*args, **kwargs)
                return result
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if known is not None:
                    after(known, result)

        return call

    return make


class ImportWatch:
    """Calls back once, right after a package's own code has run; `before` right before it runs.

    It is a finder at the head of `sys.meta_path`.
    """

    def __init__(
        self, callbacks: dict[str, Callable[[ModuleType], None]], before: dict[str, Callable[[], None]] | None = None
    ) -> None:
        self._waiting, self._before = dict(callbacks), before or {}
        self._searching = False

    def install(self) -> None:
        for name in list(self._waiting):
            if name in sys.modules:
                self._waiting.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting or self._searching:
            return None
        self._searching = True  # the search below calls us again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another watch of the same package may have removed it
            if name in self._before:
                self._before[name]()
            original(module)
            callback = self._waiting.pop(name, None)  # only now: a package may be searched for and never loaded
            if callback is not None:
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
