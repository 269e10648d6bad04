"""Calls of modules whose class has a `__call__` of its own, as those of GPyTorch, which run `forward` past torch's.

Only in a window: outside of it the classes are as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING

from flatout.script.patches import Patches, around
from flatout.script.spans import Span

if TYPE_CHECKING:
    from torch import nn


class OwnCalls:
    """Patches on these classes between `install` and `uninstall`. `enter(module)` opens a span, or returns None where
    the call is part of another one; `leave(span)` closes it."""

    def __init__(self, enter: Callable[[nn.Module], Span | None], leave: Callable[[Span], None]) -> None:
        self._around = around(lambda module, *_, **__: enter(module), lambda span, _: leave(span))
        self._patches = Patches()

    def install(self) -> None:
        import torch

        self._patches = Patches()
        for kind in _below(torch.nn.Module, set()):
            call = vars(kind).get("__call__")
            if not isinstance(call, FunctionType) or str(kind.__module__).partition(".")[0] == "torch":
                continue
            if call.__code__.co_filename == around.__code__.co_filename:  # of an earlier window: the script holds it
                continue
            with contextlib.suppress(AttributeError, TypeError):  # a class may refuse to be changed
                self._patches.replace(kind, "__call__", self._around)

    def uninstall(self) -> None:
        self._patches.undo()


def _below(kind: type, seen: set[type]) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(kind)  # a metaclass may have another
    for one in subclasses:
        if one not in seen:
            seen.add(one)
            yield one
            yield from _below(one, seen)
