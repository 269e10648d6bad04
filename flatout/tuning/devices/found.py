"""What was predicted, tried and proved of training a script on several devices, and the plan with their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from flatout.plan import Plan
from flatout.plan_choices import worst
from flatout.statistics import Comparison
from flatout.tuning.devices_proof import DevicesProof

Outcome = Literal["kept", "dropped", "refused", "failed", "not tried", "not reached"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What it takes ranks to average gradients, as measured between so many of them."""

    ranks: int
    size_bytes: int
    """Of all gradients."""
    all_reduce_seconds: float
    small_seconds: float
    """Of the message by which ranks compare where they are, before each exchange."""

    def for_ranks(self, ranks: int) -> Exchange:
        """Computed: each rank of a ring sends (n-1)/n of the bytes, in n-1 hops."""
        bandwidth = (1 - 1 / ranks) / (1 - 1 / self.ranks)
        hops = (ranks - 1) / (self.ranks - 1)
        sent = max(0.0, self.all_reduce_seconds - self.small_seconds)
        return Exchange(
            ranks=ranks,
            size_bytes=self.size_bytes,
            all_reduce_seconds=self.small_seconds * hops + sent * bandwidth,
            small_seconds=self.small_seconds * hops,
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """How many times as fast as on one device a step would be."""

    devices: int
    least: float
    expected: float
    most: float
    step_seconds: float
    """The expected one."""
    reason: str
    """What the time would be spent on."""


@dataclass(frozen=True, kw_only=True)
class DevicesTrial:
    """One number of devices, compared with one device and its best plan."""

    devices: int
    outcome: Outcome
    reason: str
    predicted: Predicted | None = None
    """None: a prediction was not possible."""
    levers: tuple[str, ...] = ()
    """Labels of those that were on in each rank."""
    comparison: Comparison | None = None
    """None: not timed."""
    baseline_seconds: float | None = None
    candidate_seconds: float | None = None
    cost_seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        found = {**asdict(self), "levers": list(self.levers)}
        return {**found, "comparison": None if self.comparison is None else self.comparison.to_json()}


@dataclass(frozen=True, kw_only=True)
class DevicesTuned:
    """All of it. `chosen` 1: one device is as fast, or no other number could be shown to be right and faster."""

    most: int
    """The largest number that was asked for."""
    kind: Literal["cpu", "cuda"]
    """Ranks share the cores of the CPU, or have a GPU each."""
    chosen: int
    reason: str
    """Why it is one; '' where it is not."""
    trials: tuple[DevicesTrial, ...]
    exchange: Exchange | None = None
    """None: it was not measured."""
    comparison: Comparison | None = None
    """The last one, in several groups of new processes; None: nothing came so far."""
    baseline_seconds: float | None = None
    candidate_seconds: float | None = None
    left_out: Mapping[str, str] | None = None
    """Choices of the plan for one device that ranks do without -> why."""
    proof: DevicesProof | None = None
    enough_seconds: float | None = None
    """Approximate budget of the whole tune in which what was not reached would have been tried; None: all was."""
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "trials": [one.to_json() for one in self.trials],
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "left_out": dict(self.left_out or {}),
            "proof": None if self.proof is None else self.proof.to_json(),
            "warnings": list(self.warnings),
        }


def with_devices(plan: Plan, found: DevicesTuned) -> Plan:
    """The plan for one device, without what ranks do without, and with their number; the same where one was chosen.

    Its speedup is the product of what was measured: the plan on one device over the plain script, and several devices
    over that.
    """
    if found.chosen == 1 or found.comparison is None or found.proof is None:
        return plan
    ratio = found.comparison.ratio
    reason = f"x{ratio:.2f} here over one device; trains as one over {found.proof.steps} steps; rounding"
    left = plan.without(*(found.left_out or {}))
    return replace(
        left.with_choice("devices", found.chosen, reason),
        speedup=(plan.speedup or 1.0) * ratio,
        exactness=worst(("rounding", plan.exactness or "bit-identical")),
    )
