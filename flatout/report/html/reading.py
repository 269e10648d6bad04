"""Parts of a JSON document, each checked where it is read.

Keys that are missing are None or empty, because versions add keys without a new schema. A value of the wrong type is
a UsageError that names its place: a document is written by us, and may have been edited since.

>>> Part({"final": {"seconds": 1.5}}, "run.json").at("final").number("seconds")
1.5
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from flatout.errors import UsageError

_LONGEST_TEXT = 2000
_LARGEST_NUMBER = 1e200
"""Nothing that is measured comes near it, and sums of numbers below it are finite too."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, those that reverse the direction of text, and what UTF-8 cannot hold."""


class Part:
    """A value in a document, and where it is."""

    def __init__(self, value: object, where: str) -> None:
        self.value, self.where = value, where

    def __bool__(self) -> bool:
        """Is there anything?"""
        return self.value not in (None, {}, [], "")

    def at(self, key: str) -> Part:
        """An object inside this one; empty where it is missing."""
        return Part(self._get(key), f"{self.where}.{key}")

    def parts(self, key: str) -> list[Part]:
        where, found = f"{self.where}.{key}", self._get(key)
        if found is not None and not isinstance(found, list | tuple):
            raise _wrong(found, where, "a list")
        return [Part(value, f"{where}[{number}]") for number, value in enumerate(found or ())]

    def number(self, key: str) -> float | None:
        return _number(self._get(key), f"{self.where}.{key}")

    def numbers(self, key: str) -> list[float]:
        """Without those that are null."""
        found = [_number(one.value, one.where) for one in self.parts(key)]
        return [value for value in found if value is not None]

    def by_name(self, key: str) -> dict[str, float]:
        """An object of numbers, without those that are null."""
        inner = self.at(key)
        found = {name: inner.number(name) for name in inner.names()}
        return {clean(name): value for name, value in found.items() if value is not None}

    def text(self, key: str) -> str:
        """'' where it is missing."""
        value = self._get(key)
        return "" if value is None else _text(value, f"{self.where}.{key}")

    def texts(self, key: str) -> list[str]:
        return [_text(one.value, one.where) for one in self.parts(key)]

    def flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            raise _wrong(value, f"{self.where}.{key}", "true or false")
        return value

    def names(self) -> list[str]:
        """Of an object."""
        return [] if self.value is None else list(self._mapping())

    def _mapping(self) -> Mapping[str, object]:
        if not isinstance(self.value, Mapping):
            raise _wrong(self.value, self.where, "an object")
        return self.value

    def _get(self, key: str) -> object:
        return None if self.value is None else self._mapping().get(key)


class Sources(dict[str, Part]):
    """Kind of document -> its content, which is empty where there is no such document."""

    def __missing__(self, kind: str) -> Part:
        return Part(None, kind)


def clean(text: str) -> str:
    """At most 2,000 characters, each of which can be shown."""
    cut = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
    return _UNPRINTABLE.sub("\ufffd", cut)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, where, "a text")
    return clean(value)


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, where, "a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not abs(found) <= _LARGEST_NUMBER:
        raise _wrong(value, where, "a finite number")
    return found


def _wrong(value: object, where: str, needed: str) -> UsageError:
    return UsageError(f"{where} is {clean(repr(value))[:60]}", limit=f"{needed} is needed there")
