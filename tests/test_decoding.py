"""From JSON to dataclasses: every kind of field comes back as it was, and a value of another type is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

import pytest

from flatout.decoding import decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    shape: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    flag: bool | None = None
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    named: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    anything: object = None


def test_a_value_comes_back_as_it_was() -> None:
    value = Outer(
        name="n",
        kind="b",
        flag=False,
        inner=Inner(rate=2.5, shape=(1, 2)),
        several=(Inner(rate=1.0), Inner(rate=0.5)),
        named={"x": ("y", "z"), "": ()},
        anything=[1, {"a": None}],
    )
    assert decode(Outer, json.loads(json.dumps(dataclasses.asdict(value)))) == value


class Named(NamedTuple):
    mean: float
    pairs: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfNamed:
    named: Named | None = None


def test_a_named_tuple_comes_back_from_an_object() -> None:
    value = OfNamed(named=Named(mean=0.5, pairs=5))
    assert decode(OfNamed, {"named": {"mean": 0.5, "pairs": 5}}) == value
    assert decode(OfNamed, {"named": None}) == OfNamed()
    with pytest.raises(TypeError):
        decode(OfNamed, {"named": {"mean": "0.5"}})


def test_what_is_missing_gets_its_default_and_whole_numbers_are_floats() -> None:
    assert decode(Outer, {"name": "n", "inner": {"rate": 2}}) == Outer(name="n", inner=Inner(rate=2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"Outer is \[\], which is not an object with fields"),
        ({"name": 1}, "Outer.name is 1, which is no str"),
        ({"name": "n", "kind": "c"}, "Outer.kind is 'c'"),
        ({"name": "n", "flag": 1}, "Outer.flag is 1"),
        ({"name": "n", "inner": {"rate": True}}, "Outer.inner"),
        ({"name": "n", "several": [{"rate": 1, "shape": [1, 2, 3]}]}, "Outer.several.shape"),
        ({"name": "n", "named": {"x": [1]}}, r"Outer.named\['x'\] is 1, which is no str"),
        ({"name": "n", "other": 1}, "Outer has no field 'other'"),
        ({}, "name"),
    ],
)
def test_anything_else_is_refused(data: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        decode(Outer, data)
