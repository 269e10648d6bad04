"""What was predicted, tried and proved of each strategy, and the plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from flatout.plan import Plan
from flatout.statistics import Comparison
from flatout.strategies.facts import ALONE, TrainingFacts
from flatout.strategies.prediction import Predicted

Outcome = Literal["kept", "dropped", "refused", "failed", "not reached"]
Verdict = Literal["equal to rounding", "different", "not comparable"]


@dataclass(frozen=True, kw_only=True)
class StrategyTrial:
    """One strategy, compared with one process."""

    strategy: str
    outcome: Outcome
    reason: str
    """'' where it was kept."""
    predicted: Predicted | None = None
    """None: nothing can be predicted of it."""
    comparison: Comparison | None = None
    """Speedup over the baseline; None: not timed."""
    baseline_seconds: float | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    """Of the tensors of one rank, measured; None: not measured."""
    cost_seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "comparison": None if self.comparison is None else self.comparison.to_json()}


@dataclass(frozen=True, kw_only=True)
class StrategyProof:
    """Some steps in ranks beside the same ones in one process. Differences are relative to the largest loss, and for
    weights to the largest weight of the same parameter."""

    verdict: Verdict
    reason: str
    steps: int
    loss_difference: float | None = None
    rounding_loss_difference: float | None = None
    """The same, of runs of one process whose weights were moved by a rounding error before the first step."""
    weight_difference: float | None = None
    rounding_weight_difference: float | None = None
    without_dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class StrategiesFound:
    """All of it."""

    spec: str
    ranks: int
    facts: TrainingFacts
    limit_bytes: int | None
    """What a rank may take; None: unknown."""
    baseline: str
    """'one process'; where that does not fit, the first strategy that does; '' where nothing was tried."""
    trials: tuple[StrategyTrial, ...]
    chosen: str | None
    """None: one process is as fast, or no strategy could be used."""
    reason: str
    """Why none was chosen; '' where one was."""
    plan: Plan
    comparison: Comparison | None = None
    """The last one, in new processes."""
    baseline_seconds: float | None = None
    step_seconds: float | None = None
    proof: StrategyProof | None = None
    exchange_seconds: float | None = None
    """Of an all_reduce of all gradients, measured; None: not measured."""
    enough_seconds: float | None = None
    """A budget in which what was not reached would have been tried, approximately; None: all was."""
    budget_seconds: float
    seconds: float
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def speedup(self) -> float | None:
        """Of the chosen strategy over one process; None: none was chosen, or one process does not fit."""
        known = self.chosen is not None and self.comparison is not None and self.baseline == ALONE
        return self.comparison.ratio if known and self.comparison is not None else None

    def to_json(self) -> dict[str, object]:
        return {
            **{one.name: getattr(self, one.name) for one in fields(StrategiesFound)},
            "facts": asdict(self.facts),
            "trials": [one.to_json() for one in self.trials],
            "plan": self.plan.choices(),
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "proof": None if self.proof is None else asdict(self.proof),
            "warnings": list(self.warnings),
        }
