import pytest

from flatout.levers.observed import Observed, OptimizerSeen
from flatout.report.step_text import breakdown_text, counted_by, percent


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0%"), (0.0001, "under 0.1%"), (0.016, "1.6%"), (0.0949, "9.5%"), (0.34, "34%")]
)
def test_small_shares_keep_a_digit(share: float, text: str) -> None:
    assert percent(share) == text


def test_several_optimizers_are_told() -> None:
    one = OptimizerSeen(kind="Adam", parameters=3)
    assert counted_by(None) == counted_by(Observed(optimizers=(one,))) == ""
    assert counted_by(Observed(optimizers=(one, one))) == "2 optimizers: a step ends when the last of them steps"


def test_evaluation_is_a_part_of_the_step_or_comes_on_top() -> None:
    parts = {"forward": 0.004, "evaluation": 0.002, "other": 0.001}
    assert breakdown_text(parts, 0.007) == "7 ms = forward 4 + evaluation 2 + other 1 ms"
    assert breakdown_text(parts, 0.005) == "5 ms = forward 4 + other 1 ms (and evaluation 2 ms a step)"
