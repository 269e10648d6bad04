"""Windows in turn, with processes that only pretend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flatout.levers.lever import Choice, Lever
from flatout.script.trial.answers import Window
from flatout.tuning.windows import Arm, Pace, RolledBackInside, compare_arms, is_enough, warm_up


class Faster(Lever):
    name, plan_field, exactness = "faster", "threads", "bit-identical"


CHOICE = Choice(Faster(), 1)
PACE = Pace(steps=4, settle=2, warm_steps=3)


class Pretended:
    """A process whose step takes `plain` seconds, or `candidate` with a choice on; each candidate step keeps `leak`
    bytes."""

    def __init__(
        self, candidate: float, *, plain: float = 0.01, leak: int = 0, first: float = 0.0, rolled_back: str = ""
    ) -> None:
        self.candidate, self.plain, self.leak, self.first, self.rolled_back = candidate, plain, leak, first, rolled_back
        self.order: list[bool] = []
        self.switching = 0.0
        self.resident, self.draw = 1 << 30, random.Random(0)
        self.peak: int | None = 2 << 30

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        on = bool(choices)
        self.order.append(on)
        base = self.candidate if on else self.plain
        self.resident += self.leak * (settle + steps) if on else 0
        slow, self.first = self.first, 0.0
        return Window(
            seconds=tuple(base * self.draw.uniform(0.999, 1.001) for _ in range(steps)),
            settle_seconds=(base + slow, *(base for _ in range(settle - 1))),
            apply_seconds=self.switching,
            resident_bytes=self.resident,
            peak_resident_bytes=self.peak,
            rolled_back={"faster": self.rolled_back} if self.rolled_back and on else {},
        )


def arms(process: Any) -> tuple[Arm, Arm]:
    return Arm(process), Arm(process, [CHOICE])


def test_faster_and_in_turns() -> None:
    process = Pretended(0.005, first=2.0)
    pairing = compare_arms(*arms(process), PACE, CHOICE)
    assert pairing.comparison.verdict == "faster"
    assert pairing.startup_seconds == pytest.approx(2.0, rel=0.01)
    assert process.order[1:7] == [False, True, True, False, True, False]
    assert pairing.comparison.pairs < PACE.most_pairs
    assert pairing.leak_bytes_per_step == 0


def test_peaks_are_those_of_processes_of_their_own() -> None:
    one, other = Pretended(0.005), Pretended(0.005)
    other.peak = 3 << 30
    assert compare_arms(*arms(one), PACE, CHOICE).peak_resident_bytes is None
    assert compare_arms(Arm(one), Arm(other, [CHOICE]), PACE, CHOICE).peak_resident_bytes == (2 << 30, 3 << 30)
    other.peak = None
    assert compare_arms(Arm(one), Arm(other, [CHOICE]), PACE, CHOICE).peak_resident_bytes is None


def test_what_the_plain_first_steps_take_as_well_is_no_part_of_the_start() -> None:
    """As where a script evaluates at its first step."""
    plain, planned = Pretended(0.005, first=4.0), Pretended(0.005, first=6.0)
    pairing = compare_arms(Arm(plain), Arm(planned, [CHOICE]), PACE, CHOICE)
    assert pairing.startup_seconds == pytest.approx(2.0, rel=0.01)


class Compiling(Faster):
    compiles = True


def test_a_second_graph_is_part_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of the first evaluation: the step that compiles it is no step of the comparison."""
    process, choice = Pretended(0.005), Choice(Compiling(), 1)
    plain = process.window

    def window(choices: Sequence[Choice], **words: Any) -> Window:
        found = plain(choices, **words)
        late = len(process.order) == 4 and bool(choices)
        return replace(found, seconds=(found.seconds[0] + 7.0, *found.seconds[1:])) if late else found

    monkeypatch.setattr(process, "window", window)
    pairing = compare_arms(Arm(process), Arm(process, [choice]), PACE, choice)
    assert pairing.comparison.verdict == "faster"
    assert pairing.startup_seconds == pytest.approx(7.0, rel=0.01)


def test_long_steps_that_come_back_are_no_part_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    process, choice = Pretended(0.005), Choice(Compiling(), 1)
    plain = process.window

    def window(choices: Sequence[Choice], **words: Any) -> Window:
        found = plain(choices, **words)
        return replace(found, seconds=(found.seconds[0] + 7.0, *found.seconds[1:])) if len(process.order) > 1 else found

    monkeypatch.setattr(process, "window", window)
    pairing = compare_arms(Arm(process), Arm(process, [choice]), PACE, choice)
    assert pairing.comparison.verdict == "faster"
    assert pairing.startup_seconds == pytest.approx(14.0, rel=0.01)


