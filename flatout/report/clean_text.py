"""What `flatout clean` found and removed, in words."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.script.leftovers import Cleaned, Leftover
from flatout.units import format_bytes


def leftovers_text(found: Sequence[Leftover]) -> str:
    """A line for each, and their sum."""
    if not found:
        return "nothing to remove"
    lines = [f"{format_bytes(one.size_bytes):>9}  {one.path}  {one.what}" for one in found]
    return "\n".join([*lines, f"{format_bytes(sum(one.size_bytes for one in found)):>9}  in all"])


def cleaned_text(cleaned: Cleaned) -> str:
    """What is gone, and a line for each that is not."""
    gone = f"removed {format_bytes(sum(one.size_bytes for one in cleaned.removed))}"
    return "\n".join([gone, *(f"not removed: {one.path}: {why}" for one, why in cleaned.failed)])
