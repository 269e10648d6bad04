"""A lever: one reversible change to how a training loop runs. It carries out one choice of a plan.

What the choice declares (`flatout.plan_choices`) holds for its levers too. `exactness` says what the change may do to
the numbers:
    bit-identical   every bit of every weight stays the same
    rounding        the same arithmetic in another order: differences of the size of fp32 rounding
    reduced         deliberately fewer bits in some products

`switch` says when it can be turned on or off:
    live       between two steps of a running process
    once       between two steps, but not off again: what it changes in a process stays changed
    loader     when a loader makes its next iterator
    process    only from the start of a new process

In a trial, all but `live` are on from the start of a process of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.plan_choices import Aim, ChoiceValue, Declared, Exactness, declared

if TYPE_CHECKING:
    from torch.nn import Module

Switch = Literal["live", "once", "loader", "process"]

Value = ChoiceValue
"""What a plan may hold for one of its choices."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """May a lever be tried here? `values` are the settings worth trying; empty means no, and `reason` says why."""

    values: tuple[Value, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.values)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a lever is predicted to save: shares of a step's time, up to 1; negative where the step takes longer.

    `python -m benchmarks.search.predictions` reports how far off they are, and how many lie in `least` to `most`.
    """

    expected: float
    least: float
    most: float
    why: str = ""
    """What bounds it: 'the optimizer takes 0.4% of a step'."""
    earlier: str = ""
    """What earlier tunes measured: 'measured x1.31 here on 2026-11-20'."""
    own_expected: float | None = None
    """The lever's own prediction, where earlier tunes changed it."""

    @property
    def ratios(self) -> tuple[float, float, float]:
        """(least, expected, most) as speedups."""
        return (times_as_fast(self.least), times_as_fast(self.expected), times_as_fast(self.most))


COSTS_TIME = Saving(expected=-0.3, least=-2.0, most=0.0)
"""Of a lever that only saves memory."""


def times_as_fast(saved: float) -> float:
    """The speedup that saving this share of the time makes; at most 1000."""
    return 1 / max(1e-3, 1 - saved)


def refuse(reason: str) -> Verdict:
    return Verdict(values=(), reason=reason)


def offer(*values: Value, reason: str) -> Verdict:
    return Verdict(values=values, reason=reason)


class Lever:
    """A subclass sets the class attributes, decides where it applies, and applies it."""

    name: ClassVar[str]
    plan_field: ClassVar[str]
    switch: ClassVar[Switch] = "live"
    acts_on_forward: ClassVar[bool] = False
    """True where it changes what runs inside the model: it is the first suspect of a failure there."""
    recompiles: ClassVar[bool] = False
    """True where it is no part of forward, and compiled code is compiled again under it."""
    compiles: ClassVar[bool] = False
    """True where the first steps pay for compilation, so that a silent minute is not taken for a hang."""

    of_process: ClassVar[bool] = False
    """Is it a setting of the whole process, rather than of a model, an optimizer or a loader?"""
    cheap_to_switch: ClassVar[bool] = False
    """A process setting that TrainStep turns on only for its own calls, so that other models keep their numbers."""
    halves_activations: ClassVar[bool] = False
    """True where activations saved for backward take half the memory."""
    names_value: ClassVar[bool] = True
    """False where reports name it alone: it has one value, or its name says it."""
    usual_saving: ClassVar[Saving] = Saving(expected=0.01, least=-0.1, most=0.3)
    """The predicted saving of one that predicts none from what was observed."""
    surpassed_by: ClassVar[Mapping[Value, Value]] = {}
    """A value -> another of the lever that is at least as fast wherever it helps: the first is not tried while the
    other is kept."""
    comes_first: ClassVar[bool] = False
    """True where it changes what every other lever does, so that it has to be decided before them."""

    exactness: Exactness
    """What it may do to the numbers: as its choice declares."""
    aim: Aim
    """What it is for: as its choice declares."""

    def __init_subclass__(cls) -> None:
        one = declared().get(getattr(cls, "plan_field", ""))
        for name in ("exactness", "aim") if one is not None else ():
            if name not in vars(cls):
                setattr(cls, name, getattr(one, name))

    @property
    def declared(self) -> Declared:
        return declared()[self.plan_field]

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        """The predicted saving, which decides when the lever is tried and whether it can pay off at all."""
        return self.usual_saving

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        """The values to try on this machine for this loop, or why there are none."""
        raise NotImplementedError

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        """Apply it to `subject` until the context ends."""
        return nullcontext()

    def environment(self, value: Value) -> dict[str, str]:
        """Environment variables of a new process (only where switch is 'process')."""
        return {}

    def nothing_in(self, model: Module, value: Value) -> str:
        """Why it would change nothing in training `model`; '' where it may. Asked where all models are known, as in
        TrainStep: a plan's choice that does nothing is reported. See also `flatout.levers.idle`."""
        return ""

    def takes(self, value: Value) -> bool:
        """Is there anything to apply for a plan's `value`? False leaves all as it is; of levers that share a plan field
        each takes its own values."""
        return value is not False

    def wraps_blocks(self, value: Value) -> bool:
        """Does it replace the calls of a model's repeated blocks, wrapping what another such lever has put there?"""
        return False

    def label(self, value: Value) -> str:
        """The choice as reports name it."""
        return f"{self.name} {value}" if self.names_value and value is not True else self.name


