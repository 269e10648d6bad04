"""What a trial that waits at a step boundary is asked, and what its answers mean.

`TrialProcess` is one process, `flatout.tuning.ranks.group.RankGroup` several: both send the same commands, and differ
in `_ask`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.levers.observed import Observed, StepWork
from flatout.plan_choices import ChoiceValue
from flatout.script.numerics import NumericsAnswer, NumericsRequest
from flatout.script.trial.answers import PEAK_STEPS, Answer, Peak, Window
from flatout.script.trial.messages import Command

if TYPE_CHECKING:
    from flatout.script.trial.setup import TrialSetup

FIRST_STEPS_SECONDS = 900.0
"""Timeout of the first steps, while the step time is unknown."""
HANG_FACTOR = 20.0
COMPILE_ALLOWANCE_SECONDS = 900.0
DESCRIBE_SECONDS = 300.0
WORK_STEPS, PEAK_FACTOR, NUMERICS_FACTOR = 60, 20, 3
"""A step that is followed or recorded takes up to as long as so many."""

COMPUTING_TIMES = 10.0
"""Times its patience: the most time that a process gets that computes, as in a long evaluation."""
LOOKED_AT_SECONDS, COMPUTING_SHARE = 2.0, 0.25
"""How long it is looked at before it counts as hanging, and the share of this in which it computes if it does not."""


class Patience:
    """How long an answer is awaited before a process counts as hanging: one that computes gets more time."""

    def __init__(self, seconds: float, computed: Callable[[], float] | None) -> None:
        """computed: CPU seconds of the process so far; None: it gets no more time."""
        self._seconds, self._computed = seconds, computed
        self._began = time.monotonic()
        self._end, self._latest = self._began + seconds, self._began + COMPUTING_TIMES * seconds
        self._look: tuple[float, float] | None = None
        """When a look at it began, and its CPU seconds then."""

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @property
    def waited_seconds(self) -> float:
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self._end:
            return False
        if self._computed is None or now > self._latest:
            return True
        computed = self._computed()
        if self._look is None:
            self._look, self._end = (now, computed), now + min(LOOKED_AT_SECONDS, self._seconds)
            return False
        began, before = self._look
        self._look, self._end = None, now + self._seconds
        return computed - before < COMPUTING_SHARE * (now - began)


class CommandedTrial:
    """Choices given here are on from its start; windows add to them."""

    def __init__(self, setup: TrialSetup, choices: Sequence[Choice] = (), *, label: str = "trial") -> None:
        self.setup, self.choices, self.label = setup, list(choices), label
        self.deadline = setup.deadline
        self.isolation: dict[str, object] = {}
        self.startup_seconds: float | None = None
        """Until the script's first recognized step; for a fork, including the time to load torch."""
        self.start_seconds: float | None = None
        """The same; for a fork, without that."""
        self.waiting_seconds = 0.0
        """The part of it in which neither the process nor anything it started was computing."""
        self.expected_step_seconds: float | None = None
        """Length of a plain step, which determines when a silent process counts as hanging; None: unknown."""
        self.first_steps_seconds = FIRST_STEPS_SECONDS
        """Timeout until that is known."""
        self.interruptible = False
        """Are steps in progress interrupted soon after the deadline, with BudgetSpent? A start goes on: how long it
        takes is unknown."""

    def _ask(self, command: Command, timeout_seconds: float) -> Answer:
        """Send a command, and return the answer. Raises TrialError where there is none."""
        raise NotImplementedError

    def _has_passed(self) -> bool:
        return self.deadline is not None and self.deadline.grace_seconds_left <= 0

    def _starting(self) -> contextlib.AbstractContextManager[None]:
        """The stage of the tune in which the script starts."""
        return contextlib.nullcontext() if self.deadline is None else self.deadline.stage(f"starting {self.setup.name}")

    def describe(self) -> Observed:
        return Observed.from_json(self._ask({"do": "describe"}, DESCRIBE_SECONDS)["observed"])

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        command: Command = {
            "do": "window",
            "levers": as_json(choices),
            "settle": settle,
            "steps": steps,
            "suspended": suspended,
        }
        answer = self._ask(command, self._patience(settle + steps, choices))
        return Window(
            seconds=tuple(answer["seconds"]),
            settle_seconds=tuple(answer["settle_seconds"]),
            apply_seconds=answer["apply_seconds"],
            resident_bytes=answer["resident_bytes"],
            peak_resident_bytes=answer["peak_resident_bytes"],
            rolled_back={name: reason for name, _, reason in answer["rolled_back"]},
            samples=tuple(answer["samples"]),
        )

    def breakdown(self, choices: Sequence[Choice], *, steps: int) -> Observed:
        command: Command = {"do": "breakdown", "levers": as_json(choices), "steps": steps}
        return Observed.from_json(self._ask(command, self._patience(steps, choices))["observed"])

    def work(self) -> StepWork:
        return StepWork(**self._ask({"do": "work"}, self._patience(WORK_STEPS, ()))["work"])

    def peak(self, choices: Sequence[Choice], *, steps: int = PEAK_STEPS) -> Peak:
        """Peak over these steps; a followed step takes several times as long."""
        command: Command = {"do": "peak", "levers": as_json(choices), "steps": steps}
        answer = self._ask(command, self._patience(PEAK_FACTOR * steps, choices))
        return Peak(
            peak_bytes=answer["peak_bytes"],
            resident_bytes=answer["peak_resident_bytes"],
            incidents=dict(answer["incidents"]),
        )

    def numerics(self, choices: Sequence[Choice], request: NumericsRequest) -> NumericsAnswer:
        """What `request.steps` steps computed under these levers; fewer, with 'ended', where the script ends first."""
        command: Command = {"do": "numerics", "levers": as_json(choices), "request": asdict(request)}
        answer = self._ask(command, self._patience(NUMERICS_FACTOR * request.steps, choices))
        off = {name: reason for name, _, reason in answer.get("rolled_back", ())}
        raise_if_off({one: off[one.lever.name] for one in (*self.choices, *choices) if one.lever.name in off})
        found: NumericsAnswer = answer
        return found

    def _patience(self, steps: int, choices: Sequence[Choice]) -> float:
        """How long a command may take before the trial counts as hanging."""
        if self.expected_step_seconds is None:
            return self.first_steps_seconds
        expected = HANG_FACTOR * self.expected_step_seconds * steps
        compiles = any(choice.lever.compiles for choice in (*self.choices, *choices))
        return max(self.setup.hang_floor_seconds, expected) + COMPILE_ALLOWANCE_SECONDS * compiles


def raise_if_off(reasons: Mapping[Choice, str]) -> None:
    """Numbers say nothing of levers that were not on. reasons: why, of each such choice."""
    if reasons:
        raise TrialError("; ".join(f"{choice.label} {reason}" for choice, reason in reasons.items()))


def as_json(choices: Sequence[Choice]) -> list[list[ChoiceValue]]:
    return [choice.to_json() for choice in choices]
