"""The smallest case that still fails in the same way: smaller sizes, contiguous inputs, ordinary values, float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from flatout.kernels.custom.cases import Case, allowed_among, is_possible
from flatout.kernels.custom.definition import Definition

MOST_SECONDS = 20.0
MOST_TRIES = 400


def shrunk(
    definition: Definition, case: Case, fails: Callable[[Case], bool], *, clock: Callable[[], float] = time.perf_counter
) -> Case:
    """The smallest case near this one for which `fails` holds, as far as time allows; `case` itself fails."""
    end, tries = clock() + MOST_SECONDS, 0
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(definition, case):
            if tries >= MOST_TRIES or clock() >= end:
                return case
            if not is_possible(definition, simpler):
                continue
            tries += 1
            if fails(simpler):
                case, progress = simpler, True
                break
    return case


def _simpler(definition: Definition, case: Case) -> Iterator[Case]:
    """Cases with one thing simpler, what simplifies most first."""
    usual = definition.layouts[0]
    if any(layout != usual for layout in case.layouts):
        yield replace(case, layouts=(usual,) * len(case.layouts))
    for place, layout in enumerate(case.layouts):
        if layout != usual:
            yield replace(case, layouts=(*case.layouts[:place], usual, *case.layouts[place + 1 :]))
    if case.values != "normal":
        yield replace(case, values="normal")
    if case.dtype != definition.dtypes[0]:
        yield replace(case, dtype=definition.dtypes[0])
    for name in sorted(case.sizes, key=lambda one: -case.sizes[one]):
        for size in _smaller(definition, name, case.sizes[name]):
            yield replace(case, sizes={**case.sizes, name: size})


def _smaller(definition: Definition, name: str, size: int) -> list[int]:
    """Sizes to try in place of this one, the smallest first: nothing below one of them is likely to fail."""
    near = [size // 2, size * 3 // 4, size - 8, size - 4, size - 2, size - 1]
    wanted = sorted({one for one in (0, 1, 2, 3, 4, 5, 8, 16, 32, *near) if 0 <= one < size})
    return [one for one in allowed_among(definition, name, wanted) if one < size] if wanted else []