def test_slower_and_no_difference() -> None:
    assert compare_arms(*arms(Pretended(0.02)), PACE, CHOICE).comparison.verdict == "slower"
    assert compare_arms(*arms(Pretended(0.01)), PACE, CHOICE).comparison.verdict == "not significant"


@pytest.mark.parametrize(("ratio", "seconds"), [(1.2, 3.5), (1.01, 2.0)])
def test_what_looks_faster_gets_more_time_than_what_does_not(ratio: float, seconds: float) -> None:
    pace = replace(PACE, seconds=1.0, longest_seconds=3.0)
    taken = [(0.01 * factor, 0.01 / ratio) for factor in (0.8, 1.3, 1.0, 0.8, 1.3, 1.0, 0.8, 1.3)]
    assert next(n / 2 for n in range(4, 9) if is_enough(taken[:n], pace, n / 2)) == seconds


def test_a_leak_is_told() -> None:
    pairing = compare_arms(*arms(Pretended(0.005, leak=1 << 20)), PACE, CHOICE)
    assert pairing.leak_bytes_per_step == pytest.approx(1 << 20, rel=0.01)


def test_growth_by_a_little_in_long_steps_is_no_leak() -> None:
    """Compiled blocks of minGPT were refused for 72 KiB per step of 1.4 s: 180 MiB in an hour."""
    pace = Pace.for_step(1.4, seconds=60.0)
    for leak, found in ((72 << 10, 0.0), (1 << 20, 1 << 20)):
        pairing = compare_arms(*arms(Pretended(0.7, plain=1.4, leak=leak)), pace, CHOICE)
        assert pairing.comparison.verdict == "faster"
        assert pairing.leak_bytes_per_step == pytest.approx(found, rel=0.01)


def test_what_was_taken_back_inside_is_raised() -> None:
    with pytest.raises(RolledBackInside, match="no such thing"):
        compare_arms(*arms(Pretended(0.005, rolled_back="no such thing")), PACE, CHOICE)


def test_pairs_go_on_where_they_stopped() -> None:
    collected = [(0.01, 0.005)] * 6
    pairing = compare_arms(*arms(Pretended(0.005)), PACE, CHOICE, collected)
    assert pairing.comparison.pairs == len(collected) > 6


class FaultsMemoryIn(Pretended):
    """The first step of a window takes longer with a choice on, and without one too where `both`."""

    both = False

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        found = super().window(choices, settle=settle, steps=steps)
        taken = [*found.settle_seconds[:settle], *found.seconds]
        taken[0] += 1.0 if choices or self.both else 0.0
        return replace(found, settle_seconds=tuple(taken[:settle]), seconds=tuple(taken[settle:]))


@pytest.mark.parametrize("both", [False, True])
def test_a_first_step_of_long_steps_is_left_out_where_it_is_slow(both: bool) -> None:
    process = FaultsMemoryIn(1.2, plain=2.4)
    process.both = both
    pairing = compare_arms(*arms(process), Pace(steps=1, settle=0, warm_steps=1), CHOICE)
    assert pairing.candidate_seconds == pytest.approx(1.2, rel=0.01)
    assert pairing.baseline_seconds == pytest.approx(2.4, rel=0.01)
    assert pairing.comparison.verdict == "faster"


def test_so_it_is_in_a_process_of_its_own() -> None:
    plain, planned = FaultsMemoryIn(1.2, plain=2.4), FaultsMemoryIn(1.2, plain=2.4)
    pairing = compare_arms(Arm(plain), Arm(planned, [CHOICE]), Pace(steps=1, settle=0, warm_steps=1), CHOICE)
    assert pairing.candidate_seconds == pytest.approx(1.2, rel=0.01)
    plain.order.clear()
    compare_arms(Arm(plain), Arm(planned, [CHOICE]), Pace(steps=1, settle=0, warm_steps=1, most_pairs=3), CHOICE)
    assert len(plain.order) == 1 + 3  # its steps are as fast after a switch: none is left out


def test_warm_up_without_a_candidate() -> None:
    spent, usual = warm_up(Arm(Pretended(0.01, first=1.0)), PACE)  # type: ignore[arg-type]
    assert spent == pytest.approx(1.0, rel=0.01)
    assert usual == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("step", "steps", "turns"),
    [(1e-4, 60, 6), (1e-3, 30, 5), (0.01, 4, 4), (0.02, 4, 2), (0.05, 3, 1), (0.15, 1, 1), (5.0, 1, 1)],
)
def test_pace(step: float, steps: int, turns: int) -> None:
    pace = Pace.for_step(step, seconds=10.0)
    assert (pace.steps, pace.turns) == (steps, turns)


