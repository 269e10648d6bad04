"""What a step takes, in words: its parts, and its share of the machine's ceiling."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.levers.observed import Observed
from flatout.machine.ceilings import Ceilings
from flatout.profiling.profile import evaluation_in_step
from flatout.units import format_rate, format_seconds

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "communication", "sync", "evaluation", "other")
SMALLEST_SHARE_SHOWN = 0.005


def breakdown_text(parts: Mapping[str, float], step_seconds: float) -> str:
    """'1.15 ms = data 0.43 + forward 0.21 + ... ms': shares below half a percent go to the rest."""
    scale, unit = (1e3, "ms") if step_seconds < 1 else (1.0, "s")
    shown = [(name, parts[name]) for name in PARTS if parts.get(name, 0.0) > SMALLEST_SHARE_SHOWN * step_seconds]
    on_top = () if evaluation_in_step(parts, step_seconds) else ("evaluation",)
    inside = [f"{name} {seconds * scale:.3g}" for name, seconds in shown if name not in on_top]
    evaluation = [f" (and evaluation {s * scale:.3g} {unit} a step)" for name, s in shown if name in on_top]
    return f"{format_seconds(step_seconds)} = {' + '.join(inside)} {unit}{''.join(evaluation)}"


def training_elsewhere(processes: int) -> str:
    """Of a script whose own process makes no steps."""
    return f"training in {processes} process{'es' * (processes != 1)} that it started"


def counted_by(seen: Observed | None) -> str:
    """Which optimizer's steps are counted; '' where there is but one."""
    optimizers = len(seen.optimizers) if seen is not None else 0
    return f"{optimizers} optimizers: a step ends when the last of them steps" if optimizers > 1 else ""


def share_of_ceiling(
    flops: float | None, step_seconds: float | None, ceilings: Ceilings | None, device: str | None
) -> tuple[float | None, str]:
    """`device`: where the steps ran ('cpu', 'cuda:0'; None: not known): another device's ceilings do not bind them."""
    if ceilings is None:
        return None, "unknown, because this machine's ceilings were not measured (flatout check --measure)"
    if device is not None and device != ceilings.device:
        return None, f"unknown, because the ceilings of {ceilings.device} were measured, and the steps ran on {device}"
    best = ceilings.best_gemm()
    if not step_seconds:
        return None, "unknown, because no step was timed"
    if not flops or best is None:
        return None, "unknown, because no matrix products were counted"
    name, peak = best
    return flops / step_seconds / peak.value, f"{name} ceiling ({format_rate(peak.value, peak.unit)})"


def percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "under 0.1%"
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"
