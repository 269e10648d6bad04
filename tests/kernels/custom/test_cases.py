"""Which cases are tried, what is drawn for them, and that what is printed is what ran."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flatout.kernels.custom.cases import Case, case_text, draw_cases, grown, is_possible
from flatout.kernels.custom.definition import LAYOUTS
from flatout.kernels.custom.drawn_inputs import draw, nudged, reproduction, unguarded
from flatout.kernels.custom.footprint import elements
from flatout.kernels.custom.speed import timed_case
from tests.kernels.custom.definitions import defined

SPECS = ("float[rows, width]", "float[width] 0..2", "int64[rows] < width", 0.5)
GATHER = defined(lambda *inputs: inputs, inputs=SPECS, labels=("x", "w", "i", "c"))


def test_edges_layouts_and_extremes_are_there_smallest_first() -> None:
    cases = draw_cases(GATHER, seed=0, count=3, quick=False)
    assert {0, 1, 7, 8, 9, 1023, 1024, 1025} <= {case.sizes["rows"] for case in cases}
    assert {layout for case in cases for layout in case.layouts} == set(LAYOUTS)
    assert {case.values for case in cases} == {"normal", "large", "zeros"}
    assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16"}
    counts = [elements(GATHER, case.sizes) for case in cases]
    assert counts == sorted(counts)
    assert len(draw_cases(GATHER, seed=0, count=3, quick=True)) < len(cases)


def test_the_seed_decides() -> None:
    first, again, other = (draw_cases(GATHER, seed=seed, count=5, quick=True) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_indices_into_a_table_without_rows_are_not_drawn() -> None:
    case = Case(sizes={"rows": 2, "width": 0}, dtype="float32", layouts=("contiguous",) * 4)
    assert not is_possible(GATHER, case)
    assert all(
        case.sizes["width"] or not case.sizes["rows"] for case in draw_cases(GATHER, seed=0, count=9, quick=True)
    )


def test_restrictions_hold() -> None:
    sizes = {"width": range(8, 4097, 8), "rows": (1, 3)}
    one = defined(lambda x, w: x, sizes=sizes, layouts=("contiguous", "padded"))
    cases = draw_cases(one, seed=0, count=20, quick=False)
    assert {case.sizes["rows"] for case in cases} == {1, 3}
    assert all(case.sizes["width"] in sizes["width"] for case in cases)
    assert {8, 16, 4096} <= {case.sizes["width"] for case in cases}
    assert {layout for case in cases for layout in case.layouts} == {"contiguous", "padded"}
    assert grown(one, 10_000) == {"rows": 3, "width": 2048}


def _picked(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]


def _by_values(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index] if float(table.sum()) > 0 else table[index] * 2


def _classes(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.gather(1, index[:, None])


@pytest.mark.parametrize("reference", [_picked, _by_values])
def test_outputs_are_bounded_too(reference: Any) -> None:
    """By the reference on the meta device; by what indices may pick where it depends on values."""
    fields: dict[str, Any] = {"inputs": ("float[rows, width]", "int64[n] < rows"), "labels": ("x", "i")}
    one = defined(reference, reference=reference, **fields)
    for case in (*draw_cases(one, seed=0, count=9, quick=True), timed_case(one, "float32", quick=True)):
        assert case.sizes["n"] * case.sizes["width"] <= 2 << 20
    large = timed_case(defined(reference, reference=reference, **fields, timing={"n": 1 << 16}), "float32", quick=True)
    assert (large.sizes["n"], large.sizes["width"]) == (1 << 16, 16)


def test_an_index_that_picks_single_elements_leaves_inputs_large() -> None:
    one = defined(
        _classes, reference=_classes, inputs=("float[rows, classes]", "int64[rows] < classes"), labels=("x", "i")
    )
    assert grown(one, 1 << 20) == {"rows": 1024, "classes": 512}


def _cases() -> list[Case]:
    drawn = draw_cases(GATHER, seed=3, count=30, quick=True)
    return random.Random(0).sample(drawn, 40)


def test_what_is_printed_is_what_ran() -> None:
    for case in _cases():
        names: dict[str, Any] = {"torch": torch, "kernel": lambda *inputs: inputs}
        *lines, call = reproduction(GATHER, case, "cpu").split("; ")
        exec("\n".join([*lines, f"result = {call}"]), names)
        drawn = draw(GATHER, case, "cpu")
        for shown, ran, bare in zip(names["result"], drawn.arguments, unguarded(drawn), strict=True):
            if not isinstance(shown, torch.Tensor):
                assert shown == ran == bare == 0.5
                continue
            assert torch.equal(shown, ran)
            assert torch.equal(shown, bare)
            assert shown.dtype == ran.dtype == bare.dtype
            assert not shown.numel() or shown.stride() == ran.stride() == bare.stride()


def test_a_case_in_words() -> None:
    layouts = ("padded", "contiguous", "offset", "contiguous")
    case = Case(sizes={"rows": 2, "width": 3}, dtype="bfloat16", layouts=layouts, values="large")
    assert case_text(GATHER, case) == "rows=2, width=3, bfloat16, x padded, i offset, large values"
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nudge_is_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(100).to(dtype)
    share = ((nudged(x) - x.double()) / x.double()).abs()
    assert torch.allclose(share, torch.full_like(share, torch.finfo(dtype).eps))
