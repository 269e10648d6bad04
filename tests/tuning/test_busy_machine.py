"""A search on a machine that is busy for a while. The trials are pretended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.search.deadline import Deadline
from flatout.tuning.history import History
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.training_search import TrainingSearch
from tests.levers.test_catalogue import CPU
from tests.tuning.test_few_steps import Faster, FromStart, Pretended, Slower, Useless


class BusyAtFirst(Pretended):
    """Steps of 10 ms, which take 20 times as long until this time."""

    busy_until = 0.0

    @property
    def step_seconds(self) -> float:
        return 0.01 * (20 if self.now < self.busy_until else 1)

    @step_seconds.setter
    def step_seconds(self, seconds: float) -> None:
        """As it says."""


@pytest.fixture
def script(tmp_path: Path) -> BusyAtFirst:
    return BusyAtFirst(tmp_path, steps=10**6)


def searched(script: Pretended, *levers: Faster, history: History | None = None) -> TrainingSearch:
    limits = SearchLimits(deadline=Deadline(200.0, clock=lambda: script.now).reserving(80.0))
    search = TrainingSearch(script, CPU, levers, limits, history=history)
    search.run()
    return search


def breakdowns(script: Pretended) -> int:
    return sum(request == "breakdown" for run in script.runs for request, _ in run)


def test_plain_steps_are_watched_again_when_the_machine_is_idle_again(script: BusyAtFirst, tmp_path: Path) -> None:
    script.busy_until = 14.0
    search = searched(script, Slower(), Useless())
    assert search.first_seconds == search.state.observed.step_seconds == 0.01
    assert breakdowns(script) == 2
    idle = BusyAtFirst(tmp_path, steps=10**6)
    searched(idle, Slower(), Useless())
    assert breakdowns(idle) == 1


def test_what_is_kept_is_watched_again_as_well(script: BusyAtFirst) -> None:
    script.busy_until = 14.0
    search = searched(script, Useless(), Faster())
    assert [one.label for one in search.state.kept] == ["faster"]
    assert search.first_seconds == 0.01


def test_what_was_seen_on_a_busy_machine_is_not_left_for_later_tunes(script: BusyAtFirst, tmp_path: Path) -> None:
    script.busy_until = 14.0
    history = History(CPU, tmp_path / "history.json")
    search = searched(script, Slower(), FromStart(), history=history)
    history.save()
    busy, *later = search.state.trials
    assert [trial.label for trial in later] == ["from start", "slower"]
    assert (busy.label, busy.reason) == ("slower", "slower; the machine was busy then, tried again")
    noted = json.loads((tmp_path / "history.json").read_text())["trials"]
    assert [one["choice"] for one in noted] == ["from start", "slower"]
    assert [one["measured"] for one in noted] == pytest.approx([1.25, 0.667], rel=0.01)
