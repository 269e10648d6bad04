"""The plan of an inference command: another command makes it than the plan of a script."""

from __future__ import annotations

from pathlib import Path

from flatout.errors import UsageError


def require_plan(path: Path | None) -> None:
    """UsageError where a plan is named that is not there."""
    if path is not None and not path.exists():
        raise UsageError(f"no plan at {path}", remedy="make one with: flatout tune-inference MODEL INPUTS")
