"""Resolves private names of torch. One that this torch lacks raises a clear error where it is used."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

from flatout.errors import MachineError

Private: TypeAlias = Any
"""Of torch's own, which has no public type. The entry that looks a name up may declare more."""


def private(name: str) -> Private:
    """The object with this dotted name, or a `Missing` in its place."""
    first, *parts = name.split(".")
    place: object = importlib.import_module(first)
    for index, part in enumerate(parts):
        try:
            place = getattr(place, part)
        except AttributeError:
            module = ".".join([first, *parts[: index + 1]])
            try:
                place = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise  # the module exists, but fails to import another one
                return Missing(name)
    return place


def required(name: str) -> Private:
    """The object with this dotted name. Raises MachineError if this torch has none."""
    found = private(name)
    require(found)
    return found


def attribute(owner: str, name: str) -> Private:
    """A function that returns the attribute `name` of an instance of torch's class `owner`; `Missing` if it has none.

    An attribute of instances counts if `__init__` mentions it.
    """
    kind = private(owner)
    if isinstance(kind, Missing):
        return kind
    mentioned = getattr(getattr(kind.__init__, "__code__", None), "co_names", ())
    return operator.attrgetter(name) if hasattr(kind, name) or name in mentioned else Missing(f"{owner}.{name}")


class Missing:
    """Stands for a private name that this torch lacks. Any use of it raises MachineError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def error(self) -> MachineError:
        return _error(f"no {self.name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise self.error()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        raise self.error()

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise self.error()

    def __instancecheck__(self, instance: object) -> NoReturn:
        raise self.error()

    def __subclasscheck__(self, subclass: type) -> NoReturn:
        raise self.error()


def is_missing(entry: object) -> bool:
    return isinstance(entry, Missing)


def require(*entries: object) -> None:
    """Raises MachineError for the first entry that this torch lacks. Call it before changing anything."""
    for entry in entries:
        if isinstance(entry, Missing):
            raise entry.error()


@contextlib.contextmanager
def imported_from_torch() -> Iterator[None]:
    """For imports of private names: raises MachineError for one that this torch lacks."""
    try:
        yield
    except ImportError as error:
        raise _error(f"changed a private API: {error}") from error


def _error(problem: str) -> MachineError:
    import torch

    return MachineError(
        f"torch {torch.__version__} has {problem}",
        limit="Flatout uses this private API, which it was tested with in torch 2.13 and 2.15",
        remedy="install one of these versions of torch, or a newer Flatout",
    )
