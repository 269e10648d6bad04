"""The knee: named where the intervals show it, unknown with a reason where they do not."""

from __future__ import annotations

import json

import pytest

from flatout.report.document import document, to_text
from flatout.sizing.curve import BatchCurve, BatchPoint, FailedSize, fastest, find_knee, judged

JITTER = (1.0, 1.004, 0.997, 1.002, 0.999, 1.003, 0.998, 1.001)


def curve_of(
    speeds: dict[int, float], jitter: dict[int, float] | None = None, *, rounds: int = 8, share: float = 0.95
) -> list[BatchPoint]:
    """Points of that many samples a second. jitter: by how much a size's rounds differ more than the others'."""
    points = []
    for place, (size, speed) in enumerate(speeds.items()):
        wobble = (jitter or {}).get(size, 1.0)
        turns = [JITTER[(place * 3 + turn) % len(JITTER)] for turn in range(rounds)]
        seconds = tuple(size / speed * (1 + (one - 1) * wobble) for one in turns)
        points.append(BatchPoint(batch_size=size, samples_per_step=size, window_seconds=seconds, peak_bytes=size << 20))
    return list(judged(points, share))


def test_the_smallest_size_within_the_share_is_the_knee() -> None:
    knee, reason = find_knee(curve_of({1: 100, 2: 190, 4: 350, 8: 600, 16: 970, 32: 1000, 64: 990}), 0.95)
    assert knee is not None
    assert knee.batch_size == 16
    assert reason.startswith("the smallest batch within 95% of the best (1,000 samples/s at 32): 16 at 97.")


def test_another_share_moves_the_knee() -> None:
    knee, _ = find_knee(curve_of({4: 350, 8: 600, 16: 970, 32: 1000}, share=0.5), 0.5)
    assert knee is not None
    assert knee.batch_size == 8


def test_a_curve_that_still_rises_says_so() -> None:
    knee, reason = find_knee(curve_of({1: 100, 2: 190, 4: 350}), 0.95)
    assert knee is not None
    assert knee.batch_size == 4
    assert "the largest measured, where speed still rises: 2 at 54." in reason


def test_one_undecided_size_below_the_knee_is_named() -> None:
    points = curve_of({4: 400, 8: 950, 16: 990, 32: 1000}, {8: 8.0})
    knee, reason = find_knee(points, 0.95)
    assert points[1].standing == "unclear"
    assert knee is not None
    assert knee.batch_size == 16
    assert "; possibly 8 at 9" in reason


def test_a_machine_too_noisy_to_tell_has_no_knee() -> None:
    knee, reason = find_knee(curve_of({4: 400, 8: 930, 16: 950, 32: 1000}, {8: 30.0, 16: 30.0}), 0.95)
    assert knee is None
    assert reason.startswith("the rounds differ too much: the smallest batch within 95% of the best may be 8")
    assert "or 32; measure again on an idle machine" in reason


def test_a_best_that_may_be_another_is_no_best() -> None:
    points = curve_of({4: 400, 8: 1000, 16: 500, 32: 990}, {8: 60.0})
    assert fastest(points).batch_size in (8, 32)
    assert [point.standing for point in points][1] == "unclear"
    knee, reason = find_knee(points, 0.95)
    assert knee is None or knee.batch_size == 32
    assert "8" in reason


@pytest.mark.parametrize(("rounds", "said"), [(1, "1 round, and at least 3 are needed"), (2, "2 rounds, and")])
def test_too_few_rounds_tell_no_knee(rounds: int, said: str) -> None:
    points = curve_of({4: 400, 8: 1000}, rounds=rounds)
    knee, reason = find_knee(points, 0.95)
    assert knee is None
    assert reason.startswith(said)
    assert points[0].samples_per_second_interval is None


def test_one_size_is_no_curve() -> None:
    assert find_knee(curve_of({4: 400}), 0.95) == (None, "only one size was measured, so there is no curve")


def test_the_interval_holds_the_speed() -> None:
    for point in curve_of({4: 400, 8: 1000}):
        interval = point.samples_per_second_interval
        assert interval is not None
        assert interval[0] <= point.samples_per_second <= interval[1]
        assert interval[1] / interval[0] < 1.02


def made(points: list[BatchPoint]) -> BatchCurve:
    knee, reason = find_knee(points, 0.95)
    return BatchCurve(
        subject="MLP",
        device="cpu",
        given_batch_size=8,
        points=tuple(points),
        knee=knee,
        knee_reason=reason,
        share=0.95,
        peak_source="measured",
        limit_bytes=1 << 30,
        stopped_below="1 is the smallest",
        stopped_above="at_most is 32",
        failed=(FailedSize(batch_size=1, reason="ValueError: too few"),),
        notes=("contended: others were at work",),
        seconds=2.0,
    )


def test_one_screen_shows_table_knee_ends_failures_and_the_caveat() -> None:
    lines = str(made(curve_of({8: 400, 16: 970, 32: 1000}))).splitlines()
    assert lines[0] == "speed     MLP on cpu · batch 8 given · 8 rounds in turns"
    assert lines[1].split() == ["batch", "samples/s", "95", "%", "interval", "a", "step", "peak", "of", "the", "best"]
    assert lines[2].endswith("████████              40%  given")
    assert lines[3].endswith("97%  knee")
    assert lines[4].endswith("█" * 20 + " 100%  best")
    text = "\n".join(lines[5:])
    for part in ("knee      16: the", "no larger batch: at_most is 32", "failed    batch 1: Value", "learning rate"):
        assert part in text


def test_an_unknown_peak_is_said_to_be_unknown() -> None:
    points = [BatchPoint(batch_size=8, samples_per_step=8, window_seconds=(0.1,), peak_bytes=None)]
    text = str(made(list(judged(points, 0.95))))
    assert text.splitlines()[2].split()[:5] == ["8", "80", "unknown", "100", "ms"]
    assert "knee      unknown: 1 round, and at least 3 are needed" in text


def test_the_document_holds_every_figure() -> None:
    found = json.loads(to_text(document("batch-curve", made(curve_of({8: 400, 16: 970, 32: 1000})).to_json())))
    assert (found["knee"], found["best"], found["rounds"], found["given_batch_size"]) == (16, 32, 8, 8)
    assert [point["batch_size"] for point in found["points"]] == [8, 16, 32]
    assert len(found["points"][0]["window_seconds"]) == 8
    assert found["failed"] == [{"batch_size": 1, "reason": "ValueError: too few"}]


def test_the_document_of_a_single_round_is_json() -> None:
    found = json.loads(to_text(document("batch-curve", made(curve_of({8: 400, 16: 970}, rounds=1)).to_json())))
    assert found["knee"] is None
    assert found["points"][0]["samples_per_second_interval"] is None
