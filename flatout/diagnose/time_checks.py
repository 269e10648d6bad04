"""Where the time goes outside of the model, the loader and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flatout.diagnose.check import Seen, check, slowest_lines, where
from flatout.diagnose.facts import Facts
from flatout.profiling.profile import OperatorRow, evaluation_in_step, sizes_in
from flatout.script.behaviour_seen import LineTime
from flatout.script.source_facts import Kind
from flatout.units import format_seconds

EVALUATION_SHARE_LIMIT, OTHER_SHARE_LIMIT = 0.3, 0.3
PROFILED_EVALUATION_LIMIT = 1.0
"""Of a step: a profile sees few epochs, of a script that may be run for short ones to try it."""
LEAST_SHARE = 0.05
LEAST_FORWARD = 0.1
"""Of the time of the backward pass: a forward pass takes a third of it or more."""
LEAST_SAMPLES = 12
LEAST_TIMED_STEPS = 8
PYTHON_SHARE = 0.1
MANY_LOSSES = 16
"""Calls of a loss at one line in a step: more than tasks or scales, as few as the positions of a short sequence."""
OPERATOR_SHARE, MANY_CALLS = 0.1, 100
"""Of a line's time, in operators: from here on the line computes with tensors, unless it calls that many in a step."""
CONTENDED_SLOWDOWN = 40.0
"""So much longer an operator takes at times where its threads wait for a core that others use."""
ELEMENT_OPERATORS = ("aten::item", "aten::is_nonzero", "aten::lift_fresh")
"""They read or write one number of a tensor. A line that calls many in a step is a loop over numbers, operators and
all."""
UNBIND = "aten::unbind"
"""What a loop over a tensor calls, once: of a vector it makes its numbers."""


@check(
    means="Evaluation takes much of the time.",
    needs="at least 30 % of a step on average in a run, as much as training in a profile",
    if_wrong="what would have been seen earlier is seen later",
    always_note=True,
)
def evaluation(facts: Facts) -> Seen | None:
    seen = facts.observed
    share = seen.share("evaluation") if seen is not None else None
    limit = EVALUATION_SHARE_LIMIT if facts.profile is None else PROFILED_EVALUATION_LIMIT
    if seen is None or share is None or share < limit or seen.step_seconds is None:
        return None
    if evaluation_in_step(seen.breakdown_seconds, seen.step_seconds):
        return None  # calls without gradients that every step makes: training needs them
    seconds = seen.breakdown_seconds["evaluation"]
    return Seen(
        title=f"evaluation takes much of the time: {share:.0%} of a step",
        evidence=f"{format_seconds(seconds)} of {format_seconds(seen.step_seconds)} a step",
        remedy="evaluate less often, or on fewer samples; where these calls make what is trained on, as a policy's "
        "rollouts do, make them in larger batches",
        cost_seconds=seconds,
        cost_share=share,
        command=facts.tune,
    )


@check(
    means="Drawing figures takes a part of the run.",
    needs="at least 5 % of the time that was watched, by samples of the stack (lower end of their 95 % interval)",
    if_wrong="fewer figures",
)
def plotting_time(facts: Facts) -> Seen | None:
    return _spent(facts, "plotting", "drawing figures", "draw less often, or after training from what was recorded")


@check(
    means="Printing and logging take a part of the run.",
    needs="at least 5 % of the time that was watched, by samples of the stack (lower end of their 95 % interval), "
    "without the time for which a line that reads a value from the GPU waits for it",
    if_wrong="fewer log lines",
)
def logging_time(facts: Facts) -> Seen | None:
    return _spent(facts, "logging", "printing and logging", "log once in many steps, and without flushing each line")


@check(
    means="Reading and writing files takes a part of the run.",
    needs="at least 5 % of the time that was watched, by samples of the stack (lower end of their 95 % interval)",
    if_wrong="a checkpoint less to go back to",
)
def disk_time(facts: Facts) -> Seen | None:
    return _spent(
        facts, "disk", "reading and writing files", "write less often, or in the background (flatout.Checkpoints)"
    )


