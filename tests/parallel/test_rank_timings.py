"""Latency and bandwidth of points that are known."""

from __future__ import annotations

import pytest

from flatout.parallel.rank_timings import fit

SIZES = [1024 * 4**power for power in range(9)]


def test_exact_points_give_back_their_line() -> None:
    found = fit([(size, 50e-6 + size / 2e9) for size in SIZES])
    assert found is not None
    assert found.latency_seconds == pytest.approx(50e-6)
    assert found.bytes_per_second == pytest.approx(2e9)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_disturbed_sizes_do_not_matter() -> None:
    points = [(size, 50e-6 + size / 2e9) for size in SIZES]
    points[2], points[7] = (points[2][0], points[2][1] * 8), (points[7][0], points[7][1] * 5)
    found = fit(points)
    assert found is not None
    assert found.latency_seconds == pytest.approx(50e-6)
    assert found.bytes_per_second == pytest.approx(2e9)


def test_points_that_determine_nothing_give_none() -> None:
    assert fit([]) is None
    assert fit([(1, 1.0), (2, 2.0)]) is None
    assert fit([(1, 3.0), (2, 2.0), (3, 1.0)]) is None
    assert fit([(1, 1.0), (1, 2.0), (1, 3.0)]) is None


def test_a_line_below_0_has_no_latency() -> None:
    found = fit([(1e6, 1e-9), (2e6, 2e-3), (3e6, 4e-3), (4e6, 6e-3)])
    assert found is not None
    assert found.latency_seconds >= 0
