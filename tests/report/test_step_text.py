import pytest

from flatout.levers.observed import Observed, OptimizerSeen
from flatout.report.step_text import counted_by, percent


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0%"), (0.0001, "under 0.1%"), (0.016, "1.6%"), (0.0949, "9.5%"), (0.34, "34%")]
)
def test_small_shares_keep_a_digit(share: float, text: str) -> None:
    assert percent(share) == text


def test_several_optimizers_are_told() -> None:
    one = OptimizerSeen(kind="Adam", parameters=3)
    assert counted_by(None) == counted_by(Observed(optimizers=(one,))) == ""
    assert counted_by(Observed(optimizers=(one, one))) == "2 optimizers: a step ends when the last of them steps"
