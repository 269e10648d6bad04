"""The text of a plan: TOML in the layout of SCHEMA; older layouts are converted when they are read.

Knows tables, keys and values, and nothing of what a choice means.
"""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Callable, Iterable

import tomli_w

from flatout import __version__
from flatout.errors import PlanError

SCHEMA = 4
"""The layout of the TOML document; a file with a higher number was written by a newer Flatout.

In schema 1 `micro_batches` was called `accumulate`; up to schema 2 the script's arguments were always there, since 3
their digest is; since 4 there are digests of the script's own files. Older files are read, and written in
the newest layout.
"""

RENAMED = {"accumulate": "micro_batches"}
"""Choices of schema 1 -> their names since schema 2."""

ONCE = (("provenance", "exactness", {"bit-same": "bit-identical"}), ("plan", "kernels", {"amx": "bf16"}))
"""(table, key, former values -> what they are called now). Files of any schema may have them."""

TABLES = ("plan", "reasons", "provenance")


def parse(text: str, home: Callable[[str], str]) -> dict[str, dict[str, object]]:
    """The document as tables, its own shape checked; what stands in the tables is Plan's to judge.

    `home` says to which table a key belongs that stands at the top level, or nothing.
    """
    try:
        document = tomllib.loads(f"{text}\n")  # with a last line end, an error in the last line has its number
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError; so is a number of 5000 digits
        raise PlanError(f"not TOML: {error}", remedy="correct that line, or tune again") from None
    schema = document.pop("schema", SCHEMA)
    _check_schema(schema)
    for name, table in document.items():
        if name not in TABLES:
            remedy = home(name) or nearest(name, (*TABLES, "schema"))
            raise PlanError(f"unknown key {name!r} at the top level", remedy=remedy)
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {short(table)}", limit="it must be a table", remedy=f"write [{name}]")
    for table, key, names in ONCE:
        found = document.get(table, {})
        if found.get(key) in list(names):  # a list: what stands there may be unhashable
            found[key] = names[found[key]]
    return _migrated(document) if schema == 1 else document


def _check_schema(schema: object) -> None:
    if type(schema) is not int or schema < 1:
        raise PlanError(f"schema is {short(schema)}", limit=f"it must be a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        limit = f"Flatout {__version__} reads up to {SCHEMA}"
        raise PlanError(f"schema is {schema}", limit=limit, remedy="update Flatout, or tune again")


def _migrated(document: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """A document of schema 1 with the names of schema 2."""
    for table in ("plan", "reasons"):
        for old, new in RENAMED.items():
            if new in document.get(table, {}):
                limit = f"schema 1 called it {old!r}"
                raise PlanError(f"unknown key {new!r} in [{table}]", limit=limit, remedy="write schema = 2")
    return document | {
        table: {RENAMED.get(name, name): value for name, value in document[table].items()}
        for table in ("plan", "reasons")
        if table in document
    }


def line(name: str, value: object) -> str:
    return f"{name} = {toml_value(value)}"


def toml_value(value: object) -> str:
    """One value in TOML. A name that is not Unicode (Linux allows it) keeps its readable part."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(part) for part in value)}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def nearest(name: object, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name if isinstance(name, str) else short(name), names, 1)
    if not close and not isinstance(name, str) and names:  # such as torch.bfloat16, or True
        return f"for example {names[0]!r}"
    return f"did you mean {close[0]!r}?" if close else "remove it"


def one_of(words: Iterable[str]) -> str:
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last


def short(value: object) -> str:
    """A wrong value as it stands in an error: long ones cut."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a very large {type(value).__name__}"
