"""Curves whose times do not matter."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of short windows, and no size is left out because others were slower or quicker."""
    monkeypatch.setattr("flatout.sizing.measuring.LOOKS", (1,))
    monkeypatch.setattr("flatout.sizing.measuring.FEWEST_ROUNDS", 1)
    monkeypatch.setattr("flatout.sizing.measuring.FAR_BELOW", 0.0)
    monkeypatch.setattr("flatout.sizing.measuring.FLAT_SIZES", 99)
    monkeypatch.setattr("flatout.sizing.measuring.MOST_LOOKS", 2)  # the second sets its steps by the first
    monkeypatch.setattr("flatout.tuning.windows.PAIR_SECONDS", 0.01)
    monkeypatch.setattr("flatout.tuning.windows.MOST_WINDOW_STEPS", 10)
