"""Do ranks train as one process? The same steps in both, compared with what one rounding error makes of them.

Losses of each step, and all weights and buffers after the last one. Ranks add up in another order, which rounds
differently in every step; so the limit is a small multiple of what a change of every weight by one rounding error,
before the first step, makes of a run of one process.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.plan import Plan
from flatout.strategies.found import StrategyProof
from flatout.strategies.told import LOSSES, WEIGHTS, Told

if TYPE_CHECKING:
    from torch import Tensor

NUDGES = 3
MOST = 3.0
"""Times the largest effect of a rounding error, as in `benchmarks.parallel.matrix`."""
FLOOR = 1e-6
"""Differences below that, relative, are rounding whatever the runs from nudged weights show."""
ROUNDING, ROUNDING_16_BITS = 2.0**-23, 2.0**-8
MOST_ROUNDING = 0.1
"""Of the largest loss or weight: where one rounding error makes more than that, nothing can be told apart."""


@dataclass(frozen=True)
class Run:
    """What a run left."""

    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]


Start = Callable[[Told, Path], None]
"""Runs processes that do what they are told to their end; what they leave is in the folder."""


def proved(
    spec: str,
    plan: Plan,
    strategy_plan: Plan,
    ranks: int,
    steps: int,
    samples: int | None,
    start: Start,
    work_folder: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> StrategyProof:
    """plan: of one process. samples: in one of its batches. Raises what `start` raises."""
    alone = Told(spec=spec, plan=plan.to_toml(), role="record", ranks=1, steps=steps, samples=samples)
    size = ROUNDING if plan.precision in (None, "fp32") and strategy_plan.fsdp_dtype is None else ROUNDING_16_BITS

    def run(told: Told) -> Run:
        folder = Path(tempfile.mkdtemp(prefix="record-", dir=work_folder))
        start(told, folder)
        return _read(folder)

    progress(f"{steps} steps of one process")
    plain = run(alone)
    nudged = [run(replace(alone, nudge=size, nudge_seed=seed)) for seed in range(NUDGES)]
    progress(f"{steps} steps of {ranks} ranks")
    shared = run(replace(alone, plan=strategy_plan.to_toml(), ranks=ranks))
    return judged(plain, nudged, shared)


def judged(plain: Run, nudged: list[Run], shared: Run) -> StrategyProof:
    """The verdict on ranks, given runs of one process from weights as they are and moved by a rounding error."""
    proof = StrategyProof(verdict="different", reason="", steps=len(plain.losses), without_dropout=True)
    if plain.weights.keys() != shared.weights.keys() or len(plain.losses) != len(shared.losses):
        return replace(proof, reason="other weights, or another number of steps, than in one process")
    loss, weight = _differences(plain, shared)
    floors = [_differences(plain, one) for one in nudged]
    loss_floor, weight_floor = (max(found) for found in zip(*floors, strict=True))
    proof = replace(
        proof,
        loss_difference=loss,
        rounding_loss_difference=loss_floor,
        weight_difference=weight,
        rounding_weight_difference=weight_floor,
    )
    if not all(math.isfinite(one) for one in (loss_floor, weight_floor)):
        return replace(proof, verdict="not comparable", reason="its numbers become infinite or NaN in one process")
    if max(loss_floor, weight_floor) > MOST_ROUNDING:
        why = f"one rounding error changes losses by {loss_floor:.0%} and weights by {weight_floor:.0%}"
        return replace(proof, verdict="not comparable", reason=why)
    for name, found, floor in (("losses", loss, loss_floor), ("weights", weight, weight_floor)):
        limit = max(MOST * floor, FLOOR)
        if not found <= limit:
            why = f"{name} differ by {found:.1e}, and one rounding error explains {floor:.1e}"
            return replace(proof, reason=why)
    return replace(proof, verdict="equal to rounding")


def _differences(one: Run, other: Run) -> tuple[float, float]:
    """The largest of the losses', and of the weights'."""
    scale = max(abs(loss) for loss in one.losses) or 1.0
    losses = [abs(a - b) / scale for a, b in zip(one.losses, other.losses, strict=True)]
    weights = [0.0]
    for name, weight in one.weights.items():
        if weight.numel():
            largest = float(weight.abs().max().double()) or 1.0
            weights.append(float((weight.double() - other.weights[name].double()).abs().max()) / largest)
    return _largest(losses), _largest(weights)


def _largest(values: list[float]) -> float:
    """NaN where one of them is."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _read(folder: Path) -> Run:
    import torch

    losses = json.loads((folder / LOSSES).read_text(encoding="utf-8"))
    weights = torch.load(folder / WEIGHTS, weights_only=True)
    return Run(losses=tuple(losses), weights=weights)
