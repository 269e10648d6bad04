"""The result of tuning inference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flatout.infer.choosing.closeness import Accuracy, Tolerance
from flatout.infer.choosing.search import Option
from flatout.notebook_tables import ShownAsText
from flatout.plan import Plan
from flatout.search.lines import (
    BudgetOption,
    not_tried_lines,
    nothing_found,
    ratio_text,
    reach_lines,
    seconds_argument,
    trial_lines,
)
from flatout.search.trial import Record, Trial
from flatout.statistics import Comparison
from flatout.units import format_seconds, labelled

Task = Literal["predict", "generate"]


@dataclass(frozen=True, kw_only=True, repr=False)
class InferenceTuning(ShownAsText):
    """The plan, and the evidence for it."""

    plan: Plan
    """To save, or to pass to `predict` or TokenGenerator."""
    task: Task
    task_reason: str
    model: str
    """Its class."""
    unit: str
    """What a time refers to: "item" or "prompt"."""
    sample: str
    """What was measured, in words."""
    state: Record[Option]
    """What was tried, and what was not and why."""
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
    """Of the unchanged model, against fp32."""
    accuracy: Accuracy
    """Under the new plan."""
    share: str
    """Share of the binding limit that the new plan reaches, in words."""
    machine_fingerprint: str
    machine_name: str
    torch_version: str | None
    budget_seconds: float
    seconds: float
    """Of the whole tuning."""
    notes: tuple[str, ...] = field(default=())

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self.state.trials)

    @property
    def kept(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.outcome == "kept")

    def summary(self, option: BudgetOption = seconds_argument) -> str:
        """One screen. option: how a larger budget is given."""
        rows = [("model", f"{self.model} · {self.task}: {self.task_reason}"), ("sample", self.sample)]
        rows += labelled("tried", trial_lines(self.trials))
        rows += labelled("not tried", not_tried_lines(self.state.not_tried))
        rows += labelled("result", [*self._result(option), *reach_lines(self.state, option)])
        rows += labelled("note", list(self.notes))
        return "\n".join(f"{label:<10}{text}" for label, text in rows)

    def __str__(self) -> str:
        return self.summary()

    def _result(self, option: BudgetOption) -> list[str]:
        if self.comparison is None:
            found = nothing_found(self.state, self.budget_seconds, option)
            return [f"{found}: {format_seconds(self.plain_seconds)} per {self.unit} as it is", self.share]
        chosen = ", ".join(f"{name} = {value}" for name, value in self.plan.choices().items())
        times = f"{format_seconds(self.plain_seconds)} -> {format_seconds(self.chosen_seconds)} per {self.unit}"
        speed = f"{ratio_text(self.comparison)} ({times}, {self.comparison.pairs} pairs of windows)"
        return [chosen, speed, self.share, f"against fp32: {self.accuracy}"]

    def to_json(self) -> dict[str, object]:
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
            "not_tried": [entry.to_json() for entry in self.state.not_tried],
            "budget_seconds": self.budget_seconds,
            "tolerance": self.tolerance.to_json(),
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
