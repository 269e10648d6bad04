"""Memory of one operation that its arguments and results do not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


class Operation(Protocol):
    """An operation of torch.ops.aten, as a dispatch mode gets it."""

    __name__: str

    @property
    def tags(self) -> Sequence[object]: ...

    def __call__(self, *args: object, **kwargs: object) -> object: ...


WorkspaceOf: TypeAlias = "Callable[[Operation, Sequence[object], Mapping[str, object], object], Workspace | None]"
"""(operation, its arguments, its keywords, its results) -> what its kernel holds besides them."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes that a kernel holds besides its results as their shapes show them."""

    inside_bytes: int = 0
    """Allocated and freed within the operation: its peak, less what it returns."""
    returned_bytes: Mapping[int, int] = field(default_factory=dict)
    """Result's number -> bytes of its storage, where that is more than its shape needs."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes that a thread allocates for the first such operation and never frees."""
