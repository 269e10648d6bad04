"""The cases that are tried: every edge size, every layout in memory, ordinary and extreme values, and random mixtures.

Kernels fail at the ends of their blocks: at 0 and 1, just beside powers of two, and at sizes that no block divides. So
each named size takes all of these in turn, the others staying small. The smallest cases come first, so that the first
failure is nearly the smallest one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from flatout.kernels.custom.argument_specs import FLOATS, TensorArgument
from flatout.kernels.custom.definition import LAYOUTS, Definition
from flatout.kernels.custom.footprint import Footprint, elements, shape_of
from flatout.kernels.custom.result import CheckMessage

Values = Literal["normal", "large", "zeros", "NaN", "infinite"]
NONFINITE: tuple[Values, ...] = ("NaN", "infinite")
"""Some values are; only inputs without a range have such."""

EDGES = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(255, 256, 257, 511, 513, 1000, 1023, 1024, 1025),
)
FEWER_EDGES = (0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 129, 257)
"""For a quick check."""
SMALL = (1, 2, 3, 5)
MOST_ELEMENTS = 1 << 20
"""Of a case's inputs together; its outputs may have twice as many."""
MOST_NONFINITE, FEWER_NONFINITE = 24, 8
"""Of a dtype's cases that are tried with NaN and infinity too; the second for a quick check."""
FAR = 1 << 24
"""No size is larger, unless the kernel is restricted to larger ones."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that decides the inputs."""

    sizes: Mapping[str, int]
    dtype: str
    """Of inputs that are "float"."""
    layouts: tuple[str, ...]
    """One an argument; of a constant it means nothing."""
    values: Values = "normal"
    seed: int = 0

    @property
    def key(self) -> str:
        """The same for cases that differ in their seed alone."""
        return f"{sorted(self.sizes.items())} {self.dtype} {self.layouts} {self.values}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: CheckMessage) -> Case:
        return cls(**{**data, "layouts": tuple(data["layouts"])})


def case_text(definition: Definition, case: Case) -> str:
    """'rows=3, width=9, float32, x strided'; what is as usual is left out."""
    parts = [f"{name}={size}" for name, size in case.sizes.items()]
    if any(isinstance(one, TensorArgument) and one.dtype == "float" for one in definition.arguments):
        parts.append(case.dtype)
    parts += [
        f"{label} {layout}"
        for label, layout, one in zip(definition.labels, case.layouts, definition.arguments, strict=True)
        if layout != "contiguous" and isinstance(one, TensorArgument)
    ]
    return ", ".join(parts + ([f"{case.values} values"] if case.values != "normal" else []))


def is_possible(definition: Definition, case: Case) -> bool:
    """Not with indices into a table without rows, nor with inputs that are written to and overlap themselves."""
    for place, one in enumerate(definition.arguments):
        if not isinstance(one, TensorArgument):
            continue
        high = case.sizes[one.high] if isinstance(one.high, str) else one.high
        if high is not None and high <= (one.low or 0) and 0 not in shape_of(one, case.sizes):
            return False
        if place in definition.mutates and case.layouts[place] == "expanded":
            return False
    return True


def draw_cases(definition: Definition, *, seed: int, count: int, quick: bool) -> list[Case]:
    """The cases of all dtypes, the smallest first. count: random ones for each dtype, besides those of the lists."""
    found: dict[str, Case] = {}
    footprint = Footprint(definition)
    for dtype in definition.dtypes:
        # The same sizes for each dtype: then a failure of one alone is the dtype's.
        drawing = _Drawing(definition, dtype, random.Random(seed), quick, footprint)
        for number, case in enumerate(drawing.all(count)):
            numbered = Case(**{**vars(case), "seed": seed + number})
            if is_possible(definition, numbered):
                found.setdefault(numbered.key, numbered)
    return sorted(found.values(), key=lambda case: elements(definition, case.sizes))


