"""The reported gain: its interval covers what processes differ by, and short scripts are started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning import last_comparison
from flatout.tuning.last_comparison import (
    LEAST_WINDOWS,
    MANY_PROCESS_PAIRS,
    MOST_PROCESS_PAIRS,
    PlainAndPlanned,
    Started,
    _is_narrow,
    compare_afresh,
    comparison_of_groups,
)
from flatout.tuning.windows import Pace, pairing_of_runs

pytestmark = pytest.mark.usefixtures("forked_trials")


def group(ratio: float, pairs: int = 8) -> list[tuple[float, float]]:
    return [(ratio * (1 + 1e-4 * i), 1.0) for i in range(pairs)]


def test_the_interval_is_as_wide_as_processes_differ() -> None:
    alike = comparison_of_groups([group(1.3)] * 3, 0.01)
    unlike = comparison_of_groups([group(1.2), group(1.3), group(1.4)], 0.01)
    assert alike.verdict == "faster"
    assert alike.high - alike.low < 0.13
    assert unlike.low < 1.12
    assert unlike.high > 1.45


def test_two_pairs_show_a_large_gain_unless_they_differ_as_typical_ones_hardly_do() -> None:
    assert comparison_of_groups([group(1.35), group(1.48)], 0.01).verdict == "faster"
    assert comparison_of_groups([group(1.2), group(1.5)], 0.01).verdict == "not significant"


def test_two_large_gains_that_differ_are_a_gain_all_the_same() -> None:
    """By their variation alone the interval would be x0.2 to x22: worse than that of either pair by itself."""
    found = comparison_of_groups([group(1.8), group(2.6)], 0.01)
    assert found.verdict == "faster"
    assert found.low < 1.2
    assert found.high > 4
    assert comparison_of_groups([group(1.3), group(3.6)], 0.01).verdict == "not significant"


def test_processes_that_disagree_show_no_gain() -> None:
    assert comparison_of_groups([group(0.9), group(1.05), group(1.3)], 0.01).verdict == "not significant"


def test_one_pair_of_processes_shows_only_what_no_other_is_likely_to_undo() -> None:
    """However much its windows agree: where its memory lies may be worth some per cent."""
    assert comparison_of_groups([group(1.3)], 0.01).verdict == "not significant"
    assert comparison_of_groups([group(2.0)], 0.01).verdict == "faster"


def test_two_pairs_of_processes_that_contradict_what_is_usual_count_by_themselves() -> None:
    assert comparison_of_groups([group(1.3), group(1.35)], 0.01).verdict == "faster"
    assert comparison_of_groups([group(1.3), group(1.6)], 0.01).verdict == "not significant"


def test_too_few_pairs_have_no_interval() -> None:
    assert not comparison_of_groups([group(1.3, 1)] * 2, 0.01).has_interval


@pytest.mark.parametrize(
    ("ratios", "pairs"),
    [
        ([1.3, 1.3, 1.3], 2),
        ([1.1, 1.4, 1.25, 1.25], 3),  # not certain yet, and another pair may make it so
        ([0.8, 1.0, 0.9], 2),
    ],
)
def test_a_gain_that_is_not_certain_yet_gets_another_pair(
    ratios: list[float], pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, measured = 0.0, iter(ratios)

    def one_pair(sides: Any, pace: Pace, deadline: Any, left: float, wanted: int, pairs: Any) -> Any:
        nonlocal now
        now += 4.0
        pairs += group(next(measured))
        return pairing_of_runs(pairs, pace), pace

    monkeypatch.setattr(last_comparison, "one_pair_of_processes", one_pair)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    deadline = Deadline(100.0, clock=lambda: now).within(9.0)
    found = compare_afresh(PlainAndPlanned(setup, []), Pace.for_step(1e-3, seconds=9.0), deadline, 9.0)
    assert found.comparison.pairs == 8 * pairs


@pytest.mark.parametrize(
    ("ratio", "share", "pairs"),
    [(1.3, 0.19, 2), (1.3, 0.21, 1), (1.05, 0.09, 2), (1.05, 0.11, 1)],
)
def test_the_second_pair_may_exceed_the_budget(
    ratio: float, share: float, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair alone hardly ever shows a gain, and then all that was found would be dropped."""
    now, budget_seconds, left = 0.0, 100.0, 14.0

    def one_pair(sides: Any, pace: Pace, deadline: Any, left: float, wanted: int, pairs: Any) -> Any:
        nonlocal now
        now += (14.0 + share * budget_seconds) / 2
        pairs += group(ratio)
        return pairing_of_runs(pairs, pace), pace

    monkeypatch.setattr(last_comparison, "one_pair_of_processes", one_pair)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    deadline = Deadline(budget_seconds, clock=lambda: now).within(left)
    found = compare_afresh(PlainAndPlanned(setup, []), Pace.for_step(1e-3, seconds=left), deadline, left)
    assert found.comparison.pairs == 8 * pairs


