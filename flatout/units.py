"""Bytes, seconds and rates: the one place that formats and parses them.

Inside Flatout every quantity is in its base unit, and its name says so (`peak_bytes`, `step_seconds`). Memory is
counted in powers of 1024 (GiB), because that is how it is sold and allocated; rates in powers of 1000 (GB/s,
TFLOP/s), because that is how data sheets give them.

>>> format_seconds(0.00115), format_bytes(8 * 1024**3), format_rate(2.5e12, "FLOP/s")
('1.15 ms', '8 GiB', '2.5 TFLOP/s')
>>> parse_bytes("1.5GiB"), parse_seconds("10m")
(1610612736, 600.0)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from flatout.errors import UsageError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BYTES_OF: dict[str, int] = {
    "": 1,
    "b": 1,
    **{name.lower(): 1024**power for power, name in enumerate(_BINARY) if power},
    **{f"{prefix.lower()}b": 1000**power for power, prefix in enumerate(_DECIMAL) if power},
    **{prefix.lower(): 1024**power for power, prefix in enumerate(_DECIMAL) if power},
}
_SECONDS_OF = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ]*)\s*")


def _three_figures(value: float) -> str:
    """The value to three significant figures, without an exponent or trailing zeros: 1.15, 430, 0.05."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_bytes(count: float) -> str:
    """A capacity: '512 B', '1.5 MiB', '139 GiB'."""
    size, power = float(count), 0
    while abs(size) >= 999.5 and power < len(_BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{_three_figures(size)} {_BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """A duration: '430 µs', '1.15 ms', '2.1 s', '3 min 4 s', '2 h 5 min'."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    for below, scale, unit in ((999.5e-9, 1e9, "ns"), (999.5e-6, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if seconds < below:
            return f"{_three_figures(seconds * scale)} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return _two_parts(whole, 60, "min", "s")
    return _two_parts(round(whole / 60), 60, "h", "min")


def _two_parts(total: int, base: int, large: str, small: str) -> str:
    quotient, rest = divmod(total, base)
    return f"{quotient} {large} {rest} {small}" if rest else f"{quotient} {large}"


def format_rate(per_second: float, unit: str) -> str:
    """A rate with its decimal prefix: '2.5 TFLOP/s', '30 GB/s', '412 k launches/s'."""
    value, power = float(per_second), 0
    while abs(value) >= 999.5 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    short = unit in ("B/s", "FLOP/s", "OP/s")  # a prefix is joined to a symbol, and separated from a word
    return f"{_three_figures(value)} {_DECIMAL[power]}{'' if short or not power else ' '}{unit}"


def format_number(value: float) -> str:
    """'82,410', '12.5'."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def labelled(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Rows of a table; only the first shows the label."""
    return [(label if number == 0 else "", text) for number, text in enumerate(texts)]


def parse_bytes(text: str) -> int:
    """'8GiB' -> 8589934592; '8GB' is decimal; '8G' is binary, as in most tools."""
    return round(_in_base_units(text, _BYTES_OF, "a size", "write it as 512MiB, 8GiB or 8GB"))


def parse_seconds(text: str) -> float:
    """'10m' -> 600.0; also ns, us, ms, s, min, h, d; a bare number is seconds."""
    return _in_base_units(text, _SECONDS_OF, "a duration", "write it as 30s, 10m or 1.5h")


def parse_positive_seconds(text: str, option: str) -> float:
    """The same above 0."""
    value = parse_seconds(text)
    if not value > 0:
        raise UsageError(f"{option} is {text}", limit="it is above 0", remedy="write it as 30s, 10m or 1.5h")
    return value


def parse_share(text: str) -> float:
    """'3%' -> 0.03. A bare number is refused: 0.03 may mean either."""
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = math.nan
    if not sign or rest or not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{text!r} is not a percentage", remedy="write it as 3% or 0.5%")
    return value


def counted(number: int, noun: str) -> str:
    """'1 step', '2,000 steps'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _in_base_units(text: str, units: dict[str, float] | dict[str, int], kind: str, remedy: str) -> float:
    match = _QUANTITY.fullmatch(text)
    scale = units.get(match[2].lower()) if match is not None else None
    if match is None or scale is None or not math.isfinite(value := float(match[1]) * scale):
        raise UsageError(f"{text!r} is not {kind}", remedy=remedy)
    return value
