from types import SimpleNamespace
from typing import Any

import pytest

from flatout.levers.observed import Observed, OptimizerSeen
from flatout.report.tune_text import _nothing_kept, counted_by, percent
from flatout.tune.trial import NotTried


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0%"), (0.0001, "under 0.1%"), (0.016, "1.6%"), (0.0949, "9.5%"), (0.34, "34%")]
)
def test_small_shares_keep_a_digit(share: float, text: str) -> None:
    assert percent(share) == text


def test_several_optimizers_are_told() -> None:
    one = OptimizerSeen(kind="Adam", parameters=3)
    assert counted_by(None) == counted_by(Observed(optimizers=(one,))) == ""
    assert counted_by(Observed(optimizers=(one, one))) == "2 optimizers: a step ends with that of the last"


def test_what_was_not_tried_is_not_said_to_be_of_no_help() -> None:
    refused = NotTried(label="channels_last", reason="the model has no 2-d convolutions")
    late = NotTried(label="bf16 autocast", reason="the search's share was spent", for_lack_of_time=True)
    result: Any = SimpleNamespace(
        state=SimpleNamespace(not_tried=[refused]), request=SimpleNamespace(budget_seconds=40)
    )
    assert _nothing_kept(result) == "nothing helps here"
    result.state.not_tried.append(late)
    assert _nothing_kept(result) == (
        "nothing found in the budget of 40 s, with 1 not tried for lack of time (more: --budget)"
    )
