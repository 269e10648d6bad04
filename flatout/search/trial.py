"""The results of a search: a Trial for each change that was tried, NotTried for the others.

Trial   'fused optimizer': 0.78 -> 0.72 ms, kept, because it is faster by 8 % (2 % at least)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from flatout.levers.lever import Saving
from flatout.plan_choices import ChoiceValue, Exactness, worst
from flatout.statistics import Comparison

Outcome = Literal["kept", "dropped", "failed"]


class Candidate(Protocol):
    """A change that may help."""

    @property
    def label(self) -> str:
        """For display."""

    @property
    def choices(self) -> Mapping[str, ChoiceValue]:
        """The fields of a plan that it sets."""

    @property
    def replaces(self) -> tuple[str, ...]:
        """Fields of other changes that it replaces."""

    @property
    def exactness(self) -> Exactness:
        """What it claims to do to the numbers."""


class Accuracy(Protocol):
    """How close outputs are to those in fp32; `str` gives it in words."""

    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of trying a change. Seconds are per step, or per item of a model's input."""

    outcome: Outcome
    reason: str
    baseline_seconds: float | None = None
    """Median without it, in windows alternating with its own; None: not timed."""
    candidate_seconds: float | None = None
    comparison: Comparison | None = None
    """Speedup, with its interval."""
    startup_seconds: float | None = None
    """One-time cost of enabling it, such as compilation or quantization."""
    payoff: int | None = None
    """Break-even: steps or items until that cost is recovered; None: negligible, or nothing is saved."""
    exactness: Exactness | None = None
    """What it did to the numbers; None: as it claims."""
    accuracy: Accuracy | None = None
    """Of everything that was on, this change included, against the model in fp32."""
    baseline_peak_bytes: int | None = None
    """Peak memory of a step's tensors without it; only for changes that save memory."""
    candidate_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    """What had to be done for it."""


@dataclass(frozen=True, kw_only=True)
class Trial(Measured):
    """One change, tried on top of those that had been kept until then."""

    label: str
    choices: Mapping[str, ChoiceValue]
    """Fields of the plan that it sets."""
    exactness: Exactness
    on_top_of: tuple[str, ...] = ()
    predicted: Saving | None = None
    """The expected saving; None: no prediction, or several changes at once."""
    cost_seconds: float = 0.0
    """Duration of the trial itself."""
    decided_after_seconds: float | None = None
    """Since the start of the tune; None: decided together with another one."""
    while_busy: bool = False
    """Was it dropped in a trial during which steps took far longer than in others?"""

    def to_json(self) -> dict[str, object]:
        plain = {"choices": dict(self.choices), "notes": list(self.notes), "on_top_of": list(self.on_top_of)}
        nested = {"comparison": self.comparison, "accuracy": self.accuracy}
        as_json = {name: None if value is None else value.to_json() for name, value in nested.items()}
        return {**asdict(self), **plain, **as_json}


@dataclass(frozen=True, kw_only=True)
class NotTried:
    """A change that was not tried, and why."""

    label: str
    reason: str
    for_lack_of_time: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)


C = TypeVar("C", bound=Candidate)


@dataclass
class Record(Generic[C]):
    """What a search knows so far; at its end, its result."""

    kept: list[C] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)
    displaced: list[tuple[C, tuple[C, ...]]] = field(default_factory=list)
    """Choices that were kept until others took their place or made them redundant, and those others."""
    stopped_after_seconds: float | None = None
    """When the user stopped the search, from its start; None: it ran to its end."""
    enough_seconds: float | None = None
    """Approximate budget in which everything would have been tried; None: everything was."""

    short_run_steps: int | None = None
    """Steps of a whole run that is so short that starting it takes longer; None: runs are longer, or their length is
    unknown. More steps per start save more of the search's time than a larger budget adds."""

    @property
    def late(self) -> int:
        """How many changes were not reached in time."""
        return sum(entry.for_lack_of_time for entry in self.not_tried)

    @property
    def dropped_while_busy(self) -> int:
        """How many changes were dropped while the machine was busy, and not tried again."""
        return len({trial.label for trial in self.trials if trial.while_busy})

    def take_back(self, choices: Sequence[C], outcome: Outcome, reason: str) -> None:
        """Mark these choices as no longer kept. What was kept together with one of them stays."""
        fields = {name for one in choices for name in one.choices}
        trials: list[Trial] = []
        for trial in self.trials:
            gone = [one for one in choices if {*one.choices} & {*trial.choices}]
            rest = {name: value for name, value in trial.choices.items() if name not in fields}
            if trial.outcome != "kept" or not gone:
                trials.append(trial)
            elif not rest:
                trials.append(replace(trial, outcome=outcome, reason=reason))
            else:
                label = " + ".join(one.label for one in gone)
                trials.append(replace(trial, choices=rest, reason=f"{trial.reason}; {label} was taken back"))
                trials.append(
                    Trial(
                        label=label,
                        choices={name: value for name, value in trial.choices.items() if name in fields},
                        exactness=worst(one.exactness for one in gone),
                        outcome=outcome,
                        reason=reason,
                    )
                )
        self.trials = trials

    def keep_again(self, choices: Sequence[C], reason: str) -> None:
        """Mark the trials by which these were kept once as kept again."""
        for choice in choices:
            of_it = [one for one in self.trials if one.outcome == "dropped" and one.choices == choice.choices]
            if of_it:
                again = replace(of_it[-1], outcome="kept", reason=reason)
                self.trials = [again if one is of_it[-1] else one for one in self.trials]

    def kept_trial(self, name: str) -> Trial | None:
        """The trial by which the choice of this field was kept."""
        found = (trial for trial in reversed(self.trials) if trial.outcome == "kept" and name in trial.choices)
        return next(found, None)