def test_a_pair_is_the_median_of_its_turns() -> None:
    process = Pretended(0.005)
    pairing = compare_arms(*arms(process), Pace(steps=4, settle=2, warm_steps=3, turns=5), CHOICE)
    assert pairing.comparison.pairs == 3
    turns = [tuple(process.order[i : i + 2]) for i in range(1, len(process.order), 2)]
    assert len(turns) == 15
    assert all(one != other for one, other in zip(turns[::2], turns[1::2], strict=False))  # first one, then the other
    assert {*turns[::2]} == {(False, True), (True, False)}
    assert pairing.baseline_seconds == pytest.approx(0.01, rel=0.01)
    assert pairing.candidate_seconds == pytest.approx(0.005, rel=0.01)


def test_levers_that_are_slow_to_switch_are_not_switched_often() -> None:
    process = Pretended(0.005)
    process.switching = 0.05
    pairing = compare_arms(*arms(process), Pace(steps=4, settle=2, warm_steps=3, turns=5), CHOICE)
    assert len(process.order) == 1 + 2 * pairing.comparison.pairs


def test_windows_in_turns_have_to_fit_into_a_short_script_too() -> None:
    pace = Pace(steps=10, settle=2, warm_steps=4, turns=5)
    assert pace.within(1000) == pace
    assert pace.within(120).turns == 1
    assert pace.within(120).steps == pace.in_one_turn().within(120).steps == 11


@pytest.mark.parametrize(("total", "steps"), [(None, 60), (10_000, 60), (120, 11), (40, 5), (25, 5), (8, 1)])
def test_windows_that_fit_into_a_short_script(total: int | None, steps: int) -> None:
    assert Pace(steps=60, settle=2, warm_steps=4).within(total).steps == steps


@pytest.mark.parametrize(
    ("step_seconds", "settle", "warm", "least"), [(1e-3, 2, 4, None), (0.3, 1, 2, 16), (2.4, 0, 2, 10), (60.0, 0, 1, 9)]
)
def test_long_steps_take_few_of_them(step_seconds: float, settle: int, warm: int, least: int | None) -> None:
    pace = Pace.for_step(step_seconds, seconds=10.0)
    assert (pace.settle, pace.warm_steps) == (settle, warm)
    assert least in (None, pace.least_steps)


class Other(Lever):
    name, plan_field, exactness = "other", "optimizer", "bit-identical"


def test_every_choice_that_is_tried_has_to_be_on() -> None:
    """Also one of several that are tried together; not one that the baseline has as well."""
    process, other = Pretended(0.005, rolled_back="no such thing"), Choice(Other(), 1)
    with pytest.raises(RolledBackInside, match="faster 1 no such thing"):
        compare_arms(Arm(process), Arm(process, [CHOICE, other]), PACE, other)
    compare_arms(Arm(process, [CHOICE]), Arm(process, [CHOICE, other]), PACE, other)


class Rhythm(Pretended):
    """A script in which every so many steps one takes five times as long; its levers change nothing."""

    def __init__(self, plain: float, every: int, step: int = 0) -> None:
        super().__init__(plain, plain=plain)
        self.every, self.step = every, step

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        found = super().window(choices, settle=settle, steps=steps)
        taken = [*found.settle_seconds[:settle], *found.seconds]
        for index in range(settle + steps):
            self.step += 1
            taken[index] *= 1 if self.step % self.every else 5
        return replace(found, settle_seconds=tuple(taken[:settle]), seconds=tuple(taken[settle:]))


@pytest.mark.parametrize(("step_seconds", "every"), [(1.5, 4), (0.2, 8)])
def test_a_rhythm_of_the_script_makes_neither_side_faster(step_seconds: float, every: int) -> None:
    """Where windows took turns in a rhythm of their own, A B B A, all long steps fell into those of one side."""
    for first in range(every):
        process = Rhythm(step_seconds, every, first)
        found = compare_arms(*arms(process), Pace.for_step(step_seconds, seconds=1e9), CHOICE).comparison
        assert found.verdict == "not significant"


def test_after_a_restart_the_sides_have_other_steps_of_the_script() -> None:
    orders = set()
    for before in range(8):
        process = Pretended(0.005)
        compare_arms(*arms(process), replace(PACE, most_pairs=before + 1), CHOICE, [(0.01, 0.005)] * before)
        orders.add(tuple(process.order[1:3]))
    assert orders == {(False, True), (True, False)}


def test_all_steps_count_in_the_mean() -> None:
    pairing = compare_arms(*arms(Rhythm(0.01, 8)), replace(PACE, most_pairs=32, stops_when_decided=False), CHOICE)
    assert pairing.baseline_seconds == pytest.approx(0.01, rel=0.01)
    assert pairing.mean_seconds == (pytest.approx(0.015, rel=0.2), pytest.approx(0.015, rel=0.2))
