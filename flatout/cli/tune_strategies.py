"""`flatout tune --devices N train.py:make`: how several ranks best share the training of one model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli.ended_by_signal import signals_as_exits
from flatout.cli.progress_line import progress_line
from flatout.cli.tune_results import PLAN_NAME, REPORT_NAME, Wanted, check_writable, on_cpu, save_results

if TYPE_CHECKING:
    from flatout.application.choose_parallel import ParallelChoice

FUNCTION = re.compile(r"(?P<source>[^:]+):(?P<name>[A-Za-z_][\w.]*)")
FOR_SCRIPTS = "it is for a script; train.py:make makes a step"


def named_function(target: Sequence[str]) -> str | None:
    """'train.py:make', where that is what is to be tuned; None: a script or a module is."""
    first = target[0] if target else ""
    return first if FUNCTION.fullmatch(first) and not Path(first).exists() else None


def tune_strategies(
    target: Sequence[str],
    devices: str | None,
    *,
    budget_seconds: float,
    plan_file: Path | None,
    device: str | None,
    allow_network: bool,
    wanted: Wanted,
    stray: Mapping[str, object],
) -> int:
    """The exit code. stray: options that are for scripts, with what was given."""
    from flatout.application.choose_parallel import choose_requested, strategies_asked
    from flatout.errors import UsageError
    from flatout.machine.visible_devices import show_only
    from flatout.plan import Plan, read_plan
    from flatout.report.document import to_text
    from flatout.report.strategies_text import strategies_document, strategies_text
    from flatout.tuning.short_budget import budget_option

    if len(target) > 1:
        raise UsageError(
            f"{' '.join(target[1:])} after {target[0]}", limit="the function is called with a plan and nothing else"
        )
    for option, value in stray.items():
        if value:
            raise UsageError(f"{option} with {target[0]}", limit=FOR_SCRIPTS, remedy=f"leave {option} out")
    if devices is None:
        raise UsageError(
            f"{target[0]} without --devices",
            limit="it says how many ranks share the training",
            remedy="use --devices 2; the other choices of a plan: flatout.tune(step, batches) in Python",
        )
    out = wanted.folder
    check_writable(out)
    show_only(device)
    plan = Plan() if plan_file is None else read_plan(plan_file)
    request = strategies_asked(
        target[0], devices, plan, budget_seconds, on_cpu=on_cpu(device), allow_network=allow_network
    )
    with signals_as_exits(), progress_line() as progress:
        found: ParallelChoice = choose_requested(request, progress)
    document = strategies_document(found, found.machine, include_private=wanted.include_private)
    save_results(found.plan, document, wanted, plans=found.chosen is not None)
    print(to_text(document) if wanted.json else strategies_text(found, found.machine, budget_option))
    if not wanted.json:
        if found.chosen is None:
            print(f"{'saved':<10}{out / REPORT_NAME}, and no plan: nothing was added to that of one process")
        else:
            start = f"flatout launch --nproc-per-node {found.ranks} YOUR_SCRIPT, with this plan"
            print(f"{'saved':<10}{out / PLAN_NAME}, {out / REPORT_NAME}      next: {start}")
    return 0
