"""Predicted steps on other devices, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from flatout.predicted_time.prediction import Prediction, WhatIf


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
