"""From what JSON and TOML hold to dataclasses: every value is checked against the type of its field.

>>> @dataclasses.dataclass
... class Peak:
...     rate: float
...     sizes: tuple[int, ...] = ()
>>> decode(Peak, {"rate": 2.5, "sizes": [1, 2]})
Peak(rate=2.5, sizes=(1, 2))
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_ALSO_TAKEN: dict[object, tuple[type, ...]] = {float: (float, int)}
"""JSON writes 2.0 as 2."""


def decode(kind: type[T], data: object) -> T:
    """A `kind`, as JSON or TOML hold it: a dataclass as an object, a tuple as an array, whatever is in them likewise.

    Fields may be of any such dataclass, NamedTuple (an object too), str, int, float, bool, object, tuple, Mapping with
    texts as keys, Literal, and unions of these with None. A field that is missing gets its default. Raises TypeError
    for anything else.
    """
    made = _decoded(kind, data, kind.__name__)
    assert isinstance(made, kind)
    return made


def _decoded(hint: object, data: object, name: str) -> object:
    if hint is object:
        return data
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _instance(hint, _fields(hint), data, name)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _instance(hint, get_type_hints(hint), data, name)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments, data, name)
    if origin is Literal and data in arguments:
        return data
    if origin is tuple and isinstance(data, list | tuple):
        kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(data):
            return tuple(_decoded(one, value, name) for one, value in zip(kinds, data, strict=True))
    if origin is Mapping and isinstance(data, Mapping):
        return {key: _decoded(arguments[1], value, f"{name}[{key!r}]") for key, value in data.items()}
    if hint is type(None) and data is None:
        return None
    if isinstance(hint, type) and type(data) in _ALSO_TAKEN.get(hint, (hint,)):
        return data
    raise TypeError(f"{name} is {data!r}, which is no {getattr(hint, '__name__', hint)}")


def _instance(make: Callable[..., object], hints: Mapping[str, object], data: object, name: str) -> object:
    if not isinstance(data, Mapping):
        raise TypeError(f"{name} is {data!r}, which is not an object with fields")
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise TypeError(f"{name} has no field {unknown[0]!r}")
    return make(**{key: _decoded(hints[key], value, f"{name}.{key}") for key, value in data.items()})


def _first_that_fits(kinds: tuple[object, ...], data: object, name: str) -> object:
    for kind in kinds:
        try:
            return _decoded(kind, data, name)
        except TypeError as error:
            reason = error
    raise reason


@functools.cache
def _fields(kind: type) -> dict[str, object]:
    """Field -> its type, of those that the constructor takes."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}
