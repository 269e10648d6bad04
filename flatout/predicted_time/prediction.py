"""The result of `flatout.whatif`: plain values, and a table of them for people.

A figure that is unknown is None, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flatout.notebook_tables import ShownAsText
from flatout.units import format_bytes, format_rate, format_seconds


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
        return whatif_text(self)

    def __str__(self) -> str:
        return self.summary()


COLUMNS = ("device", "step (range)", "samples/s", "memory", "power", "price", "bound by")


def whatif_text(found: WhatIf) -> str:
    samples = "" if found.samples is None else f" of {found.samples:,} samples"
    lines = [f"{found.name} · one step{samples} · products in {found.precision} · predicted, not measured"]
    rows = [_row(one) for one in found.predictions]
    shown = [place for place in range(len(COLUMNS)) if any(row[place] for row in rows)]
    widths = [max(len(row[place]) for row in (COLUMNS, *rows)) for place in range(len(COLUMNS))]

    def line(row: Sequence[str]) -> str:
        cells = (f"{row[place]:{'>' if 0 < place < 6 else '<'}{widths[place]}}" for place in shown)
        return ("  " + "  ".join(cells)).rstrip()

    lines.append(line(COLUMNS))
    for one, row in zip(found.predictions, rows, strict=True):
        lines.append(line(row))
        if one.step_seconds is None:
            lines.append(f"    unknown, because {one.reason}")
        if one.peak_bytes is None and one.peak_reason:
            lines.append(f"    memory unknown, because {one.peak_reason}")
    if any(row[5] for row in rows):
        lines.append("price     of a million samples, in the currency of --price")
    bases = list(dict.fromkeys(one.basis for one in found.predictions))
    lines += [f"from      {basis}" for basis in bases]
    lines += [f"now       {_present(one)}" for one in found.predictions if one.present_seconds is not None]
    lines += [f"note      {note}" for one in found.predictions for note in one.notes]
    lines += [f"note      {note}" for note in found.notes]
    return "\n".join(lines)


def _present(one: Prediction) -> str:
    assert one.present_seconds is not None
    return f"the present step took {format_seconds(one.present_seconds)} on {one.device}"


def _row(one: Prediction) -> tuple[str, ...]:
    """In the order of COLUMNS."""
    if one.step_seconds is None or one.low_seconds is None or one.high_seconds is None:
        step, rate = "?", ""
    else:
        step = f"{format_seconds(one.step_seconds)} ({format_seconds(one.low_seconds)} to "
        step += f"{format_seconds(one.high_seconds)})"
        rate = "" if one.samples_per_second is None else format_rate(one.samples_per_second, "").strip()
    price = one.price_per_million_samples
    cost = "" if price is None else f"{price:.3g}"
    power = "" if one.watts is None else f"{one.watts:.0f} W"
    return one.name, step, rate, _memory(one), power, cost, _bound(one)


def _memory(one: Prediction) -> str:
    if one.peak_bytes is None or one.memory_bytes is None:
        return ""
    text = f"{format_bytes(one.peak_bytes)} of {format_bytes(one.memory_bytes)}"
    return text + (", too much" if one.fits is False else ", may not fit" if one.fits is None else "")


def _bound(one: Prediction) -> str:
    """What takes most of the step."""
    if one.bound == "host" and one.host_seconds is not None:
        return "the host"
    if not one.bound or not one.device_seconds:
        return ""
    return f"{one.bound.partition(',')[0]} ({one.by_kind[one.bound] / one.device_seconds:.0%})"
