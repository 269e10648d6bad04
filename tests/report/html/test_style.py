"""Contrast in the light and the dark theme, by WCAG 2: 4.5 for text, 3 for what is drawn (level AA)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flatout.report.html

STYLE = (Path(flatout.report.html.__file__).parent / "style.css").read_text()
TEXTS = ("ink", "soft", "link", "good", "bad", "warn")
DRAWN = ("first", "second", "third", "c-data", "c-transfer", "c-forward", "c-backward", "c-optimizer")
DRAWN += ("c-communication", "c-idle", "c-evaluation", "c-other")


def themes() -> dict[str, dict[str, str]]:
    """The variables of each theme; the dark one and print change those of the light one."""
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body)) for body in re.findall(r":root \{(.*?)\}", STYLE, re.S)
    ]
    light, dark, printed = blocks
    return {"light": light, "dark": light | dark, "print": light | printed}


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_contrast(theme: str) -> None:
    colours = themes()[theme]
    grounds = [colours["page"], colours["raised"]]
    faint = {name: min(contrast(colours[name], ground) for ground in grounds) for name in TEXTS}
    assert {name: ratio for name, ratio in faint.items() if ratio < 4.5} == {}
    assert {name for name in DRAWN if contrast(colours[name], colours["page"]) < 3} == set()
    assert min(contrast(colours[name], colours["page"]) for name in ("first", "second")) >= 4.5  # numbers in marks


def test_known_contrasts() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
