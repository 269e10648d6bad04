"""Which sizes are run and when it ends, on a machine of numbers with a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from flatout.errors import MachineError
from flatout.sizing.curve import BatchCurve, find_knee
from flatout.sizing.measuring import Prepared, Range, SizeFails, TooLarge, measure_curve

NOISE = (1.0, 1.003, 0.998, 1.002, 0.997, 1.001, 0.999)


class Machine:
    """Steps that take `fixed + each * size` seconds, in memory for `most` samples."""

    subject, device, peak_source, limit_bytes = "machine", "cpu", "counted", None

    def __init__(
        self,
        *,
        fixed: float = 0.032,
        each: float = 0.001,
        most: int = 1 << 30,
        fails: Callable[[int], bool] = lambda size: False,
        noise: float = 1.0,
    ) -> None:
        self.fixed, self.each, self.most, self.fails, self.noise = fixed, each, most, fails, noise
        self.now = 0.0
        self.prepared: list[int] = []
        self.windows: list[int] = []
        self._noise = itertools.cycle(NOISE)

    def prepare(self, batch_size: int) -> Prepared:
        if batch_size > self.most:
            raise TooLarge(f"batch {batch_size} is too large")
        self._fail(batch_size)
        self.prepared.append(batch_size)
        self._pass(batch_size, 2)
        return Prepared(samples_per_step=batch_size, peak_bytes=batch_size * 1000)

    def window(self, batch_size: int, *, settle: int, steps: int) -> float:
        assert batch_size in self.prepared, "a size that was never asked about"
        self._fail(batch_size)
        self.windows.append(batch_size)
        return self._pass(batch_size, settle + steps) / (settle + steps)

    def clock(self) -> float:
        return self.now

    def _fail(self, batch_size: int) -> None:
        if self.fails(batch_size):
            raise SizeFails(f"ValueError: not {batch_size}") from ValueError(f"not {batch_size}")

    def _pass(self, batch_size: int, steps: int) -> float:
        seconds = steps * (self.fixed + self.each * batch_size) * (1 + (next(self._noise) - 1) * self.noise)
        self.now += seconds
        return seconds


def measured(machine: Machine, sizes: Range, budget_seconds: float = 1e6) -> BatchCurve:
    return measure_curve(
        machine, sizes, share=0.95, budget_seconds=budget_seconds, tell=lambda line: None, clock=machine.clock
    )


def sizes_of(found: BatchCurve) -> list[int]:
    return [point.batch_size for point in found.points]


def test_the_knee_of_a_known_machine_is_found() -> None:
    found = measured(Machine(), Range(given=16, at_most=4096))
    knee, _ = find_knee(found.points, 0.95)
    rates = {size: size / (0.032 + 0.001 * size) for size in sizes_of(found)}
    assert knee is not None
    assert knee.batch_size == min(size for size, rate in rates.items() if rate >= 0.95 * max(rates.values()))


def test_sizes_are_the_given_one_times_powers_of_the_factor() -> None:
    sizes = Range(given=12, at_least=3, at_most=100)
    assert (list(sizes.larger()), list(sizes.smaller())) == ([24, 48, 96], [6, 3])
    found = measured(Machine(fixed=0.01), Range(given=12, at_least=6, at_most=30))
    assert sizes_of(found) == [6, 12, 24]
    assert (found.stopped_below, found.stopped_above) == ("at_least is 6", "at_most is 30")


def test_a_small_factor_repeats_no_size() -> None:
    assert list(Range(given=4, factor=1.1).smaller()) == [3, 2, 1]


def test_it_stops_before_the_first_size_that_does_not_fit() -> None:
    machine = Machine(fixed=1.0, most=100)
    found = measured(machine, Range(given=16))
    assert max(sizes_of(found)) == 64
    assert found.stopped_above == "batch 128 is too large"


def test_a_given_size_that_does_not_fit_leads_to_smaller_ones() -> None:
    found = measured(Machine(most=10), Range(given=64))
    assert max(sizes_of(found)) == 8
    assert found.stopped_above.endswith("is too large")


def test_where_nothing_fits_that_is_an_error() -> None:
    with pytest.raises(MachineError, match=r"no batch size from 1 to 8 could be run; batch 1 is too large"):
        measured(Machine(most=0), Range(given=8))


def test_it_stops_where_larger_sizes_are_no_faster() -> None:
    found = measured(Machine(fixed=1e-6), Range(given=16))
    assert found.stopped_above.endswith("gained less than 5% on a smaller one")
    assert max(sizes_of(found)) <= 128


def test_it_stops_below_where_sizes_are_far_slower() -> None:
    found = measured(Machine(), Range(given=64))
    assert found.stopped_below == "batch 8 ran at less than 25% of the best speed in its first steps"
    assert min(sizes_of(found)) == 8


def test_a_size_that_fails_is_left_out_and_named() -> None:
    found = measured(Machine(fails=lambda size: size in (1, 32)), Range(given=16, at_most=64))
    assert 32 not in sizes_of(found)
    assert 64 in sizes_of(found)
    assert [(one.batch_size, one.reason) for one in found.failed if one.batch_size == 32] == [
        (32, "ValueError: not 32")
    ]


def test_two_failures_in_a_row_end_a_side() -> None:
    found = measured(Machine(fails=lambda size: size > 16), Range(given=16))
    assert max(sizes_of(found)) == 16
    assert [one.batch_size for one in found.failed] == [32, 64]
    assert found.stopped_above == "the step failed at 2 sizes in a row"


def test_what_the_given_size_raises_is_the_users_own_error() -> None:
    with pytest.raises(ValueError, match=r"^not 16$"):
        measured(Machine(fails=lambda size: size == 16), Range(given=16))


def test_a_size_that_fails_later_is_left_out_then() -> None:
    machine = Machine()
    machine.fails = lambda size: size == 32 and len(machine.windows) > 14
    found = measured(machine, Range(given=16, at_most=64), 1e6)
    assert [one.batch_size for one in found.failed] == [32]
    assert 32 not in sizes_of(found)
    assert len({len(point.window_seconds) for point in found.points}) == 1


def test_rounds_take_the_sizes_in_turns() -> None:
    machine = Machine()
    measured(machine, Range(given=16, at_least=8, at_most=32))
    rounds = machine.windows[-9:]
    assert rounds[:3] == rounds[3:6][::-1] == rounds[6:]


def test_it_ends_as_soon_as_the_knee_is_decided() -> None:
    found = measured(Machine(fixed=0.3), Range(given=16, at_least=8, at_most=32))
    assert len(found.points[0].window_seconds) == 3


def test_noise_takes_more_rounds() -> None:
    few = measured(Machine(), Range(given=256, at_least=128, at_most=512))
    more = measured(Machine(noise=30.0), Range(given=256, at_least=128, at_most=512))
    assert len(more.points[0].window_seconds) > len(few.points[0].window_seconds)


def test_the_budget_ends_it_between_rounds() -> None:
    machine = Machine(noise=30.0)
    found = measured(machine, Range(given=256, at_least=128, at_most=512), 15.0)
    assert 15.0 <= machine.now < 30.0
    assert len({len(point.window_seconds) for point in found.points}) == 1


def test_sizes_whose_rounds_do_not_go_into_the_budget_are_not_tried() -> None:
    machine = Machine(fixed=0.5, each=0.01)
    found = measured(machine, Range(given=16), 60.0)
    assert "do not fit into the budget of 1 min" in found.stopped_above
    assert len(found.points[0].window_seconds) >= 3
    assert machine.now < 90.0


def test_a_given_size_that_alone_is_beyond_the_budget_is_measured_once() -> None:
    found = measured(Machine(fixed=100.0), Range(given=16), 10.0)
    assert sizes_of(found) == [16]
    assert "was spent on the first steps" in found.stopped_above


def measured_while_memory_fills(fits: int) -> BatchCurve:
    """From the second round on there is room for no more than `fits` samples."""
    told = [""]

    class Filling(Machine):
        def window(self, batch_size: int, *, settle: int, steps: int) -> float:
            if told[-1].startswith("round 2 ") and batch_size > fits:
                raise TooLarge(f"batch {batch_size} took more than there is")
            return super().window(batch_size, settle=settle, steps=steps)

    machine = Filling()
    sizes = Range(given=16, at_least=16, at_most=64)
    return measure_curve(machine, sizes, share=0.95, budget_seconds=1e6, tell=told.append, clock=machine.clock)


def test_a_size_that_does_not_fit_any_more_is_left_out_and_named() -> None:
    found = measured_while_memory_fills(32)
    assert sizes_of(found) == [16, 32]
    assert [(one.batch_size, one.reason) for one in found.failed] == [(64, "batch 64 took more than there is")]


def test_where_none_fits_any_more_that_is_an_error() -> None:
    with pytest.raises(MachineError, match=r"no batch size from 16 to 16 could be run; batch \d+ took more"):
        measured_while_memory_fills(0)
