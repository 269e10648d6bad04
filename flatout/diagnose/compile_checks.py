"""torch.compile: does it compile again and again, and does the compiled code stay in one piece?"""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, where
from flatout.diagnose.facts import Facts
from flatout.units import format_seconds

MOST_VERSIONS = 4
"""Training and evaluation, each with the last batch of an epoch, make as many."""
MOST_IN_WINDOW = 3


@check(
    means="torch.compile compiles the same code again and again.",
    needs="one function has more than 4 compiled versions; or it has several, and there were at least 3 compilations "
    "after the first steps",
    if_wrong="sizes are marked dynamic that never change, which makes the code a little slower",
)
def recompilations(facts: Facts) -> Seen | None:
    seen, found = facts.seen, facts.seen.compiled
    if found is None:
        return None
    late = found.versions_of_one > 1 and found.compiled_in_window >= MOST_IN_WINDOW
    if found.versions_of_one <= MOST_VERSIONS and not late:
        return None
    seconds = found.seconds_in_window
    cost = seconds / seen.steps if seconds and seen.steps else None
    shapes = f"; inputs had {seen.batch_shapes} shapes, such as {', '.join(seen.example_shapes[:3])}"
    during = f", {found.compiled_in_window} of them in {seen.steps} steps that were watched"
    return Seen(
        title=f"torch.compile has compiled one function {found.versions_of_one} times",
        evidence=f"{found.frames} compilations of all functions{during}"
        + (f", in {format_seconds(seconds)}" if seconds else "")
        + (shapes if seen.batch_shapes > 1 else ""),
        remedy="torch.compile(..., dynamic=True), sizes padded to a few values, or numbers that change passed as "
        "tensors; TORCH_LOGS=recompiles says which guard failed",
        fault=True,
        lines=where(facts.lines_calling("compile")),
        cost_seconds=cost,
        unknown="" if cost is not None else "no compilation happened in the steps that were watched",
        command=f"TORCH_LOGS=recompiles python {facts.command}" if facts.command else None,
    )


@check(
    means="torch.compile leaves compiled code for Python in the middle of the model.",
    needs="the compiler's own report of a graph break at a line of the script",
    if_wrong="a line is moved out of the model",
)
def graph_breaks(facts: Facts) -> Seen | None:
    found = facts.seen.compiled
    if found is None or not found.breaks:
        return None
    first = found.breaks[0]
    places = len({one.line[:2] for one in found.breaks})
    return Seen(
        title=f"torch.compile breaks the graph at {places} line{'s' if places > 1 else ''}",
        evidence="; ".join(f"{one.line[0]}:{one.line[1]}: {one.reason}" for one in found.breaks[:3]),
        remedy=f"move what the compiler cannot follow out of the model (first: {first.line[0]}:{first.line[1]}); "
        "fullgraph=True makes it an error",
        fault=True,
        lines=where([one.line for one in found.breaks]),
        unknown="the model was not timed without the break",
    )
