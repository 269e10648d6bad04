"""What a run as a whole shows."""

from __future__ import annotations

from flatout.diagnose.check import Seen, check
from flatout.diagnose.facts import Facts


@check(
    means="No optimizer stepped and no backward pass was followed by a change of weights in the main thread.",
    needs="a run that ended, or a profile's patience that ran out",
    if_wrong="the training happens where Flatout does not look, and everything else in the report is missing",
    always_note=True,
)
def no_step(facts: Facts) -> Seen | None:
    if facts.run is None or facts.run.steps or facts.run.processes:
        return None
    return Seen(
        title="no training step was found",
        evidence="no optimizer stepped and no backward pass was followed by a change of weights in the main thread of "
        "this process",
        remedy="if training happens where Flatout does not follow, as on other machines or in processes that make no "
        "optimizer, run Flatout there; training in another thread or with gradients of torch.func is not followed",
    )


@check(
    means="A choice of the plan was taken back while the script ran.",
    needs="the lever's own report",
    if_wrong="another tune finds the same plan again",
)
def rolled_back(facts: Facts) -> Seen | None:
    if facts.run is None or not facts.run.rolled_back:
        return None
    taken_back = facts.run.rolled_back
    return Seen(
        title=f"rolled back during the run: {', '.join(label for label, _ in taken_back)}",
        evidence="; ".join(f"{label}: {reason}" for label, reason in taken_back),
        remedy="the run continued without it; tune again for a plan that works throughout",
        fault=True,
        command=f"flatout tune {facts.command}",
    )
