"""A check: a pure function of Facts that says what it has seen, or None, with what its reader must know about it.

    @check(
        means="Gradients are clipped before the backward pass that computes them.",
        needs="in three steps or more, each clip comes before the step's backward passes, and none after them",
        if_wrong="one more clip per step",
    )
    def clip_before_backward(facts: Facts) -> Seen | None:
        ...

The name of the finding is that of the function, with dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flatout.diagnose.facts import Facts
from flatout.diagnose.finding import Finding
from flatout.script.behaviour_seen import LineTime, SourceLine
from flatout.units import format_seconds

MATERIAL_SHARE = 0.05
"""Of a step: a cost from here on is a warning."""
MOST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a check has found."""

    title: str
    evidence: str
    remedy: str
    fault: bool = False
    """Is it wrong whatever it costs?"""
    certain: bool = True
    lines: tuple[SourceLine, ...] = ()
    cost_seconds: float | None = None
    """Of a step."""
    cost_bytes: int | None = None
    cost_share: float | None = None
    """None: what `cost_seconds` are of a step."""
    unknown: str = ""
    """Why the cost is not known, where neither seconds nor bytes are."""
    command: str | None = None
    plan: Mapping[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its description."""

    name: str
    means: str
    needs: str
    """The evidence without which it says nothing."""
    if_wrong: str
    look: Callable[[Facts], Seen | None]
    always_note: bool = False

    def __call__(self, facts: Facts) -> Finding | None:
        seen = self.look(facts)
        if seen is None:
            return None
        share = seen.cost_share if seen.cost_share is not None else facts.share(seen.cost_seconds)
        material = seen.fault or (share or 0.0) >= MATERIAL_SHARE
        unknown = f"; cost unknown, because {seen.unknown}" if seen.unknown else ""
        return Finding(
            name=self.name,
            severity="warning" if material and not self.always_note else "note",
            title=seen.title,
            evidence=seen.evidence + unknown,
            remedy=seen.remedy,
            next_command=seen.command,
            cost_seconds=seen.cost_seconds,
            cost_bytes=seen.cost_bytes,
            cost_share=share,
            lines=tuple((file, number, text or facts.text_of(file, number)) for file, number, text in seen.lines),
            confidence="certain" if seen.certain else "likely",
            if_wrong=self.if_wrong,
            plan_change=seen.plan,
        )


def where(*groups: Iterable[SourceLine] | SourceLine | None) -> tuple[SourceLine, ...]:
    """A few known lines, each once, in this order."""
    found: dict[tuple[str, int], SourceLine] = {}
    for group in groups:
        single = isinstance(group, tuple) and len(group) == 3 and isinstance(group[1], int)
        lines = [group] if single else list(group or ())
        for one in lines:
            if isinstance(one, tuple) and one[1] and not found.get((one[0], one[1]), ("", 0, ""))[2]:
                found[one[0], one[1]] = one
    return tuple(found.values())[:MOST_LINES]


def source_line(place: str) -> SourceLine | None:
    """Of 'train.py:12'; None where there is no such place."""
    file, _, number = place.rpartition(":")
    return (file, int(number), "") if file and number.isdigit() else None


def check(
    *, means: str, needs: str, if_wrong: str, always_note: bool = False
) -> Callable[[Callable[[Facts], Seen | None]], Check]:
    """Make a function a Check."""

    def made(look: Callable[[Facts], Seen | None]) -> Check:
        name = look.__name__.replace("_", "-")
        return Check(name=name, means=means, needs=needs, if_wrong=if_wrong, look=look, always_note=always_note)

    return made


def slowest_lines(times: Sequence[LineTime]) -> str:
    """'train.py:12 3.4 ms a step, ...': of the first three."""
    return ", ".join(f"{one.line[0]}:{one.line[1]} {format_seconds(one.seconds)} a step" for one in times[:3])
