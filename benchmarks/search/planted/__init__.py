"""A lever that does nothing, or removes a known share of a step, for `benchmarks.search.planted`."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator

from benchmarks.proof.planted import Planted
from flatout.levers.subject import Subject


@contextlib.contextmanager
def _nothing_wasted(subject: Subject) -> Iterator[None]:
    builtins.wastes_nothing = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        builtins.wastes_nothing = False  # type: ignore[attr-defined]


LEVERS = (Planted("planted", "bit-identical", _nothing_wasted),)
