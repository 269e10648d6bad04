"""Where a step's time goes: calls inside calls, on the host's clock and in a GPU's queue."""

from __future__ import annotations

import pytest

from flatout.script.spans import OpenRow, Spans, Timeline
from tests.fake_device import FakeDevice


def spans_on(*readings: float) -> Spans:
    clock, timeline = iter(readings), Timeline()
    timeline.mark = lambda: next(clock)
    return Spans(timeline)


def parts_of(spans: Spans, seconds: float = 0.0) -> dict[str, float]:
    return spans.read(OpenRow(0.0, seconds, spans.take(), 1, 0)).parts


def test_spans_give_each_kind_its_own_time() -> None:
    spans = spans_on(0.0, 1.0, 4.0, 10.0, 11.0, 12.0)
    outer = spans.enter("optimizer")
    inner = spans.enter("forward")
    spans.leave(inner)
    spans.leave(outer)
    assert parts_of(spans, 12.0) == {"optimizer": 7.0, "forward": 3.0, "other": 2.0}
    left_over = spans.enter("data")
    spans.take()
    spans.leave(left_over)  # it began before the step that just ended
    assert parts_of(spans) == {"other": 0.0}


def test_spans_left_by_an_exception_close_with_the_outer_one() -> None:
    spans = spans_on(0.0, 1.0, 5.0, 5.0, 7.0)
    outer = spans.enter("backward")
    spans.enter("forward")
    spans.leave(outer)
    spans.leave(spans.enter("pending"))
    spans.move("pending", "data")
    spans.move("pending", "data")
    assert parts_of(spans) == {"backward": 5.0, "data": 2.0, "other": 0.0}


def test_on_a_device_a_call_takes_the_time_of_what_it_queued() -> None:
    """Not the time until the call came back: that of a copy which waits for the queue is the queue's."""
    device = FakeDevice()
    timeline = Timeline(device)
    spans, begin = Spans(timeline), timeline.mark()
    for kind, seconds in (("forward", 0.02), ("backward", 0.04), ("transfer", 0.001)):
        span = spans.enter(kind)
        device.work(seconds)
        if kind == "transfer":
            device.synchronize()
        spans.leave(span)
    row = OpenRow(begin, timeline.mark(), spans.take(), 1, 0)
    assert timeline.wait()
    found = spans.read(row)
    assert found.seconds == pytest.approx(0.061)
    assert found.parts == pytest.approx({"forward": 0.02, "backward": 0.04, "transfer": 0.001, "other": 0.0})


def test_while_a_graph_is_captured_nothing_is_marked_or_waited_for() -> None:
    device = FakeDevice()
    timeline = Timeline(device)
    before = timeline.mark()
    device.is_capturing = True
    assert timeline.mark() is None
    assert timeline.seconds(before, None) == 0.0
    assert not timeline.wait()
    assert device.synchronizations == 0
