"""The patch of a script for the plan of its tune: files found, compared with those that were tuned, and read."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.application.applied_plan import PLAN_NAME, for_scripts, same_script
from flatout.errors import MachineError, UsageError
from flatout.plan import Plan, read_plan
from flatout.private_details import arguments_digest
from flatout.report.document import read_document
from flatout.script.entry import Target
from flatout.script.own_files import changed_since, own_files

if TYPE_CHECKING:
    from flatout.source_patch.result import SourcePatch

REPORT_NAME = "flatout-report.json"


def patch_of(
    target: Target, *, plan: Path | None = None, report: Path | None = None, force: bool = False
) -> SourcePatch:
    """plan: default flatout.toml; report: default flatout-report.json beside it. Raises UsageError where the script is
    not the one that was tuned (unless force), MachineError without LibCST."""
    if importlib.util.find_spec("libcst") is None:
        raise MachineError("libcst is not installed", limit="flatout diff edits with it", remedy="pip install libcst")
    target.check()
    place = Path(PLAN_NAME) if plan is None else plan
    found = for_scripts(str(place), read_plan(place))
    if plan is None and found.script is not None and not same_script(found.script, target):
        raise UsageError(f"{place} is for {found.script}", remedy="name the plan of this script with --plan")
    warnings = [*_differences(target, found, place, force=force), *_arguments(target, found)]
    if not found.choices():
        raise UsageError(f"{place} has no choices", limit="there is nothing to write into the source")
    document, missing = _report(place, report)
    from flatout.source_patch.patch import source_patch

    return source_patch(
        found,
        [file.path for file in own_files(target)],
        name=target.name,
        report=document,
        no_report=missing,
        warnings=warnings,
    )


def _differences(target: Target, plan: Plan, place: Path, *, force: bool) -> list[str]:
    """What differs from the source that was tuned, in words, where it is to be patched all the same."""
    if not plan.sources:
        what = f"{place} does not say which version of the source was tuned"
        limit = "it is from an older Flatout, or written by hand"
    else:
        if not (changed := changed_since(target, plan.sources)):
            return []
        what, limit = (
            f"{', '.join(changed)} changed since the tune",
            "the plan was measured and proved for what it was",
        )
        if plan.script is not None and not same_script(plan.script, target):
            what, limit = f"{place} is for {plan.script}", f"{target.name} has another source"
    if not force:
        raise UsageError(what, limit=limit, remedy="tune again, or pass --force")
    return [f"{what}; {limit}"]


def _arguments(target: Target, plan: Plan) -> list[str]:
    if not target.arguments or plan.script is None or plan.arguments_digest == arguments_digest(target.arguments):
        return []
    return ["the plan was tuned with other arguments: tune again with these to be sure"]


def _report(plan: Path, report: Path | None) -> tuple[Mapping[str, object] | None, str]:
    """(the document, why there is none)"""
    place = plan.parent / REPORT_NAME if report is None else report
    if report is None and not os.path.exists(place):
        return None, f"there is no {REPORT_NAME} beside the plan"
    return read_document(place, "tune"), ""
