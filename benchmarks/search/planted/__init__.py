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


@contextlib.contextmanager
def _nothing(subject: Subject) -> Iterator[None]:
    yield


def _null(name: str, plan_field: str) -> Planted:
    lever = Planted(name, "bit-identical", _nothing)
    lever.plan_field = plan_field  # type: ignore[misc]
    return lever


NULL_LEVERS = tuple(
    _null(f"nothing {number}", field)
    for number, field in enumerate(
        ("cudnn_benchmark", "flush_denormals", "pin_memory", "matmul_precision", "non_blocking")
    )
)
"""They do nothing; each sets a field of its own, so that several may be kept together."""
