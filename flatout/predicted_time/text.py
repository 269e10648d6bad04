"""Predicted steps on other devices, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from flatout.predicted_time.prediction import Prediction, WhatIf


def whatif_text(found: WhatIf) -> str:
    samples = "" if found.samples is None else f" of {found.samples:,} samples"
    lines = [f"{found.name} · one step{samples} · products in {found.precision} · predicted, not measured"]
    rows = [_row(one) for one in found.predictions]
    widths = [max(len(row[place]) for row in rows) for place in range(6)]
    for one, row in zip(found.predictions, rows, strict=True):
        *cells, bound = row
        aligned = [
            cells[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
        ]
        lines.append(("  " + "  ".join(aligned) + f"  {bound}").rstrip())
        if one.step_seconds is None:
            lines.append(f"    unknown, because {one.reason}")
        if one.peak_bytes is None and one.peak_reason:
            lines.append(f"    memory unknown, because {one.peak_reason}")
    bases = list(dict.fromkeys(one.basis for one in found.predictions))
    lines += [f"from      {basis}" for basis in bases]
    lines += [f"note      {note}" for note in found.notes]
    return "\n".join(lines)


def _row(one: Prediction) -> tuple[str, str, str, str, str, str, str]:
    if one.step_seconds is None or one.low_seconds is None or one.high_seconds is None:
        step, rate = "?", ""
    else:
        step = f"{format_seconds(one.step_seconds)} ({format_seconds(one.low_seconds)} to "
        step += f"{format_seconds(one.high_seconds)})"
        rate = "" if one.samples_per_second is None else format_rate(one.samples_per_second, "samples/s")
    price = one.price_per_million_samples
    cost = "" if price is None else f"{price:.3g} a million samples"
    power = "" if one.watts is None else f"{one.watts:.0f} W"
    return one.name, step, rate, _memory(one), power, cost, _bound(one)


def _memory(one: Prediction) -> str:
    if one.peak_bytes is None or one.memory_bytes is None:
        return ""
    text = f"{format_bytes(one.peak_bytes)} of {format_bytes(one.memory_bytes)}"
    return text + (", too much" if one.fits is False else ", may not fit" if one.fits is None else "")


def _bound(one: Prediction) -> str:
    """What takes most of the step, and its share."""
    if one.bound == "host" and one.host_seconds is not None:
        return f"bound by the host, which needs {format_seconds(one.host_seconds)} to launch it"
    if not one.bound or not one.device_seconds:
        return ""
    share = one.by_kind[one.bound] / one.device_seconds
    return f"{one.bound} {share:.0%} of the device's time"
