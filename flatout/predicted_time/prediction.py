"""The result of `flatout.whatif`: plain values.

A figure that is unknown is None, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from flatout.notebook_tables import ShownAsText


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A training step on one device."""

    device: str
    """A key of the catalogue, or 'cpu': this machine."""
    name: str
    step_seconds: float | None
    low_seconds: float | None = None
    high_seconds: float | None = None
    """The step is expected between these: as far as nine of ten predictions were off for models that were measured and
    left out of the fit, recurrent ones aside; wider, without a measurement, for those and for other GPUs."""
    reason: str = ""
    """Why step_seconds is None."""
    basis: str
    """What it rests on."""
    device_seconds: float | None = None
    """In which the device works."""
    host_seconds: float | None = None
    """That the host needs to launch the work; both overlap."""
    by_kind: Mapping[str, float] = field(default_factory=dict)
    """The device's seconds by kind of operator, longest first."""
    samples: int | None
    """In a step."""
    peak_bytes: int | None = None
    peak_reason: str = ""
    """Why peak_bytes is None."""
    memory_bytes: int | None = None
    """That the device has."""
    fits: bool | None = None
    watts: float | None = None
    """Of the GPU's board, published."""
    present_seconds: float | None = None
    """That the present step took on this machine, where it was timed for the prediction."""
    notes: tuple[str, ...] = ()
    """What makes it doubtful."""
    price_per_hour: float | None = None
    """As it was given."""

    @property
    def samples_per_second(self) -> float | None:
        return None if self.samples is None or not self.step_seconds else self.samples / self.step_seconds

    @property
    def price_per_million_samples(self) -> float | None:
        rate = self.samples_per_second
        return None if rate is None or self.price_per_hour is None else self.price_per_hour * 1e6 / (3600 * rate)

    @property
    def bound(self) -> str:
        """What takes most of the step: 'host', or a kind of operator; '' where that is unknown."""
        if (self.host_seconds or 0.0) > (self.device_seconds or 0.0):
            return "host"
        return next(iter(self.by_kind), "")

    def to_json(self) -> dict[str, object]:
        derived = {"samples_per_second": self.samples_per_second, "bound": self.bound}
        return {**asdict(self), **derived, "price_per_million_samples": self.price_per_million_samples}


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf(ShownAsText):
    """One training step on several devices: `predictions`, the fastest first, those that are unknown last."""

    name: str
    samples: int | None
    precision: str
    """Of the products: 'fp32', 'TF32 where there is it', 'bf16'."""
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, device: str) -> Prediction:
        """That of the device of this key. KeyError if it was not asked for."""
        try:
            return next(one for one in self.predictions if one.device == device)
        except StopIteration:
            raise KeyError(device) from None

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "predictions": [one.to_json() for one in self.predictions]}

    def summary(self) -> str:
        """What `flatout whatif` prints."""
        from flatout.predicted_time.text import whatif_text

        return whatif_text(self)

    def __str__(self) -> str:
        return self.summary()
