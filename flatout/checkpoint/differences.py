"""How a checkpoint differs from what it is loaded into, name by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Empty (and false) if everything fits."""

    missing: tuple[str, ...] = ()
    """Here, not in the checkpoint: left as it was."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not here: not loaded."""
    shapes: tuple[str, ...] = ()
    """Of another shape: left as it was."""
    dtypes: tuple[str, ...] = ()
    """Of another dtype: loaded and converted."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def text(self) -> str:
        """One line; long lists are cut to the first few names and a count."""
        parts = [
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.shapes),
            ("of another dtype", self.dtypes),
        ]
        return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in parts if names) or "nothing differs"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(kw_only=True)
class Findings:
    """Differences while they are being collected."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def differences(self) -> Differences:
        return Differences(**{name: tuple(found) for name, found in vars(self).items()})