@dataclass(frozen=True)
class Choice:
    """A lever with a value: the unit that a search tries and a plan holds."""

    lever: Lever
    value: Any  # a Value; `Plan(**{field: value})` takes narrower types, and checks them itself
    relaxed: bool = False
    """Here it claims only 'reduced': the script's numbers changed by more than the lever claims, or there was no time
    to prove it without 'reduced' levers."""

    @property
    def exactness(self) -> Exactness:
        """What it claims about the numbers."""
        return "reduced" if self.relaxed else self.lever.exactness

    @property
    def field(self) -> str:
        return self.lever.plan_field

    @property
    def label(self) -> str:
        return self.lever.label(self.value)

    @property
    def choices(self) -> dict[str, Value]:
        """The plan field that it sets, with its value."""
        return {self.field: self.value}

    @property
    def replaces(self) -> tuple[str, ...]:
        """Fields of other choices that it makes redundant."""
        return self.lever.declared.replaces

    def to_json(self) -> list[Value]:
        return [self.lever.name, self.value]


Graph = frozenset[tuple[str, str]] | None
"""The choices that a compiled model depends on; None: nothing is compiled."""


def split_by_switch(choices: Sequence[Choice]) -> tuple[list[Choice], list[Choice]]:
    """(those that must be on from the start of a process, those that may be switched while it runs)"""
    live = [choice for choice in choices if choice.lever.switch == "live"]
    return [choice for choice in choices if choice not in live], live


def graph_of(choices: Sequence[Choice]) -> Graph:
    if not any(one.lever.compiles for one in choices):
        return None
    return frozenset(
        (one.field, str(one.value)) for one in choices if one.lever.acts_on_forward or one.lever.recompiles
    )


def choices_from_json(data: Sequence[Sequence[Value]], levers: Sequence[Lever]) -> list[Choice]:
    by_name = {lever.name: lever for lever in levers}
    return [Choice(by_name[str(name)], value) for name, value in data]


def choices_of_plan(
    chosen: Mapping[str, Value | None], levers: Sequence[Lever], relaxed: Collection[str] = ()
) -> list[Choice]:
    """The levers that carry out a plan's choices, in the catalogue's order; `relaxed`: a plan's `proved_reduced`."""
    found: list[Choice] = []
    for lever in levers:
        value = chosen.get(lever.plan_field)
        if value is None or any(choice.field == lever.plan_field for choice in found):
            continue
        if lever.takes(value):
            found.append(Choice(lever, value, lever.plan_field in relaxed))
    return found
