"""What choosing a plan for inference came to: each choice that was tried, with times, accuracy and verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flatout.infer.choosing.closeness import Accuracy, Tolerance
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.statistics import Comparison
from flatout.units import format_seconds, labelled

Task = Literal["predict", "generate"]
Outcome = Literal["kept", "dropped", "failed", "not tried"]


@dataclass(frozen=True, kw_only=True)
class InferenceTrial:
    """One change, tried on top of those that had been kept until then. Seconds are of one item (or prompt)."""

    label: str
    choices: Mapping[str, Any]
    """Fields of the plan that it sets."""
    exactness: Exactness
    """What it does to the numbers: as declared, or as seen on the sample where that is worse."""
    outcome: Outcome
    reason: str
    baseline_seconds: float | None = None
    """Median without it, in the windows that alternated with its own; None: it was not timed."""
    candidate_seconds: float | None = None
    comparison: Comparison | None = None
    """How many times as fast, with the interval."""
    accuracy: Accuracy | None = None
    """All that was on, this change among it, against the model in fp32."""
    startup_seconds: float | None = None
    """What it costs once, beyond what is kept: quantising, compiling."""
    payoff_items: int | None = None
    """After how many items that is earned back; None where it is too little to speak of, or nothing is saved."""
    on_top_of: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was done to the model."""
    cost_seconds: float = 0.0
    """How long the trial took."""
    for_lack_of_time: bool = False
    """Was it not tried because the budget was spent?"""

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "choices": dict(self.choices),
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "accuracy": None if self.accuracy is None else self.accuracy.to_json(),
        }

    def line(self, width: int) -> str:
        """For a table: its label so wide."""
        head = f"{self.outcome:<10}{self.label:<{width}}  "
        if self.comparison is None or self.baseline_seconds is None or self.candidate_seconds is None:
            return f"{head}{self.reason}"
        times = f"{format_seconds(self.baseline_seconds)} -> {format_seconds(self.candidate_seconds)}"
        parts = [f"{head}{times:<21} {ratio_text(self.comparison)}"]
        if self.accuracy is not None:
            parts.append(str(self.accuracy))
        if self.reason != "faster":
            parts.append(self.reason)
        return "  ".join(parts)


@dataclass(frozen=True, kw_only=True)
class InferenceTuning:
    """The plan, and everything that speaks for and against it."""

    plan: Plan
    """To be written, or given to `predict` or TokenGenerator as it is."""
    task: Task
    task_reason: str
    model: str
    """Its class."""
    unit: str
    """What seconds are counted by: "item" or "prompt"."""
    sample: str
    """What was measured, in words."""
    trials: tuple[InferenceTrial, ...]
    tolerance: Tolerance
    items: int | None
    """How many will be served; None: unknown."""
    plain_seconds: float
    """One item, under the plan that was given (or none)."""
    chosen_seconds: float
    """One item under the new plan, in windows that alternated with plain ones."""
    comparison: Comparison | None
    """Of those windows; None where nothing was kept."""
    plain_accuracy: Accuracy
    """The user's model as it stands, against fp32."""
    accuracy: Accuracy
    """Under the new plan."""
    share: str
    """Of the limit that binds, which the new plan reaches: in words."""
    machine_fingerprint: str
    machine_name: str
    torch_version: str | None
    seconds: float
    """What the whole took."""
    notes: tuple[str, ...] = field(default=())

    @property
    def kept(self) -> tuple[InferenceTrial, ...]:
        return tuple(trial for trial in self.trials if trial.outcome == "kept")

    def summary(self) -> str:
        """One screen."""
        rows = [("model", f"{self.model} · {self.task}: {self.task_reason}"), ("sample", self.sample)]
        tried = [trial for trial in self.trials if trial.outcome != "not tried"]
        width = max((len(trial.label) for trial in tried), default=0)
        rows += labelled("tried", [trial.line(width) for trial in tried])
        rows += labelled("not tried", _by_reason([one for one in self.trials if one.outcome == "not tried"]))
        rows += labelled("result", self._result())
        rows += labelled("note", list(self.notes))
        return "\n".join(f"{label:<10}{text}" for label, text in rows)

    def _result(self) -> list[str]:
        if self.comparison is None:
            late = sum(trial.for_lack_of_time for trial in self.trials)
            found = "nothing helps here" if not late else f"nothing found before the budget was spent, {late} not tried"
            return [f"{found}: {format_seconds(self.plain_seconds)} per {self.unit} as it is", self.share]
        chosen = ", ".join(f"{name} = {value}" for name, value in self.plan.choices().items())
        times = f"{format_seconds(self.plain_seconds)} -> {format_seconds(self.chosen_seconds)} per {self.unit}"
        speed = f"{ratio_text(self.comparison)} ({times}, {self.comparison.pairs} pairs of windows)"
        return [chosen, speed, self.share, f"against fp32: {self.accuracy}"]

    def to_json(self) -> dict[str, Any]:
        """Everything but the plan's reasons, which are the trials'."""
        return {
            "task": self.task,
            "task_reason": self.task_reason,
            "model": self.model,
            "unit": self.unit,
            "sample": self.sample,
            "plan": self.plan.choices(),
            "exactness": self.plan.exactness,
            "speedup": self.plan.speedup,
            "trials": [trial.to_json() for trial in self.trials],
            "tolerance": asdict(self.tolerance),
            "items": self.items,
            "plain_seconds": self.plain_seconds,
            "chosen_seconds": self.chosen_seconds,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "plain_accuracy": self.plain_accuracy.to_json(),
            "accuracy": self.accuracy.to_json(),
            "share": self.share,
            "machine_fingerprint": self.machine_fingerprint,
            "machine_name": self.machine_name,
            "torch_version": self.torch_version,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def ratio_text(comparison: Comparison) -> str:
    """'x1.47 (1.44 to 1.50)'."""
    if not comparison.has_interval:
        return f"x{comparison.ratio:.2f} ({comparison.pairs} pairs)"
    return f"x{comparison.ratio:.2f} ({comparison.low:.2f} to {comparison.high:.2f})"


def _by_reason(trials: list[InferenceTrial]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        reasons.setdefault(trial.reason, []).append(trial.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
