"""What the bench runs: fixed workloads, and for each the contenders that do the same work.

A contender runs in a process of its own (process.py), and so does the search for its settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

Untyped: TypeAlias = Any
"""Of a peer's package, which need not be installed, or as different packages have it."""
Settings = Mapping[str, object]
Role = Literal["plain", "peer", "flatout"]
Compared = Literal["losses", "values", "tokens"]
"""What is compared of two contenders, to see that they do the same."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where the bench runs, and how large."""

    device: str
    """"cpu" or "cuda"."""
    quick: bool = False
    """Fewer settings and shorter turns, so that the whole bench takes minutes."""

    @property
    def reduced(self) -> bool:
        """Are batches smaller than the guides'? A GPU is fast enough for theirs."""
        return self.quick and self.device == "cpu"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A contender that is ready to work."""

    turn: Callable[[], float | None]
    """Does the work of one turn, waiting for its end; returns the loss, if there is one."""
    how: str
    """Its settings in words."""
    flops: Callable[[], float | None] = lambda: None
    """Counts the operations of one turn; None: they are not counted."""
    outputs: Callable[[], Tensor] | None = None
    """What a turn gives, flattened, to be compared with the plain contender's; None: its losses are compared."""


Prepare = Callable[[Setup, Settings], Prepared]
"""Raises ImportError where a package is missing. It goes to another process, so it can be pickled."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Settings that a search has found."""

    settings: Settings
    note: str


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do a workload's work."""

    name: str
    role: Role
    prepare: Prepare
    grid: Callable[[Setup], Sequence[Settings]] = lambda setup: ({},)
    """The settings to choose from: the fastest takes part."""
    search: Callable[[Setup, float], Found] | None = None
    """Finds settings within so many seconds, in place of a grid; in another process too."""
    other_numbers: str = ""
    """Why its speed is not compared with the peers': it does less exact work. '' where it does the same."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A piece of work that every contender does."""

    key: str
    title: str
    unit: str
    """What is counted per second, in the plural."""
    guides: str
    """What the guides state, with the conditions that they name; '' if nothing."""
    size: Callable[[Setup], str]
    """Of one turn, in words."""
    items: Callable[[Setup], int]
    """Of one turn."""
    contenders: tuple[Contender, ...]
    compared: Compared = "losses"
    """How a contender's outputs are compared with the plain one's."""
    flops_of: str | None = None
    """The contender whose count of operations is the work's own, without padding; None: nobody's."""

    def contender(self, name: str) -> Contender:
        return next(one for one in self.contenders if one.name == name)


def peer_package(name: str) -> Untyped:
    """A peer's module. ImportError where it is not installed: then the peer is left out."""
    return importlib.import_module(name)
