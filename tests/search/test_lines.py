"""What a search says of what it tried, and of what it did not reach."""

from __future__ import annotations

from typing import Any

from flatout.levers.denormals import FlushDenormals
from flatout.levers.lever import Choice
from flatout.search.deadline import Deadline
from flatout.search.lines import not_tried_lines, nothing_found, reach_lines
from flatout.search.search import enough_for
from flatout.search.trial import NotTried, Trial
from flatout.sequential import compare_so_far
from flatout.tuning.results import SearchState
from flatout.tuning.short_budget import budget_option

REFUSED = NotTried(label="channels_last", reason="the model has no 2-d convolutions")
LATE = NotTried(label="bf16 autocast", reason="not reached in 24 s", for_lack_of_time=True)


def test_what_was_not_tried_is_not_said_to_be_of_no_help() -> None:
    state = SearchState(not_tried=[REFUSED])
    assert nothing_found(state, 40.0, budget_option) == "nothing helps here"
    state.not_tried.append(LATE)
    assert nothing_found(state, 40.0, budget_option) == "nothing found in the budget of 40 s, with 1 not reached"
    state.enough_seconds = 95.0
    assert nothing_found(state, 40.0, budget_option).endswith("with 1 not reached: try --budget 2m (about)")
    assert reach_lines(state, budget_option) == []  # said above
    state.kept = [Choice(FlushDenormals(), True)]
    assert reach_lines(state, budget_option) == ["1 not reached: try --budget 2m (about)"]
    state.short_run_steps = 87
    assert reach_lines(state, budget_option) == [
        "1 not reached: let it run for more than 87 steps (starting it takes longer than these), "
        "or try --budget 2m (about)"
    ]
    state.enough_seconds, state.stopped_after_seconds = None, 31.0
    assert reach_lines(state, budget_option) == ["1 not reached: the search was stopped after 31 s"]
    state.kept = []
    assert nothing_found(state, 40.0, budget_option) == (
        "nothing found until the search was stopped after 31 s, with 1 not reached"
    )
    state.not_tried = [REFUSED, REFUSED]
    assert reach_lines(state, budget_option) == []
    assert not_tried_lines(state.not_tried) == ["channels_last, channels_last: the model has no 2-d convolutions"]


def test_what_would_be_enough_has_the_same_share_for_the_proof() -> None:
    now: Any = [0.0]
    whole = Deadline(100.0, clock=lambda: now[0])
    assert enough_for(90.0, whole.reserving(40.0)) == 150.0
    assert enough_for(90.0, whole.reserving(80.0)) == 180.0  # of a larger budget the proof needs a smaller share
    assert budget_option(42.0) == "--budget 50s"


def test_what_was_faster_and_is_not_kept_is_not_said_to_be_of_no_help() -> None:
    faster = compare_so_far([(2.0, 1.0)] * 8, least_gain=0.01)
    given_back = Trial(
        label="threads 2", choices={"threads": 2}, exactness="rounding", outcome="dropped", reason="", comparison=faster
    )
    said = nothing_found(SearchState(trials=[given_back]), 40.0, budget_option)
    assert said == "nothing is kept: what was faster did not hold, or does not pay off"
