"""What is used of a map-style data set."""

from __future__ import annotations

from typing import Protocol, TypeGuard


class Items(Protocol):
    """Samples by index."""

    def __getitem__(self, index: int, /) -> object: ...


class Indexed(Items, Protocol):
    """The same with a length."""

    def __len__(self) -> int: ...


def is_indexed(data: object) -> TypeGuard[Indexed]:
    """Does it have the methods of a map-style data set?"""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
