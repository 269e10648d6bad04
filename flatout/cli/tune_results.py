"""Where `flatout tune` writes what it found, whatever it tuned."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.plan import Plan

PLAN_NAME, REPORT_NAME = "flatout.toml", "flatout-report.json"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Where the results go, and how."""

    folder: Path
    json: bool
    """Print one JSON document in place of text."""
    include_private: bool


def check_writable(folder: Path) -> None:
    """Minutes of trials must not end in a folder that takes no file."""
    from flatout.errors import UsageError

    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder.absolute()}: {error.strerror}",
            limit="the plan and the report are written there",
            remedy="choose another folder with --out",
        ) from None


def save_results(plan: Plan, document: dict[str, object], wanted: Wanted, *, plans: bool) -> None:
    """Write the report and, where `plans`, the plan; minutes of work must not be lost to a disk that is full by now."""
    from flatout.plan import write_plan
    from flatout.report.document import write_document

    try:
        if plans:
            write_plan(wanted.folder / PLAN_NAME, plan, include_private=wanted.include_private)
        write_document(wanted.folder / REPORT_NAME, document)
    except Exception:
        sys.stderr.write(f"the results could not be saved; here is the plan:\n\n{plan.to_toml()}\n")
        raise


def on_cpu(device: str | None) -> bool:
    """UsageError for a single GPU: each rank has one of its own."""
    from flatout.errors import UsageError

    if device not in (None, "cpu"):
        raise UsageError(
            f"--device {device} with --devices", limit="each rank has a GPU of its own", remedy="leave --device out"
        )
    return device == "cpu"
