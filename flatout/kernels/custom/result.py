"""What the check of a kernel comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from flatout.decoding import decode
from flatout.notebook_tables import table_html
from flatout.statistics import Comparison
from flatout.timing import Measurement

Verdict = Literal["passed", "failed", "noted", "skipped"]
"""noted: not as it might be, and no mistake; skipped: it was not looked at, for the reason in `text`."""

CheckMessage: TypeAlias = dict[str, Any]
"""JSON, as the process of a check writes it."""


@dataclass(frozen=True, kw_only=True)
class KernelFailure:
    """The smallest case that fails, as far as one was found."""

    what: str
    case: str = ""
    """'rows=3, width=9, float32'; '' where it is none of one case."""
    reproduce: str = ""
    """Lines of Python that do the same."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class KernelProperty:
    """One thing that was checked."""

    name: str
    verdict: Verdict
    text: str = ""
    cases: int = 0
    failed: int = 0
    failure: KernelFailure | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> KernelProperty:
        return decode(cls, data)


@dataclass(frozen=True, kw_only=True)
class KernelSpeed:
    """The kernel's time in one dtype, beside the reference's and the ceiling."""

    case: str
    kernel: Measurement
    reference: Measurement
    compiled: Measurement | None
    """The reference by torch.compile; None: why is in `compiled_reason`."""
    compiled_reason: str = ""
    against_reference: Comparison
    against_compiled: Comparison | None
    moved_bytes: int
    """Of all inputs and outputs: what has to be read or written at least once."""
    flops: int
    """Of the reference's matrix products; 0 if it has none."""
    ceiling_seconds: float | None
    """The least time that the measured ceilings allow for these bytes and products; None: see `ceiling_reason`."""
    ceiling_reason: str = ""

    @property
    def share_of_ceiling(self) -> float | None:
        """1: as fast as this machine can be; None: unknown."""
        return None if self.ceiling_seconds is None else self.ceiling_seconds / self.kernel.median_seconds

    def to_json(self) -> dict[str, object]:
        parts = {name: None if (one := getattr(self, name)) is None else one.to_json() for name in _PARTS}
        return {**asdict(self), **parts, "share_of_ceiling": self.share_of_ceiling}

    @classmethod
    def from_json(cls, data: CheckMessage) -> KernelSpeed:
        plain = {name: value for name, value in data.items() if name != "share_of_ceiling"}
        parts = {name: None if data[name] is None else kind.from_json(data[name]) for name, kind in _PARTS.items()}
        return cls(**{**plain, **parts})


_PARTS: Mapping[str, type[Measurement | Comparison]] = {
    "kernel": Measurement,
    "reference": Measurement,
    "compiled": Measurement,
    "against_reference": Comparison,
    "against_compiled": Comparison,
}


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """What `flatout.kernels.check` found."""

    target: str
    device: str
    torch_version: str
    seed: int
    properties: tuple[KernelProperty, ...]
    """In the order in which they were checked."""
    speeds: tuple[KernelSpeed, ...] = ()
    speed_reason: str = ""
    """Why nothing was timed."""
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Did nothing fail?"""
        return not self.failures

    @property
    def failures(self) -> tuple[KernelProperty, ...]:
        """What is wrong."""
        return tuple(one for one in self.properties if one.verdict == "failed")

    def _repr_html_(self) -> str:
        """In a notebook: each property, with the smallest case that fails."""
        rows = [
            (one.name, f"{one.verdict}: {one.failure.what if one.failure else one.text}") for one in self.properties
        ]
        return table_html(f"{self.target}: {'right' if self.ok else 'wrong'}", rows)

    def to_json(self) -> dict[str, object]:
        return {
            "target": self.target,
            "ok": self.ok,
            "device": self.device,
            "torch_version": self.torch_version,
            "seed": self.seed,
            "properties": [one.to_json() for one in self.properties],
            "speeds": [one.to_json() for one in self.speeds],
            "speed_reason": self.speed_reason,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
