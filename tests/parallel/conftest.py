"""Processes that train together, as in tests/train."""

from __future__ import annotations

from tests.train.conftest import RunRanks, run_ranks

__all__ = ["RunRanks", "run_ranks"]