@check(
    means="The script's own Python takes much of a step.",
    needs="after a run, 30 % of a step outside of the model, the loader and the optimizer, where modules compute the "
    "model, so that their time is known; after a profile, 10 % in "
    "lines that neither compute with tensors nor plot, log or write, or in a loss that is called 16 times a step; "
    "after a profile that did not follow the script's lines, 30 % as after a run, in 8 timed steps or more",
    if_wrong="a loop is rewritten that was not the slowest part",
)
def python_time(facts: Facts) -> Seen | None:
    if facts.behaviour is not None and facts.profile is not None:
        return _own_python(facts) or _loss_by_loss(facts)
    if facts.profile is not None and facts.profile.timed_steps < LEAST_TIMED_STEPS:
        return None  # one step that paid for something else decides
    share, seconds, step = facts.part_share("other"), facts.part_seconds("other"), facts.step_seconds
    if share is None or seconds is None or step is None or share < OTHER_SHARE_LIMIT or not _has_forward(facts):
        return None
    loaded = bool(facts.part_seconds("data"))  # else the script makes its batches itself, which counts as "other"
    outside = "the model, data loading and optimizer" if loaded else "the model and optimizer"
    return Seen(
        title=f"{share:.0%} of a step is spent outside {outside}",
        evidence=f"{format_seconds(seconds)} of {format_seconds(step)} a step",
        cost_seconds=seconds,
        certain=facts.profile is None,
        remedy=f"look at what the loop itself does every step{', making its batches included' * (not loaded)}",
        command=f"flatout profile {facts.command}" if facts.profile is None and facts.command else None,
    )


def _has_forward(facts: Facts) -> bool:
    """Is the model in the calls of modules? One of functions and weights passed by hand is part of what is left."""
    forward, backward = facts.part_seconds("forward"), facts.part_seconds("backward")
    return forward is None or (forward > 0 and forward >= LEAST_FORWARD * (backward or 0.0))


def _own_python(facts: Facts) -> Seen | None:
    """Lines of the script between the passes, less the operators that they call on whole tensors; unknown where the
    profile has no lines of operators, as of a script that compiles its model.

    Where others kept the processor busy, an operator takes much longer in one step than in the next, so that what is
    left of a line says nothing if its operators could have taken that long.
    """
    assert facts.profile is not None
    if "lines" in facts.profile.reasons:
        return None
    operators: dict[str, tuple[float, float]] = {}
    by_element: Counter[str] = Counter()
    for row in facts.profile.operators:
        seconds, calls = operators.get(row.line, (0.0, 0.0))
        operators[row.line] = seconds + row.host_seconds, calls + row.calls
        by_element[row.line] += _numbers(row)
    lines: dict[str, tuple[LineTime, float]] = {}
    for place, one in _times_of_script(facts, by_element).items():
        if one.samples < LEAST_SAMPLES:
            continue
        seconds, calls = operators.get(place, (0.0, 0.0))
        if by_element[place] >= MANY_CALLS:
            seconds = 0.0
        computes = seconds * (CONTENDED_SLOWDOWN if facts.contended else 1 / OPERATOR_SHARE) >= one.seconds
        if not computes or calls >= MANY_CALLS:
            lines[place] = one, max(0.0, one.seconds - seconds)
    cost, whole = sum(left for _, left in lines.values()), facts.whole_step_seconds
    low = sum(one.low_share * left / max(one.seconds, 1e-12) for one, left in lines.values())
    if not lines or not whole or cost / whole < PYTHON_SHARE or low < LEAST_SHARE:
        return None
    ordered = sorted(lines.values(), key=lambda item: -item[1])
    what, remedy = "the script's own Python takes", "compute with tensors instead of loops over numbers"
    if library := _library_called(ordered):
        what, remedy = f"calls of {library} take", f"call {library} once for many values, or compute with tensors"
    return Seen(
        title=f"{what} {cost / whole:.0%} of the time",
        evidence=slowest_lines([one for one, _ in ordered]),
        remedy=f"{remedy}, or do it less often",
        cost_seconds=cost,
        cost_share=cost / whole,
        lines=where([one.line for one, _ in ordered]),
    )


