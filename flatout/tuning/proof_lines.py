"""A proof in lines for people."""

from __future__ import annotations

from flatout.tuning.trial import Proof


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
