"""For which sizes a trace holds: a branch on the batch or on a length leaves a guard in the program, and the file of
most formats does not check it.

The guards are asked for many sizes without running the model: they read the sizes of expanded views, which hold one
row of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from flatout.data.nested import map_tensors
from flatout.infer.exporting.fresh_inputs import Example
from flatout.infer.exporting.report import Dynamic, SizeRange
from flatout.infer.exporting.trace import Traced, first_words
from flatout.torch_private.attributes import EXPORT_GUARDS

FURTHEST = 1 << 16
"""Largest size that is tried."""


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Of one trace. `why_not` says of sizes by name why the trace does not hold for them, '' if it does."""

    found: tuple[SizeRange, ...]
    why_not: Callable[[Mapping[str, int]], str]


def ranges_of(traced: Traced | None, example: Example, dynamic: Dynamic) -> Ranges:
    """The bounds of each size that may vary, the others as in the example. Without a trace none is known."""
    why_not = (lambda sizes: "") if traced is None else _asks(traced, dynamic)
    usual = {"batch": example.batch, "length": example.length if dynamic == "length" else None}
    found = []
    for name, size in usual.items():
        if dynamic == "none" or size is None:
            continue

        def allows(other: int, name: str = name) -> bool:
            return not why_not({name: other})

        if traced is None or not allows(max(size, 2)):
            found.append(SizeRange(name=name))
            continue
        smallest, largest = _smallest(allows, max(size, 2)), _largest(allows, max(size, 2))
        below = why_not({name: smallest - 1}) if smallest > 1 else ""
        above = why_not({name: largest + 1}) if largest is not None else ""
        reason = "; ".join(dict.fromkeys(one for one in (below, above) if one))
        found.append(SizeRange(name=name, smallest=smallest, largest=largest, reason=reason))
    return Ranges(found=tuple(found), why_not=why_not)


class _Held(Exception):
    """Raised behind the guards: the sizes are allowed, and nothing more is to be run."""


def _asks(traced: Traced, dynamic: Dynamic) -> Callable[[Mapping[str, int]], str]:
    module = traced.program.module()
    guards: nn.Module | None = getattr(module, EXPORT_GUARDS, None)

    def stop(*_: object) -> None:
        raise _Held

    if guards is not None:
        guards.register_forward_hook(stop)

    def why_not(sizes: Mapping[str, int]) -> str:
        if guards is None:
            return ""
        args, kwargs = _views(traced.example, sizes, dynamic)
        try:
            module(*args, **kwargs)
        except _Held:
            return ""
        except (AssertionError, RuntimeError, ValueError) as error:
            return first_words(error).removeprefix("Guard failed: ")
        return ""

    return why_not


def _views(
    example: Example, sizes: Mapping[str, int], dynamic: Dynamic
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The call with these sizes, each tensor a view of its first row."""

    def viewed(tensor: Tensor) -> Tensor:
        named = example.sizes_named(tensor, dynamic)
        for dimension, name in named.items():
            if name in sizes:
                tensor = tensor.narrow(dimension, 0, 1)
        shape = [sizes.get(named.get(number, ""), size) for number, size in enumerate(tensor.shape)]
        return tensor.expand(shape)

    args, kwargs = map_tensors(viewed, (example.args, example.kwargs))
    return args, kwargs


def _largest(allows: Callable[[int], bool], known: int) -> int | None:
    """The largest allowed size from `known` on; None where no bound was found."""
    good = known
    while allows(2 * good):
        good *= 2
        if good >= FURTHEST:
            return None
    bad = 2 * good
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if allows(middle) else (good, middle)
    return good


def _smallest(allows: Callable[[int], bool], known: int) -> int:
    if allows(1):
        return 1
    bad, good = 1, known
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if allows(middle) else (good, middle)
    return good