def _library_called(lines: Sequence[tuple[LineTime, float]]) -> str:
    """The installed package that lines with at least half of these seconds call; '' where it is the script's own."""
    seconds: dict[str, float] = {}
    for one, left in lines:
        seconds[one.library] = seconds.get(one.library, 0.0) + left
    library = max(seconds, key=lambda name: seconds[name])
    return library if seconds[library] >= sum(seconds.values()) / 2 else ""


def _numbers(row: OperatorRow) -> int:
    """How many single numbers the calls of an operator make or read in a step."""
    if row.name == UNBIND:
        sizes = sizes_in(row.shapes)
        return int(row.calls) * sizes[0][0] if sizes and len(sizes[0]) == 1 else 0
    return int(row.calls) if row.name in ELEMENT_OPERATORS else 0


def _times_of_script(facts: Facts, by_element: Mapping[str, int]) -> dict[str, LineTime]:
    """By line. A loop over a tensor's numbers is the script's own Python also where torch's code takes it apart."""
    found: dict[str, LineTime] = {}
    for one in facts.seen.times:
        place = f"{one.line[0]}:{one.line[1]}"
        own = replace(one, activity="script") if by_element[place] >= MANY_CALLS and one.activity == "torch" else one
        if own.activity != "script" or _kind(facts, own) != "script":
            continue
        before = found.get(place, replace(own, seconds=0.0, samples=0, low_share=0.0))
        found[place] = replace(
            own,
            seconds=before.seconds + own.seconds,
            samples=before.samples + own.samples,
            low_share=before.low_share + own.low_share,
        )
    return found


def _loss_by_loss(facts: Facts) -> Seen | None:
    """A loss of each sample, or of each position, by itself."""
    seen, whole = facts.seen, facts.whole_step_seconds
    losses = [one for one in seen.forwards if one.grad and one.module.endswith("Loss")]
    often = max(losses, key=lambda one: one.seconds, default=None)
    if not whole or often is None or often.calls < MANY_LOSSES * seen.steps:
        return None
    calls = often.calls / seen.steps
    cost = often.seconds / seen.steps * (1 - 1 / calls)
    if cost / whole < PYTHON_SHARE:
        return None
    return Seen(
        title=f"a loss is computed {calls:.3g} times a step, which takes {cost / whole:.0%} of the time",
        evidence=f"{often.module} at {often.line[0]}:{often.line[1]}, "
        f"{format_seconds(often.seconds / often.calls)} a call",
        remedy="stack the outputs and the targets, and compute the loss of all of them in one call",
        cost_seconds=cost,
        cost_share=cost / whole,
        lines=where(often.line),
    )


def _spent(facts: Facts, kind: Kind, what: str, remedy: str) -> Seen | None:
    whole, times = facts.whole_step_seconds, [one for one in facts.seen.times if _kind(facts, one) == kind]
    cost, low = sum(one.seconds for one in times), sum(one.low_share for one in times)
    if not times or not whole or low < LEAST_SHARE or sum(one.samples for one in times) < LEAST_SAMPLES:
        return None
    return Seen(
        title=f"{what} takes {cost / whole:.0%} of the time",
        evidence=slowest_lines(times) + "; on average, with what happens between steps",
        remedy=remedy,
        cost_seconds=cost,
        cost_share=cost / whole,
        lines=where([one.line for one in times]),
    )


def _kind(facts: Facts, one: LineTime) -> str:
    """'plotting', 'logging', 'disk', or what else the thread did there. A line that logs is logging also while it
    makes the text or writes the file."""
    if facts.source is None or one.activity not in ("script", "disk"):
        return one.activity
    kind = facts.source.kind_of(one.line)
    return kind if one.activity == "script" or kind in ("plotting", "logging") else "disk"
