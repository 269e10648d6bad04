"""The values that a search leaves behind: a Trial for each change that was tried, NotTried for the others.

Trial   'fused optimizer': 0.78 -> 0.72 ms, kept, because it is faster by 8 % (2 % at the least)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from flatout.levers.lever import Saving
from flatout.plan_choices import Exactness, worst
from flatout.statistics import Comparison

Outcome = Literal["kept", "dropped", "failed"]


class Candidate(Protocol):
    """A change that may help."""

    @property
    def label(self) -> str:
        """For people."""

    @property
    def choices(self) -> Mapping[str, object]:
        """The fields of a plan that it sets."""

    @property
    def replaces(self) -> tuple[str, ...]:
        """Fields of other changes whose place it takes."""

    @property
    def exactness(self) -> Exactness:
        """What it claims to do to the numbers."""


class Accuracy(Protocol):
    """How near outputs are to those in fp32; `str` says it in words."""

    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What trying a change came to. Seconds are of one step, or of one item that a model is given."""

    outcome: Outcome
    reason: str
    baseline_seconds: float | None = None
    """Median without it, in the windows that alternated with its own; None: it was not timed."""
    candidate_seconds: float | None = None
    comparison: Comparison | None = None
    """How many times as fast, with the interval."""
    startup_seconds: float | None = None
    """One-time cost of enabling it, such as compilation or quantization."""
    payoff: int | None = None
    """Break-even: steps or items until that cost is recovered; None if it is negligible or nothing is saved."""
    exactness: Exactness | None = None
    """What it was seen to do to the numbers; None: as it claims."""
    accuracy: Accuracy | None = None
    """All that was on, this change among it, against the model in fp32."""
    baseline_peak_bytes: int | None = None
    """What a step's tensors hold at the most without it; only where the change is for memory."""
    candidate_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    """What was done for it."""


@dataclass(frozen=True, kw_only=True)
class Trial(Measured):
    """One change, tried on top of those that had been kept until then."""

    label: str
    choices: Mapping[str, object]
    """Fields of the plan that it sets."""
    exactness: Exactness
    on_top_of: tuple[str, ...] = ()
    predicted: Saving | None = None
    """What was expected of it; None: nothing, or of several at once."""
    cost_seconds: float = 0.0
    """How long the trial itself took."""
    decided_after_seconds: float | None = None
    """Since the tune began; None: it was decided together with another one."""

    def to_json(self) -> dict[str, object]:
        plain = {"choices": dict(self.choices), "notes": list(self.notes), "on_top_of": list(self.on_top_of)}
        nested = {"comparison": self.comparison, "accuracy": self.accuracy}
        told = {name: None if value is None else value.to_json() for name, value in nested.items()}
        return {**asdict(self), **plain, **told}


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
    """What is known so far, and in the end all that a search leaves behind."""

    kept: list[C] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)
    stopped_after_seconds: float | None = None
    """When somebody stopped the search, counted from the start; None: it came to its own end."""
    enough_seconds: float | None = None
    """A budget, about, in which all would have been tried; None: all was."""

    @property
    def late(self) -> int:
        """How many were not reached in time."""
        return sum(entry.for_lack_of_time for entry in self.not_tried)

    def take_back(self, choices: Sequence[C], outcome: Outcome, reason: str) -> None:
        """These were kept, and are not any more. What was kept together with one of them stays."""
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

    def kept_trial(self, name: str) -> Trial | None:
        """That by which the choice of this field was kept."""
        found = [trial for trial in self.trials if trial.outcome == "kept" and name in trial.choices]
        return found[-1] if found else None
