"""Memory of one operation that its arguments and results do not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes that a kernel holds beside its results as their shapes show them."""

    inside_bytes: int = 0
    """Taken and given back within the operation: its peak, less what it returns."""
    returned_bytes: Mapping[int, int] = field(default_factory=dict)
    """Result's number -> bytes of its storage, where that is more than its shape needs."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes that a thread takes for the first such operation and never gives back."""
