"""SVG elements whose texts and attributes are escaped, and the scales and ticks of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(tag: str, *children: str, **attributes: float | str) -> Markup:
    """`class_` is written as class, `stroke_width` as stroke-width; texts are escaped, Markup is not."""
    written = "".join(f' {_name(key)}="{escape(_value(value))}"' for key, value in attributes.items())
    inside = "".join(escape(child) for child in children)
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def _name(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(width: float, height: float, label: str, *children: str, class_: str = "chart") -> Markup:
    """An SVG image with its description for those who do not see it."""
    box = f"0 0 {_value(width)} {_value(height)}"
    size = {"width": width, "height": height}
    return element("svg", *children, class_=class_, role="img", aria_label=label, viewBox=box, **size)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to pixels; `log`: equal ratios are equal distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(one) if self.log else one for one in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from low to high, at most about that many: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def byte_ticks(high: float, most: int = 5) -> list[float]:
    """From 0: round in powers of 1024."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(1.0, high), 1024)))
    return [tick * unit for tick in round_ticks(0.0, high / unit, most)]


def decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def text(content: str, x: float, y: float, anchor: str = "start", class_: str = "") -> Markup:
    return element("text", content, x=x, y=y, text_anchor=anchor, **({"class_": class_} if class_ else {}))


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    joined = " ".join(f"{_value(x)},{_value(y)}" for x, y in points)
    return element("polyline", points=joined, class_=class_)


def polygon(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    joined = " ".join(f"{_value(x)},{_value(y)}" for x, y in points)
    return element("polygon", points=joined, class_=class_)


def left_axis(scale: Scale, ticks: Sequence[float], right: float, form: Callable[[float], str]) -> list[Markup]:
    """Grid lines from the scale's left to `right`, each with its value before it."""
    drawn = []
    for tick in ticks:
        y = scale(tick)
        drawn += [line(_LEFT, y, right, y, "grid"), text(form(tick), _LEFT - 8, y + 4, "end", "tick")]
    return drawn


def bottom_axis(scale: Scale, ticks: Sequence[float], y: float, form: Callable[[float], str]) -> list[Markup]:
    drawn = [line(scale.start, y, scale.end, y, "axis")]
    for tick in ticks:
        x = scale(tick)
        drawn += [line(x, y, x, y + 4, "axis"), text(form(tick), x, y + 18, "middle", "tick")]
    return drawn


_LEFT = 64.0
"""Room for the values of the left axis."""
