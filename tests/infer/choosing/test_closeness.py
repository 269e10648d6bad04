"""What counts as near enough to fp32."""

from __future__ import annotations

import json
import math

import pytest
import torch

from flatout.errors import UsageError
from flatout.infer.choosing.closeness import Accuracy, Closeness, Tolerance, scores_of


def compared(reference: torch.Tensor, candidate: torch.Tensor, *, scores: bool = True) -> Accuracy:
    closeness = Closeness()
    closeness.add("output", reference, candidate, scores=scores)
    return closeness.found()


def test_the_same_bits() -> None:
    logits = torch.randn(50, 10)
    found = compared(logits, logits.clone())
    assert (found.same_bits, found.error, found.agreement, found.same_answer) == (True, 0.0, 1.0, 1.0)
    assert str(found) == "the same bits"


def test_error_is_noise_over_signal_wherever_it_is_added() -> None:
    reference = 3 * torch.randn(10_000, generator=torch.Generator().manual_seed(0)) + 100
    whole = compared(reference, reference + 0.3, scores=False)
    assert whole.error == pytest.approx(0.1, rel=0.03)  # an offset is an error too
    parts = Closeness()
    for a, b in zip(reference.chunk(7), (reference + 0.3).chunk(7), strict=True):
        parts.add("output", a, b, scores=False)
    assert parts.found().error == pytest.approx(whole.error, rel=1e-6)
    assert parts.found().agreement is None


def test_the_worst_output_counts() -> None:
    closeness = Closeness()
    closeness.add("a", torch.randn(99), torch.randn(99), scores=False)
    closeness.add("b", torch.ones(5), torch.ones(5), scores=False)
    assert closeness.found().error > 0.5


def test_a_tie_is_no_lost_answer_but_another_answer_is() -> None:
    reference = torch.tensor([[1.00, 0.99, 0.0], [1.0, 0.5, 0.0]])
    swapped = torch.tensor([[0.99, 1.00, 0.0], [1.0, 0.5, 0.0]])
    found = compared(reference, swapped)
    assert (found.agreement, found.same_answer) == (1.0, 0.5)
    wrong = compared(reference, torch.tensor([[1.0, 0.99, 0.0], [0.5, 1.0, 0.0]]))
    assert wrong.agreement == 0.5
    assert "agreement 50.00% of 2 answers is below 99.00%" in Tolerance().why_not(wrong)


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.75, 0.25]])
    expected = float((p * (p / q).log()).sum())
    assert compared(p.log(), q.log()).divergence == pytest.approx(expected, rel=1e-5)
    shifted = compared(p.log(), p.log() + 7)
    assert shifted.divergence == pytest.approx(0.0, abs=1e-9)


def test_what_is_not_finite() -> None:
    good = torch.randn(4, 3)
    broken = good.clone()
    broken[1, 2] = math.nan
    found = compared(good, broken)
    assert Tolerance(max_error=1e9, min_agreement=0.0).why_not(found).startswith("it gives inf or NaN")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["error"] is None
    masked = torch.tensor([[0.0, 1.0, -math.inf]])
    assert Tolerance().why_not(compared(masked, masked.clone())) == ""
    assert compared(masked, masked + 0.001).divergence == pytest.approx(0.0, abs=1e-9)
    unmasked = compared(masked, torch.tensor([[0.0, 1.0, 5.0]]))
    assert unmasked.agreement == 0.0


def test_labels_agree_or_do_not() -> None:
    found = compared(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]))
    assert (found.agreement, found.error, found.same_bits) == (0.75, 0.0, False)


def test_no_bound_asks_for_more_than_the_model_itself_gives() -> None:
    plain = Accuracy(error=0.08, largest_error=0.3, agreement=0.97, divergence=0.02, answers=100)
    near = Accuracy(error=0.082, largest_error=0.3, agreement=0.97, divergence=0.021, answers=100)
    assert Tolerance().why_not(near)
    assert Tolerance().why_not(near, plain) == ""
    worse = Accuracy(error=0.1, largest_error=0.3, agreement=0.9, divergence=0.02, answers=100)
    assert "error 10.0% is above 8.8%" in Tolerance().why_not(worse, plain)
    assert "agreement 90.00%" in Tolerance().why_not(worse, plain)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"max_error": -1}, "max_error is -1"),
        ({"min_agreement": 99}, "min_agreement is 99"),
        ({"max_error": "x"}, "'x'"),
    ],
)
def test_bounds_are_checked(bounds: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Tolerance(**bounds)


def test_another_shape_is_an_error() -> None:
    with pytest.raises(UsageError, match="output is \\[3\\]; in fp32 it is \\[4\\]"):
        compared(torch.ones(4), torch.ones(3))


def test_scores_are_guessed_and_the_guess_is_said() -> None:
    assert scores_of(["output['logits']"], [(7, 100)], None)[0]
    assert scores_of(["output"], [(10,)], None) == (True, scores_of(["output"], [(10,)], None)[1])
    assert scores_of(["output"], [(7, 100)], 100)[0]
    guess, why = scores_of(["output"], [(7, 64)], 100)
    assert not guess
    assert "scores=True" in why
    assert not scores_of(["output.hidden", "output.pooled"], [(7, 64), (64,)], 100)[0]