@pytest.mark.parametrize(
    ("pair_seconds", "ratio", "pairs"),
    [
        (8.0, 1.3, 8 + 8),  # no time for a second new one: that of the proof
        (8.0, 2.0, 8),  # one is enough
        (4.0, 1.3, 8 + 8 + 8),  # there is time for new ones
    ],
)
def test_the_proofs_processes_are_compared_where_time_is_short(
    pair_seconds: float, ratio: float, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    arms: Any = ("plain", "planned")

    def one_pair(sides: Any, pace: Pace, deadline: Any, left: float, wanted: int, pairs: Any) -> Any:
        nonlocal now
        now += pair_seconds
        pairs += group(ratio)
        return pairing_of_runs(pairs, pace), pace

    def compare(plain: str, planned: str, pace: Pace, collected: list[Any]) -> None:
        assert (plain, planned) == arms
        collected += group(ratio)

    monkeypatch.setattr(last_comparison, "one_pair_of_processes", one_pair)
    monkeypatch.setattr(last_comparison, "compare_arms", compare)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    deadline = Deadline(100.0, clock=lambda: now).within(12.0)
    found = compare_afresh(
        PlainAndPlanned(setup, []), Pace.for_step(1e-3, seconds=9.0), deadline, 9.0, started=Started(pairs=[arms])
    )
    assert found.comparison.pairs == pairs
    assert found.comparison.verdict == "faster"


@pytest.mark.parametrize(
    ("kept", "pairs", "verdict"),
    [
        (1.7, 8 + 8, "faster"),  # they decide
        (1.3, 8 + 8 + 8 + 8, "faster"),  # they differ from the new pair: other new ones decide
        (1.0, 8 + 8 + 8, "not significant"),
        (None, 8 + 8, "faster"),  # they have ended
    ],
)
def test_where_the_proofs_processes_do_not_decide_a_new_pair_may_take_longer(
    kept: float | None, pairs: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def one_pair(sides: Any, pace: Pace, deadline: Any, left: float, wanted: int, pairs: Any) -> Any:
        nonlocal now
        now += 8.0
        pairs += group(1.8)
        return pairing_of_runs(pairs, pace), pace

    def compare(*arms: Any, collected: list[Any]) -> None:
        collected += group(kept or 9.9, 8 if kept else 1)
        if kept is None:
            raise TrialEnded("train.py", 0, steps=3)

    monkeypatch.setattr(last_comparison, "one_pair_of_processes", one_pair)
    monkeypatch.setattr(last_comparison, "compare_arms", compare)
    monkeypatch.setattr(last_comparison, "USUAL_DEVIATION", 0.1)  # one pair does not decide
    setup, arms = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path), ("plain", "planned")
    deadline = Deadline(100.0, clock=lambda: now).within(12.0)
    pace = Pace.for_step(1e-3, seconds=9.0)
    started = Started(pairs=[arms])  # type: ignore[list-item]
    told: list[str] = []
    found = compare_afresh(PlainAndPlanned(setup, []), pace, deadline, 9.0, started=started, progress=told.append)
    assert (found.comparison.pairs, found.comparison.verdict) == (pairs, verdict)
    longer = "is not certain yet: another comparison takes about 12 s longer than the budget"
    assert [one.partition(" ")[2] for one in told] == ([longer] if kept == 1.3 else [])


@pytest.mark.parametrize(
    ("ratios", "new", "pairs", "verdict"),
    [
        ((1.3, 1.3), 0, 8 + 8, "faster"),
        ((2.0, 2.0), 0, 8, "faster"),  # one is enough
        ((1.0, 1.0), 0, 8, "not significant"),  # and here no other would help
        ((1.3, 1.6), 0, 8 + 8, "not significant"),  # there is no time for new ones
        ((1.3, None), 0, 8, "not significant"),  # one has ended
        ((None, 2.0), 0, 8, "faster"),
        ((None, None), 1, 8, "not significant"),
    ],
)
def test_where_there_is_no_time_for_new_processes_those_of_the_proof_come_first(
    ratios: tuple[float | None, ...],
    new: int,
    pairs: int,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, made, left = 0.0, 0, iter(ratios)

    def one_pair(sides: Any, pace: Pace, deadline: Any, left: float, wanted: int, pairs: Any) -> Any:
        nonlocal now, made
        now, made = now + 8.0, made + 1
        pairs += group(1.3)
        return replace(pairing_of_runs(pairs, pace), startup_seconds=3.0), pace

    def compare(*arms: Any, collected: list[Any]) -> Any:
        nonlocal now
        now, ratio = now + 8.0, next(left)
        if ratio is None:
            raise TrialEnded("train.py", 0, steps=3)
        collected += group(ratio)
        return replace(pairing_of_runs(collected, arms[-1]), mean_seconds=(1.3, 1.0), peak_resident_bytes=(2, 1))

    monkeypatch.setattr(last_comparison, "one_pair_of_processes", one_pair)
    monkeypatch.setattr(last_comparison, "compare_arms", compare)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    deadline = Deadline(100.0, clock=lambda: now).within(1.0)
    started = Started(pairs=[("a", "b")] * 2, startup_seconds=7.0, come_first=True)  # type: ignore[list-item]
    pace = Pace.for_step(1e-3, seconds=1.0)
    found = compare_afresh(PlainAndPlanned(setup, []), pace, deadline, 1.0, started=started)
    assert (found.comparison.pairs, found.comparison.verdict, made) == (pairs, verdict, new)
    assert found.startup_seconds == (3.0 if new else 7.0)
    assert found.peak_resident_bytes is None  # what was recorded in them took memory too


def test_a_budget_that_is_nearly_spent_still_buys_an_interval(tmp_path: Path) -> None:
    assert compared(tmp_path, 100_000, seconds=0.001, budget_seconds=0.001) >= LEAST_WINDOWS


SHORT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).pow(2).mean().backward()
    optimizer.step()
"""


def compared(tmp_path: Path, steps: int, seconds: float = 0.3, budget_seconds: float = 3.0) -> int:
    script = tmp_path / "short.py"
    script.write_text(SHORT.format(steps=steps))
    setup = TrialSetup(target=Target(path=str(script)), work_folder=tmp_path)
    pace = Pace.for_step(1e-3, seconds=seconds)
    return compare_afresh(PlainAndPlanned(setup, []), pace, Deadline(budget_seconds), seconds).comparison.pairs


@pytest.mark.slow
def test_a_script_that_ends_early_is_started_again(tmp_path: Path) -> None:
    assert compared(tmp_path, 100) >= LEAST_WINDOWS


@pytest.mark.slow
def test_a_script_too_short_for_any_window(tmp_path: Path) -> None:
    with pytest.raises(TrialEnded):
        compared(tmp_path, 8)


def test_a_script_whose_processes_differ_much_is_not_measured_for_ever() -> None:
    wide = comparison_of_groups([group(1.3 + 0.1 * (-1) ** i) for i in range(10)], 0.01)
    assert 0.03 < (wide.high - wide.low) / 2 / wide.ratio < 0.08
    narrow = comparison_of_groups([group(1.3 + 0.08 * (-1) ** i) for i in range(12)], 0.01)
    assert not _is_narrow(narrow, 9, undecided=False)
    assert _is_narrow(narrow, MANY_PROCESS_PAIRS, undecided=False)
    assert not _is_narrow(narrow, MANY_PROCESS_PAIRS, undecided=True)
    assert not _is_narrow(comparison_of_groups([group(1.3)] * 2, 0.01), 2, undecided=False)
    comparison_of_groups([group(1.3 + 0.1 * (-1) ** i) for i in range(MOST_PROCESS_PAIRS)], 0.01)


def test_processes_are_added_until_the_interval_is_narrow() -> None:
    """Eight that differ by 3 % either way say more than three of them."""
    ratios = [1.27, 1.33, 1.30, 1.28, 1.32, 1.29, 1.31, 1.30]
    few, many = (comparison_of_groups([group(ratio, 4) for ratio in ratios[:count]], 0.01) for count in (3, 8))
    assert many.high - many.low < 0.5 * (few.high - few.low)
    assert many.low < 1.30 < many.high
