"""The charts of the report, as SVG. Nothing in them is said by colour alone: lines differ in dashes, points in shape or
number.

Each is drawn for a width in pixels, so that its text has the same size on every screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from flatout.statistics import median, quantile
from flatout.units import format_bytes, format_rate, format_seconds

WIDE, NARROW = 912.0, 340.0
LEFT, RIGHT, TOP = 64.0, 16.0, 16.0
MOST_POINTS = 240
"""More are drawn as a band from the fastest to the slowest of neighbours, with their median."""
INTERVAL_WIDTH, INTERVAL_HEIGHT = 260.0, 24.0


# elements, scales and ticks


def element(tag: str, *children: str, **attributes: float | str) -> Markup:
    """`class_` is written as class, `stroke_width` as stroke-width; texts are escaped, Markup is not."""
    written = "".join(f' {_name(key)}="{escape(_value(value))}"' for key, value in attributes.items())
    inside = "".join(escape(child) for child in children)
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def _name(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(width: float, height: float, label: str, *children: str) -> Markup:
    """An SVG image with its description for those who do not see it."""
    box = f"0 0 {_value(width)} {_value(height)}"
    size = {"width": width, "height": height}
    return element("svg", *children, class_="chart", role="img", aria_label=label, viewBox=box, **size)


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
        drawn += [line(LEFT, y, right, y, "grid"), text(form(tick), LEFT - 8, y + 4, "end", "tick")]
    return drawn


def bottom_axis(scale: Scale, ticks: Sequence[float], y: float, form: Callable[[float], str]) -> list[Markup]:
    drawn = [line(scale.start, y, scale.end, y, "axis")]
    for tick in ticks:
        x = scale(tick)
        drawn += [line(x, y, x, y + 4, "axis"), text(form(tick), x, y + 18, "middle", "tick")]
    return drawn


# charts


def share_bar(share: float) -> Markup:
    """A bar beside a number; the number says it all, so it is hidden from screen readers."""
    width = 100 * min(1.0, max(0.0, share))
    bar = element("rect", width=width, height=8, class_="bar")
    return element(
        "svg",
        bar,
        class_="share",
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def stacked_bar(parts: Sequence[tuple[str, float]], label: str) -> Markup:
    """(class, size) of each part, in the order of the table under it; a gap between neighbours."""
    total, at, drawn = sum(size for _, size in parts), 0.0, []
    for name, size in parts:
        width = 1000 * size / total if total else 0.0
        drawn.append(element("rect", x=at, width=max(0.0, width - 2), height=36, class_=f"part {name}"))
        at += width
    return element(
        "svg", *drawn, class_="stacked", viewBox="0 0 1000 36", preserveAspectRatio="none", role="img", aria_label=label
    )


def before_after(rows: Sequence[tuple[str, float, Sequence[float]]], width: float, label: str) -> Markup:
    """(name, seconds, the medians that it is the middle of): bars from zero, with a tick for each median."""
    most = max(max([seconds, *spread]) for _, seconds, spread in rows)
    scale = Scale(low=0.0, high=most, start=0.0, end=width - 1)
    drawn: list[Markup] = []
    for number, (name, seconds, spread) in enumerate(rows):
        top = number * 62.0
        drawn.append(text(name, 0, top + 14, class_="label"))
        drawn.append(text(format_seconds(seconds), width, top + 14, "end", "value"))
        drawn.append(element("rect", x=0, y=top + 22, width=scale(seconds), height=18, class_=f"bar row{number}"))
        drawn += [line(scale(one), top + 43, scale(one), top + 50, "rug") for one in spread]
    return drawing(width, 62.0 * len(rows) - 8, label, *drawn)


def step_timeline(samples: Sequence[float], width: float, label: str, unit: str) -> Markup:
    """Seconds of steps in the order in which they were taken. Those far beyond the others are drawn at the top edge."""
    height, usual, top = 220.0, median(samples), timeline_top(samples)
    x = Scale(low=1, high=max(2, len(samples)), start=LEFT, end=width - RIGHT)
    y = Scale(low=0.0, high=top, start=height - 36, end=TOP)
    drawn = left_axis(y, round_ticks(0.0, top, 4), width - RIGHT, _seconds)
    drawn += bottom_axis(x, _whole_ticks(x, width), height - 36, lambda tick: f"{tick:,.0f}")
    if len(samples) <= MOST_POINTS:
        for number, seconds in enumerate(samples, 1):
            drawn.append(_dot(x(number), y(seconds), seconds > top, format_seconds(seconds)))
    else:
        size = -(-len(samples) // MOST_POINTS)
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        groups = [(x(number * size + 1 + len(part) / 2), part) for number, part in enumerate(parts)]
        lower = [(at, y(min(group))) for at, group in reversed(groups)]
        drawn.append(polygon([*((at, y(max(group))) for at, group in groups), *lower], "band"))
        drawn.append(polyline([(at, y(median(group))) for at, group in groups], "series first"))
    drawn.append(line(LEFT, y(usual), width - RIGHT, y(usual), "median"))
    drawn.append(text(f"median {format_seconds(usual)}", width - RIGHT, y(usual) - 6, "end", "label halo"))
    drawn.append(text(unit, width - RIGHT, height - 2, "end", "tick"))
    return drawing(width, height, label, *drawn)


def _seconds(tick: float) -> str:
    return format_seconds(tick) if tick else "0"


def _bytes(tick: float) -> str:
    return format_bytes(tick) if tick else "0"


def timeline_top(samples: Sequence[float]) -> float:
    """Seconds at the top edge: the slowest step, unless it is far beyond nearly all others."""
    return min(max(samples) * 1.05, max(quantile(samples, 0.98) * 1.3, median(samples) * 2))


def _dot(x: float, y: float, beyond: bool, said: str) -> Markup:
    title = element("title", said)
    if beyond:
        corners = f"{x - 4:.1f},{y + 7:.1f} {x + 4:.1f},{y + 7:.1f} {x:.1f},{y:.1f}"
        return element("polygon", title, points=corners, class_="beyond")
    return element("circle", title, cx=x, cy=y, r=2.5, class_="dot")


def paired_timeline(baseline: Sequence[float], candidate: Sequence[float], width: float, label: str) -> Markup:
    """Medians of windows taken in turns: circles before, squares after."""
    height, most = 200.0, max([*baseline, *candidate]) * 1.08
    x = Scale(low=0.5, high=len(baseline) + 0.5, start=LEFT, end=width - RIGHT)
    y = Scale(low=0.0, high=most, start=height - 36, end=TOP)
    drawn = left_axis(y, round_ticks(0.0, most, 4), width - RIGHT, _seconds)
    drawn += bottom_axis(x, [tick for tick in _whole_ticks(x, width) if tick >= 1], height - 36, lambda t: f"{t:,.0f}")
    for number, (before, after) in enumerate(zip(baseline, candidate, strict=False), 1):
        at = x(number)
        drawn.append(line(at, y(before), at, y(after), "pair"))
        drawn.append(
            element("circle", element("title", format_seconds(before)), cx=at, cy=y(before), r=4, class_="row0")
        )
        square = {"x": at - 4, "y": y(after) - 4, "width": 8.0, "height": 8.0}
        drawn.append(element("rect", element("title", format_seconds(after)), class_="row1", **square))
    drawn.append(text("pair", width - RIGHT, height - 2, "end", "tick"))
    return drawing(width, height, label, *drawn)


def _whole_ticks(x: Scale, width: float) -> list[float]:
    ticks = round_ticks(x.low, x.high, 8 if width > 500 else 4)
    return [tick for tick in ticks if tick == round(tick)]


Curve = tuple[str, Sequence[tuple[float, float]]]
"""(its name, (step, bytes) of each point)."""


def memory_curve(curves: Sequence[Curve], width: float, label: str, warm_up: int = 0) -> Markup:
    """Bytes over steps. Each curve has dashes of its own and its name at its end."""
    height = 230.0
    most = max(size for _, points in curves for _, size in points) * 1.08 or 1.0
    steps = [step for _, points in curves for step, _ in points]
    x = Scale(low=min(steps), high=max(steps), start=LEFT, end=width - RIGHT)
    y = Scale(low=0.0, high=most, start=height - 36, end=TOP + 8)
    drawn = left_axis(y, byte_ticks(most, 4), width - RIGHT, _bytes)
    drawn += bottom_axis(x, _whole_ticks(x, width), height - 36, lambda tick: f"{tick:,.0f}")
    if warm_up and warm_up + 0.5 < x.high:
        edge = x(warm_up + 0.5)
        drawn.append(line(edge, TOP, edge, height - 36, "edge"))
        drawn.append(text("warm-up", edge - 4, TOP + 6, "end", "tick") if edge > LEFT + 60 else Markup(""))
    heights: list[float] = []
    for number, (name, found) in enumerate(curves):
        points = [(x(step), y(size)) for step, size in _thinned(found)]
        kind = ("first", "second", "third")[number % 3]
        drawn.append(polyline(points, f"series {kind}"))
        if len(points) <= 40:
            drawn += [element("circle", cx=a, cy=b, r=2.5, class_=f"dot {kind}") for a, b in points]
        at = _apart(points[-1][1] + (17 if number else -7), heights, 1.0 if number else -1.0)
        heights.append(at)
        drawn.append(text(name, width - RIGHT, at, "end", "label halo"))
    drawn.append(text("step", width - RIGHT, height - 2, "end", "tick"))
    return drawing(width, height, label, *drawn)


def _apart(wanted: float, taken: Sequence[float], step: float) -> float:
    """The nearest place in the direction of `step` that no other label has."""
    at = wanted
    while any(abs(at - other) < 15 for other in taken):
        at += step
    return at


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most twice `MOST_POINTS`, with the highest of each stretch: a short peak must not vanish."""
    if len(points) <= 2 * MOST_POINTS:
        return list(points)
    size = -(-len(points) // (2 * MOST_POINTS))
    return [max(points[at : at + size], key=lambda point: point[1]) for at in range(0, len(points), size)]


def can_be_drawn(*values: float) -> bool:
    """On a logarithmic axis: beyond this no measurement lies."""
    return all(1e-12 < value < 1e27 for value in values)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A class of operators in a roofline chart; `number` is drawn in its mark, and leads to its row in the table."""

    number: int
    row: str
    """Where its row in the document is."""
    name: str
    flops_per_byte: float
    flops_per_second: float
    bound: str


def roofline(
    works: Sequence[Work], products: Mapping[str, float], bytes_per_second: float, width: float, label: str
) -> Markup:
    """FLOP/s over FLOPs per byte, both logarithmic, under the roofs of this machine. `products`: dtype -> FLOP/s."""
    height, roof = 360.0, max(products.values())
    beside = 150.0 if width > 500 else 0.0  # room for the names of roofs
    knees = [peak / bytes_per_second for peak in products.values()]
    least = min([0.1, min(knees) / 20, *(work.flops_per_byte / 2 for work in works)])
    most = max([max(knees) * 10, *(work.flops_per_byte * 2 for work in works)])
    slowest = min([least * bytes_per_second * 4, *(work.flops_per_second / 3 for work in works)])
    x = Scale(low=least, high=most, start=LEFT + 16, end=width - RIGHT - beside, log=True)
    top = TOP if beside else TOP + 16.0 * len(products)
    y = Scale(low=slowest, high=roof * 2.0, start=height - 44, end=top, log=True)
    drawn: list[Markup] = []
    for tick in _few(decades(y.low, y.high), 6):
        drawn.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        drawn.append(text(format_rate(tick, "FLOP/s"), x.start - 6, y(tick) + 4, "end", "tick"))
    across = _few(decades(x.low, x.high), 7 if width > 500 else 4)
    drawn += bottom_axis(x, across, height - 44, lambda tick: f"{tick:g}")
    start = max(least, slowest / bytes_per_second)
    knee = roof / bytes_per_second
    drawn.append(polyline([(x(start), y(start * bytes_per_second)), (x(knee), y(roof))], "roof"))
    drawn += [line(x(peak / bytes_per_second), y(peak), x.end, y(peak), "roof") for peak in products.values()]
    drawn += _roof_names(products, y, x.end, bool(beside))
    middle = (start * knee) ** 0.5
    above = y(middle * bytes_per_second) - 8
    named = f"memory {format_rate(bytes_per_second, 'B/s')}"
    drawn.append(text(named, x(middle) - 8, above, "end" if beside else "middle", "label halo"))
    drawn += [_mark(work, x(work.flops_per_byte), y(work.flops_per_second)) for work in works]
    drawn.append(text("FLOPs per byte", x.end, height - 4, "end", "tick"))
    return drawing(width, height, label, *drawn)


def _roof_names(products: Mapping[str, float], y: Scale, end: float, beside: bool) -> list[Markup]:
    """At the end of each roof, the fastest first, at least a line of text apart; else in a list above all of them."""
    drawn, taken = [], -1e9
    for number, (dtype, peak) in enumerate(sorted(products.items(), key=lambda item: -item[1])):
        named = f"{dtype} {format_rate(peak, 'FLOP/s')}"
        if not beside:
            drawn.append(text(named, end, 12 + 16 * number, "end", "label"))
            continue
        at = max(y(peak) + 4, taken + 16)
        drawn += [line(end, y(peak), end + 10, at - 4, "grid"), text(named, end + 14, at, class_="label")]
        taken = at
    return drawn


def _mark(work: Work, x: float, y: float) -> Markup:
    """A circle where products are the limit, a square where memory is."""
    title = element("title", work.name)
    number = text(str(work.number), x, y + 4, "middle", "number")
    if work.bound == "memory":
        shape = element("rect", x=x - 9, y=y - 9, width=18, height=18, class_="mark memory")
    else:
        shape = element("circle", cx=x, cy=y, r=10, class_="mark compute")
    return element("g", title, shape, number)


def _few(ticks: Sequence[float], most: int) -> list[float]:
    return list(ticks[:: -(-len(ticks) // most)]) if ticks else []


def interval_scale(bounds: Sequence[float]) -> Scale:
    """For speedups, logarithmic; 1 is always in it, and what is beyond a factor of 8 is cut off."""
    least, most = min([0.9, *bounds]), max([1.1, *bounds])
    margin = 22.0
    return Scale(
        low=max(1 / 8, least * 0.97), high=min(8.0, most * 1.03), start=margin, end=INTERVAL_WIDTH - margin, log=True
    )


def interval_axis(scale: Scale) -> Markup:
    drawn = [line(scale.start, 20, scale.end, 20, "axis")]
    for tick in interval_ticks(scale):
        drawn += [line(scale(tick), 16, scale(tick), 20, "axis"), text(f"×{tick:g}", scale(tick), 12, "middle", "tick")]
    return _beside_its_figures(drawn)


def interval_ticks(scale: Scale) -> list[float]:
    """1, and round ratios far enough from it and from one another."""
    wanted = (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 1.5, 3.0, 1.25, 0.75, 1.1, 0.9, 1.05, 0.95)
    found: list[float] = []
    for ratio in wanted:
        if scale.low <= ratio <= scale.high and all(abs(scale(ratio) - scale(one)) > 38 for one in found):
            found.append(ratio)
    return sorted(found)


def interval(scale: Scale, ratio: float, low: float | None, high: float | None, outcome: str) -> Markup:
    """A speedup with its interval: a filled diamond where it was kept, a ring where not, an arrow where it is off the
    axis."""
    middle, drawn = INTERVAL_HEIGHT / 2, []
    if scale.low <= 1 <= scale.high:
        drawn.append(line(scale(1.0), 0, scale(1.0), INTERVAL_HEIGHT, "one"))
    if low is not None and high is not None:
        drawn.append(line(scale(low), middle, scale(high), middle, "whisker"))
        for end in (low, high):
            if scale.low <= end <= scale.high:
                drawn.append(line(scale(end), middle - 5, scale(end), middle + 5, "whisker"))
    at = scale(ratio)
    if not scale.low <= ratio <= scale.high:  # beyond the axis: an arrow points there
        tip = -10.0 if ratio < scale.low else 10.0
        drawn.append(polygon([(at + tip, middle), (at, middle - 6), (at, middle + 6)], "mark-other"))
    elif outcome == "kept":
        drawn.append(polygon([(at, middle - 6), (at + 6, middle), (at, middle + 6), (at - 6, middle)], "mark-kept"))
    else:
        drawn.append(element("circle", cx=at, cy=middle, r=5, class_="mark-other"))
    return _beside_its_figures(drawn)


def _beside_its_figures(drawn: Sequence[Markup]) -> Markup:
    """Hidden from screen readers: the same row has it in figures."""
    box, size = f"0 0 {INTERVAL_WIDTH:g} {INTERVAL_HEIGHT:g}", {"width": INTERVAL_WIDTH, "height": INTERVAL_HEIGHT}
    unseen = {"aria_hidden": "true", "focusable": "false"}
    return element("svg", *drawn, class_="chart interval", viewBox=box, **size, **unseen)
