"""A plan from --plan FILE and from the options that go before it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.plan import Plan
    from flatout.plan_choices import ChoiceValue


def plan_with(path: Path | None, **choices: ChoiceValue | None) -> Plan:
    """The plan in the file (an empty one without a file), with each choice that is not None replaced."""
    from flatout.plan import Plan, read_plan

    plan = read_plan(path) if path is not None else Plan()
    for name, value in choices.items():
        if value is not None:
            plan = plan.with_choice(name, value, "asked for on the command line")
    return plan
