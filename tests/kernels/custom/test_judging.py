"""How far a result may be from the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flatout.kernels.custom.judging import Rule, difference

RULE = Rule(tolerance={}, longest=64)


def judged(found: Tensor, truth: Tensor, own: Tensor | None = None, rule: Rule = RULE) -> str | None:
    own = truth.to(found.dtype) if own is None else own
    return difference(found, truth, own, truth, rule)


@pytest.fixture
def truth() -> Tensor:
    return torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_allowed_and_one_wrong_element_is_not(truth: Tensor, dtype: torch.dtype) -> None:
    found = (truth * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert judged(found, truth) is None
    found[17] *= 1.2
    said = judged(found, truth)
    assert said is not None
    assert said.startswith("element [17] is ")
    assert said.endswith("1 of 1000 elements wrong")


def test_what_the_reference_loses_a_kernel_may_lose_too(truth: Tensor) -> None:
    found = (truth * 1.01).float()
    assert judged(found, truth) is not None
    assert judged(found, truth, own=(truth * 0.995).float()) is None


def test_where_the_reference_is_nan_in_one_precision_alone_nothing_is_said(truth: Tensor) -> None:
    truth[3] = math.nan
    own = truth.bfloat16()
    own[3] = 0.0
    for value in (0.0, math.nan, 0.01):
        found = own.clone()
        found[3] = value
        assert judged(found, truth, own) is None
    found[4] = math.nan
    assert judged(found, truth, own) is not None


def test_what_a_rounding_of_the_inputs_changes_is_allowed(truth: Tensor) -> None:
    found = (truth * 1.01).float()
    assert difference(found, truth, truth.float(), truth * 1.005, RULE) is None


def test_a_tolerance_of_the_user_replaces_the_rest(truth: Tensor) -> None:
    found = (truth * 1.01).float()
    assert judged(found, truth, rule=Rule(tolerance={"float32": 0.02}, longest=1)) is None
    assert judged(truth.float(), truth, rule=Rule(tolerance={"float32": 0.0}, longest=1)) is None
    strict = Rule(tolerance={"float32": 0.005}, longest=1)
    assert "allowed 0.005" in str(judged(found, truth, own=(truth * 0.9).float(), rule=strict))


def test_cancelled_values_are_measured_against_the_others(truth: Tensor) -> None:
    truth[3] = 1e-12
    found = truth.float()
    found[3] = 1e-8
    assert judged(found, truth) is None


@pytest.mark.parametrize(
    ("found", "truth", "own", "right"),
    [
        (math.nan, math.nan, math.nan, True),
        (math.nan, 1.0, 1.0, False),
        (1.0, math.nan, math.nan, False),
        (math.inf, math.inf, math.inf, True),
        (-math.inf, math.inf, math.inf, False),
        (math.inf, 1e39, math.inf, True),  # beyond fp32
        (1.0, 1.0, math.inf, True),  # the reference overflows on its way, the kernel does not
    ],
)
def test_infinities_and_nan(found: float, truth: float, own: float, right: bool) -> None:
    expected = torch.tensor([1.0, truth], dtype=torch.float64)
    said = judged(torch.tensor([1.0, found]), expected, own=torch.tensor([1.0, own]))
    assert (said is None) is right


def test_whole_numbers_are_equal_or_wrong() -> None:
    truth = torch.tensor([1, 2, 3])
    assert judged(torch.tensor([1, 2, 3]), truth) is None
    assert judged(torch.tensor([1, 2, 4]), truth) == "element [2] is 4, expected 3; 1 of 3 elements wrong"
    assert (
        judged(torch.tensor(True), torch.tensor(False)) == "the result is True, expected False; 1 of 1 elements wrong"
    )


def test_nothing_is_right() -> None:
    assert judged(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)) is None
    zeros = torch.zeros(4, dtype=torch.float64)
    assert judged(torch.zeros(4), zeros) is None
    assert judged(torch.tensor([0.0, 0.0, 0.0, 0.1]), zeros) is not None
