"""What a check of determinism found, for people."""

from __future__ import annotations

from flatout.script.deterministic_check import DeterminismCheck

MOST_NAMES = 5


def determinism_text(found: DeterminismCheck) -> str:
    """Two or three lines."""
    if found.error is not None:
        return (
            f"not deterministic: {found.error}\n"
            f"after {found.steps} steps; replace that operation, or allow it: "
            "torch.use_deterministic_algorithms(True, warn_only=True)"
        )
    horizon = f"{found.steps} steps" if found.steps else "the end of the script"
    if not found.equal:
        more = f" and {len(found.differing) - MOST_NAMES} more" if len(found.differing) > MOST_NAMES else ""
        return f"not deterministic: after {horizon} two runs differ in {', '.join(found.differing[:MOST_NAMES])}{more}"
    cost = (
        "not known: too few steps, or times too noisy"
        if found.cost is None
        else f"x{found.cost:.2f} the time of a plain step"
    )
    return f"deterministic: after {horizon} two runs are bit-identical in {found.tensors} tensors\ncost: {cost}"