def nonfinite_cases(definition: Definition, cases: Sequence[Case], *, quick: bool) -> list[Case]:
    """Some of these, evenly spread over their sizes, with NaN and with infinity among the values; none where no input
    can hold such."""
    if not any(one.dtype in ("float", *FLOATS) and one.high is None for one in definition.tensors):
        return []
    found: list[Case] = []
    most = FEWER_NONFINITE if quick else MOST_NONFINITE
    for dtype in definition.dtypes:
        of_dtype = [case for case in cases if case.dtype == dtype and case.values == "normal"]
        usable = [case for case in of_dtype if elements(definition, case.sizes)]
        for case in usable[:: -(-len(usable) // most) or 1]:
            found += [replace(case, values=values) for values in NONFINITE]
    return found


class _Drawing:
    """The cases of one dtype."""

    def __init__(
        self, definition: Definition, dtype: str, chance: random.Random, quick: bool, footprint: Footprint
    ) -> None:
        self._definition, self._dtype, self._chance, self._quick = definition, dtype, chance, quick
        self._footprint = footprint
        edges = FEWER_EDGES if quick else EDGES
        self._edges = {name: allowed_among(definition, name, edges) for name in definition.size_names}
        self._small = {name: allowed_among(definition, name, SMALL) for name in definition.size_names}

    def all(self, count: int) -> Iterator[Case]:
        yield from self._edge_sizes()
        yield from self._each_layout()
        yield from self._extreme_values()
        for _ in range(count):
            yield self._mixture()
        yield self._case(self._large())

    def _edge_sizes(self) -> Iterator[Case]:
        yield self._case({name: small[0] for name, small in self._small.items()})
        for name, edges in self._edges.items():
            for size in edges:
                yield self._case(self._fitted({**self._some_small(), name: size}))

    def _each_layout(self) -> Iterator[Case]:
        for place, one in enumerate(self._definition.arguments):
            if isinstance(one, TensorArgument):
                for layout in self._definition.layouts:
                    if layout_applies(layout, len(one.dims)):
                        for sizes in (self._some_small(), self._mixed_sizes()):
                            yield self._case(sizes, layouts={place: layout})

    def _extreme_values(self) -> Iterator[Case]:
        extremes: tuple[Values, ...] = ("large", "zeros")
        for values in extremes:
            for _ in range(2):
                yield self._case(self._mixed_sizes(), values=values)

    def _mixture(self) -> Case:
        kinds: list[Values] = ["normal", "normal", "normal", "large"]
        layouts = {
            place: self._chance.choice([one for one in self._definition.layouts if layout_applies(one, len(it.dims))])
            for place, it in enumerate(self._definition.arguments)
            if isinstance(it, TensorArgument)
        }
        return self._case(self._mixed_sizes(), layouts=layouts, values=self._chance.choice(kinds))

    def _case(
        self, sizes: Mapping[str, int], *, layouts: Mapping[int, str] | None = None, values: Values = "normal"
    ) -> Case:
        usual = self._definition.layouts[0]
        given = layouts or {}
        chosen = tuple(given.get(place, usual) for place in range(len(self._definition.arguments)))
        return Case(sizes=dict(sizes), dtype=self._dtype, layouts=chosen, values=values)

    def _some_small(self) -> dict[str, int]:
        return {name: self._chance.choice(small) for name, small in self._small.items()}

    def _mixed_sizes(self) -> dict[str, int]:
        """Any edge but 0: with it a kernel has nothing to do."""
        drawn = {
            name: self._chance.choice([one for one in edges if one] or edges) for name, edges in self._edges.items()
        }
        return self._fitted(drawn)

    def _large(self) -> dict[str, int]:
        return grown(self._definition, (1 << 16) if self._quick else MOST_ELEMENTS, self._footprint)

    def _fitted(self, sizes: dict[str, int]) -> dict[str, int]:
        """Smaller where the tensors would be too large."""
        while elements(self._definition, sizes) > MOST_ELEMENTS or self._footprint(sizes) > 2 * MOST_ELEMENTS:
            name = max(sizes, key=lambda one: sizes[one])
            smaller = [one for one in self._edges[name] if one < sizes[name]]
            if not smaller:
                break
            sizes[name] = smaller[-1]
        return sizes


def layout_applies(layout: str, dims: int) -> bool:
    """A tensor without dimensions is always contiguous; only a matrix can be transposed or have padded rows."""
    return dims >= {"contiguous": 0, "offset": 0, "transposed": 2, "padded": 2}.get(layout, 1)


def allowed_among(definition: Definition, name: str, wanted: Sequence[int]) -> list[int]:
    """The wanted sizes that the kernel allows, with the smallest and a few others that it allows; sorted."""
    allowed = definition.sizes.get(name)
    if allowed is None:
        return sorted(wanted)
    if len(allowed) <= len(wanted):
        return list(allowed)
    found = {size for size in wanted if size in allowed}
    few = [allowed[0], allowed[1], allowed[len(allowed) // 3], allowed[-1]]
    return sorted(found | {size for size in few if size <= max(*wanted, allowed[1])})


def grown(
    definition: Definition,
    most_elements: int,
    footprint: Footprint | None = None,
    *,
    fixed: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Sizes at which inputs, or outputs, have about that many elements: all alike, as far as the kernel allows.

    fixed: sizes that are as they are.
    """
    footprint, given = footprint or Footprint(definition), dict(fixed or {})
    smallest = {name: allowed_among(definition, name, SMALL)[0] or 1 for name in definition.size_names}
    sizes = {**smallest, **given}
    growing = [name for name in sizes if name not in given]
    while growing:
        name = min(growing, key=lambda one: sizes[one])
        larger = {**sizes, name: _next_size(definition, name, sizes[name])}
        if larger[name] <= sizes[name] or footprint(larger) > most_elements or larger[name] > FAR:
            growing.remove(name)
        else:
            sizes = larger
    return sizes


def _next_size(definition: Definition, name: str, size: int) -> int:
    """The allowed size nearest to twice this one, and above it; the same if there is none."""
    allowed = definition.sizes.get(name)
    if allowed is None:
        return 2 * size
    larger = [one for one in allowed if size < one <= 2 * size] or [one for one in allowed if one > size][:1]
    return larger[-1] if larger else size


assert set(LAYOUTS) == {"contiguous", "transposed", "padded", "strided", "offset", "expanded"}, "see layout_applies"
