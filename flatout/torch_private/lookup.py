"""Private names of torch, looked up once; one that this torch lacks raises an error that says so when it is used."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Iterator
from typing import Any, NoReturn  # Any: what a name stands for is declared by the entry that looks it up

from flatout.errors import MachineError


def private(name: str) -> Any:  # Any: see above
    """What torch keeps under this dotted name, or a `Missing` in its place."""
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
                    raise  # there it is, and it lacks a module itself
                return Missing(name)
    return place


def required(name: str) -> Any:  # Any: see above
    """The same; raises MachineError where this torch has none. For code that looks a name up when it needs it."""
    found = private(name)
    require(found)
    return found


def attribute(owner: str, name: str) -> Any:  # Any: see above
    """Reads the attribute `name` of an object of torch's class `owner`; `Missing` where its objects have none.

    A class sets an attribute of its instances in `__init__`, where that is written in Python.
    """
    kind = private(owner)
    if isinstance(kind, Missing):
        return kind
    set_at_first = getattr(getattr(kind.__init__, "__code__", None), "co_names", ())
    return operator.attrgetter(name) if hasattr(kind, name) or name in set_at_first else Missing(f"{owner}.{name}")


class Missing:
    """A private name that this torch lacks; calling it, reading from it or comparing types with it: MachineError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def error(self) -> MachineError:
        return _error(f"no {self.name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise self.error()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks an object
            raise AttributeError(name)
        raise self.error()

    def __instancecheck__(self, instance: object) -> NoReturn:
        raise self.error()

    def __subclasscheck__(self, subclass: type) -> NoReturn:
        raise self.error()


def is_missing(entry: object) -> bool:
    return isinstance(entry, Missing)


def require(*entries: object) -> None:
    """Raises MachineError for the first that this torch lacks: to be called before anything is changed."""
    for entry in entries:
        if isinstance(entry, Missing):
            raise entry.error()


@contextlib.contextmanager
def imported_from_torch() -> Iterator[None]:
    """Around imports of private names: one that this torch lacks raises MachineError."""
    try:
        yield
    except ImportError as error:
        raise _error(f"not the private names that are needed: {error}") from error


def _error(lacking: str) -> MachineError:
    import torch

    return MachineError(
        f"torch {torch.__version__} has {lacking}",
        limit="this uses a private API of torch, seen in torch 2.13 and 2.15",
        remedy="install one of these versions, or a newer Flatout",
    )
