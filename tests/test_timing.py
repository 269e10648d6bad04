import time
import types
from collections.abc import Callable

import pytest

from flatout.errors import UsageError
from flatout.timing import Load, LoadWatch, Measurement, doubts, interleave, measure, measurement


class ScriptedClock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        return self.now_seconds

    def work(self, *durations: float) -> Callable[[], None]:
        remaining = list(durations)

        def function() -> None:
            self.now_seconds += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return function


def test_warm_up_is_kept_apart() -> None:
    clock = ScriptedClock()
    found = measure(
        clock.work(5.0, 2.0, 1.0), name="step", warmup=2, min_samples=4, min_seconds=0, max_seconds=99, clock=clock
    )
    assert found.warmup_seconds == (5.0, 2.0)
    assert found.samples_seconds == (1.0, 1.0, 1.0, 1.0)
    assert (found.name, found.median_seconds, found.iqr_seconds) == ("step", 1.0, 0.0)


def test_time_is_bounded() -> None:
    clock = ScriptedClock()
    found = measure(clock.work(2.0), max_seconds=7, clock=clock)
    assert clock.now_seconds == 8.0
    assert len(found.warmup_seconds) == 3
    assert len(found.samples_seconds) == 1
    assert "too few samples: 1" in found.warnings[0]


def test_a_slow_first_call_does_not_repeat_the_warm_up() -> None:
    clock = ScriptedClock()
    measure(clock.work(100.0), max_seconds=7, clock=clock)
    assert clock.now_seconds == 200.0


def test_samples_go_on_until_both_minimums() -> None:
    clock = ScriptedClock()
    found = measure(clock.work(0.01), warmup=1, min_samples=3, min_seconds=0.2, clock=clock)
    assert 20 <= len(found.samples_seconds) <= 21


def test_short_calls_are_grouped() -> None:
    clock = ScriptedClock()
    found = measure(clock.work(1e-6), warmup=1, min_seconds=0, clock=clock)
    assert found.calls_per_sample == 50
    assert found.median_seconds == pytest.approx(1e-6)


def test_the_device_is_waited_for_before_and_after() -> None:
    clock = ScriptedClock()
    queued = [3.0]  # work left over from before

    def launch() -> None:
        queued.append(1.0)

    def synchronize() -> None:
        clock.now_seconds += sum(queued)
        queued.clear()

    found = measure(launch, synchronize=synchronize, warmup=1, min_samples=6, min_seconds=0, clock=clock)
    assert set(found.warmup_seconds + found.samples_seconds) == {1.0}


def test_turns_alternate_so_that_drift_cancels() -> None:
    order: list[str] = []
    found = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmup=0, machine_fingerprint="m"
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(found[name].samples_seconds) for name in "ab"] == [3, 3]
    assert found["a"].machine_fingerprint == "m"


def test_turns_end_after_a_whole_round() -> None:
    clock = ScriptedClock()
    found = interleave({"a": clock.work(1.0), "b": clock.work(2.0)}, rounds=99, warmup=1, max_seconds=7, clock=clock)
    assert [found[name].samples_seconds for name in "ab"] == [(1.0, 1.0), (2.0, 2.0)]
    with pytest.raises(UsageError, match="0 rounds"):
        interleave({}, rounds=0)


def test_doubts_are_named() -> None:
    assert doubts([1.0] * 10) == ()
    assert "unstable" in doubts([1, 1, 1, 1.3, 1.3, 1.3])[0]
    assert doubts([1.0] * 9 + [10.0]) == ("outliers: 1 of 10 samples took over 3x the median",)
    assert "resolution" in doubts([1e-8] * 10, 1e-6)[0]
    with pytest.raises(UsageError, match="no samples"):
        measurement("step", [])


def test_an_exception_passes_through() -> None:
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(broken)


def test_a_measurement_survives_json() -> None:
    found = measurement("step", [1.0, 2.0], warmup_seconds=[3.0], machine_fingerprint="abc")
    assert Measurement.from_json(found.to_json()) == found
    assert isinstance(found.to_json()["samples_seconds"], list)


def test_others_at_work_are_told_from_ourselves() -> None:
    def load(own: float, others: float) -> Load:
        return Load(own_cores=own, others_cores=others, logical_cores=2)

    assert load(1.0, 1.0).contended
    assert not load(2.0, 0.0).contended
    assert not load(0.2, 0.5).contended  # a core was idle
    warned = measurement("step", [1.0] * 10, load=load(1.0, 1.0))
    assert warned.contended
    assert warned.warnings == ("contended: others kept 1.0 of 2 cores busy, none was idle",)
    assert measurement("step", [1.0] * 10).contended is None


def test_the_watch_sees_our_own_work_as_ours() -> None:
    watch = LoadWatch()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    found = watch.read()
    assert found is not None
    assert found.own_cores > 0
    assert found.others_cores >= 0


def test_cores_that_this_process_may_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, busy = [100.0], [[5.0, 5.0, 5.0, 5.0], [5.0, 15.0, 5.0, 12.0]]
    monkeypatch.setattr("flatout.timing.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("flatout.timing._busy_seconds_by_core", lambda: busy[now[0] > 100])
    monkeypatch.setattr("flatout.timing._busy_seconds_of_own", lambda: 0.0 if now[0] == 100 else 9.0)
    monkeypatch.setattr("flatout.timing._allowed_cores", lambda count: [1, 3])
    watch = LoadWatch()
    now[0] += 10.0
    found = watch.read()
    assert found is not None
    assert (found.own_cores, found.logical_cores) == (0.9, 2)
    assert found.others_cores == pytest.approx(0.8)
    assert watch.busy_share() == pytest.approx(1.7 / 4)


def test_a_watch_that_was_too_short_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("flatout.timing.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    watch = LoadWatch()
    now[0] += 1e-3
    assert watch.read() is None
    now[0] += 1.0
    assert watch.read() is not None
