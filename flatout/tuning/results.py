"""What tuning a training leaves behind beside the trials: what was seen of it, and the proof of what was kept.

Proof         the losses, gradients and weights of fresh processes, compared with the script's own spread
proof_lines   the same in words
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flatout.levers.lever import Choice
from flatout.levers.observed import Observed
from flatout.plan_choices import Exactness
from flatout.search.trial import Record
from flatout.tuning.few_steps import FewSteps
from flatout.tuning.fitting import Fit

ProofVerdict = Literal["bit-identical", "within rounding", "reduced", "statistical", "rejected"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What some levers claim to leave of the numbers, and what became of it."""

    levers: tuple[str, ...]
    """Labels of those that make this claim; they were tried on top of the levers of stricter claims."""
    claimed: Exactness
    verdict: ProofVerdict
    reason: str
    may_be_reduced: bool = False
    """Of one that was rejected: nothing at the check steps speaks against the weakest claim."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far a candidate's numbers lie from the plain script's, and how far those lie from one another.

    Each claim is proved by itself, strictest first; `verdict` is the weakest of them, or the first that failed.
    Relative figures: losses to the median loss, gradients to their size. `floor` is the script's own: what one rounding
    error in the weights makes.
    """

    verdict: ProofVerdict
    reason: str
    steps: int
    """The horizon: what happens in later steps was not seen."""
    epochs: float | None = None
    """The horizon in passes over the training loader; None: the script has no loader, or its length is unknown."""
    claims: tuple[Claim, ...] = ()
    loss_difference: float | None = None
    loss_floor: float | None = None
    gradient_difference: float | None = None
    gradient_floor: float | None = None
    loss_drift: float | None = None
    """Mean of (candidate - plain) loss over the later half of a run left to itself, relative to its plain level."""
    resolution: float | None = None
    """The smallest relative difference of the losses that would have been seen; only of a statistical verdict."""
    repeatable: bool | None = None
    """Whether two plain runs gave the same bits; None: not asked, as every claim leaves room for rounding."""
    notes: tuple[str, ...] = ()
    baseline_losses: tuple[float | None, ...] = ()
    candidate_losses: tuple[float | None, ...] = ()

    @property
    def holds(self) -> bool:
        return self.verdict != "rejected"

    @property
    def covers_epochs(self) -> bool:
        """Did it see the script come from one epoch into the next, and to the end of that?"""
        return self.epochs is None or self.epochs >= 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SearchState(Record[Choice]):
    """What is known so far; what a search returns."""

    for_memory: list[Choice] = field(default_factory=list)
    """Those of the kept that need not be faster: they save memory that is short, or was asked to be saved."""
    fit: Fit | None = None
    """Where steps have to fit into so much memory."""
    observed: Observed = field(default_factory=Observed)
    first_observed: Observed = field(default_factory=Observed)
    loop: str | None = None
    """What trains, as the first plain step showed it."""
    total_steps: int | None = None
    few_steps: FewSteps | None = None
    """The script's length, where it is so short that whole runs are compared."""
    isolation: dict[str, Any] = field(default_factory=dict)
    startup_seconds: float | None = None
    """Of the script in a new process, until its first certain step."""
    restart_seconds: float = 0.0
    """What it takes to start it again: less where trials are forked from a process that has loaded torch."""
    warnings: list[str] = field(default_factory=list)

    @property
    def flops_per_step(self) -> float | None:
        """Of the products of a plain step; None if they could not be counted."""
        return self.first_observed.flops_per_step


def proof_lines(proof: Proof | None) -> list[str]:
    """The verdict with its horizon, each claim, and what was seen; none where nothing was proved."""
    if proof is None:
        return []
    lines = [f"numbers {proof.verdict} {_horizon(proof)}"]
    width = max(len(claim.verdict) for claim in proof.claims) if proof.claims else 0
    lines += [f"  {claim.verdict:<{width}}  {', '.join(claim.levers)}: {claim.reason}" for claim in proof.claims]
    seen = []
    if proof.loss_difference is not None:
        seen.append(f"loss {proof.loss_difference:.1e} (noise floor {_floor(proof.loss_floor)})")
    if proof.gradient_difference is not None:
        seen.append(f"gradient of a parameter {proof.gradient_difference:.1e} ({_floor(proof.gradient_floor)})")
    if seen:
        lines.append("  largest relative differences from the same state: " + ", ".join(seen))
    return lines + list(proof.notes)


def _horizon(proof: Proof) -> str:
    """Over what the claim was proved; what comes later in the script was not seen."""
    if proof.epochs is None:
        return f"over {proof.steps} steps"
    if proof.covers_epochs:
        return f"over {proof.steps} steps, {proof.epochs:.1f} epochs"
    return f"over {proof.steps} steps, {proof.epochs:.2g} of an epoch: what changes between epochs was not seen"


def _floor(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1e}"
