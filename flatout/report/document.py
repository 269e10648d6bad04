"""One versioned JSON document for each result: the same on stdout (`--json`), in a file, and for the next verb to read.

>>> document("check", {"findings": []})["flatout"]["document"]
'check'
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias  # Any: JSON

from flatout import __version__
from flatout.errors import UsageError
from flatout.private_details import without_private
from flatout.whole_files import PRIVATE, errors_named, write_obstacle, written_whole

Document: TypeAlias = Mapping[str, Any]
"""As it was read: JSON, whose parts may be of any type, so each reader checks its own."""
WRITERS = "pass a JSON document that a command of Flatout's wrote"
SCHEMA = 1  # raised when a reader of the old documents would misread the new ones


def document(kind: str, payload: Mapping[str, object], *, include_private: bool = True) -> dict[str, object]:
    """The payload under a header that says what it is; without private details where they are not to be included."""
    payload = payload if include_private else without_private(payload)
    assert "flatout" not in payload, "the header's key is taken"
    return {"flatout": {"document": kind, "schema": SCHEMA, "version": __version__}, **payload}


def to_text(doc: Mapping[str, object]) -> str:
    """As JSON that every parser takes: a NaN or an infinity is a defect of the writer, not of the reader. Bytes of a
    file's name that are not UTF-8 are escapes, `\\udce9`."""
    text = json.dumps(doc, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_document(path: Path, doc: Mapping[str, object]) -> None:
    """Whole or not at all: written beside, flushed to the disk, then renamed. For its owner alone to read: documents
    name lines of the user's code."""
    text = to_text(doc) + "\n"
    with errors_named(path, "name another location, or free up space there"), written_whole(path, mode=PRIVATE) as file:
        file.write_text(text, encoding="utf-8")


def report_place(path: str | os.PathLike[str]) -> Path:
    """In full, as the script may change the folder. UsageError, before the script runs, where none can be written."""
    place = Path(path).absolute()
    if why := write_obstacle(place):
        raise UsageError(f"cannot write {place}", limit=why, remedy="name a file in a folder that can be written")
    return place


def read_document(path: Path, kind: str | None = None) -> Document:
    """A document of that kind (of any kind, if None), or a UsageError that says what the file is instead."""
    try:
        doc = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy=WRITERS) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise UsageError(f"{path} is not a JSON document ({error})", remedy=WRITERS) from error
    except RecursionError:
        raise UsageError(
            f"{path} cannot be read: its JSON is nested too deeply",
            limit="documents of Flatout's have a few levels",
            remedy=WRITERS,
        ) from None
    header = doc.get("flatout") if isinstance(doc, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("schema"), int):
        raise UsageError(f"{path} is not a document of Flatout's", remedy=WRITERS)
    if header["schema"] > SCHEMA:
        raise UsageError(
            f"{path} was written by Flatout {_escaped(header.get('version'))}, schema {header['schema']}",
            limit=f"this is {__version__}, which reads up to schema {SCHEMA}",
            remedy="update Flatout",
        )
    if kind is not None and header.get("document") != kind:
        raise UsageError(f"{path} is a {header.get('document')!r} document", limit=f"a {kind!r} is needed here")
    assert isinstance(doc, dict)
    return doc


def _refused(constant: str) -> object:
    """NaN and infinities, which Python reads, and no document of ours has."""
    raise ValueError(f"{constant} is no JSON")


def _escaped(value: object) -> str:
    """A message must not drive the reader's terminal."""
    return str(value).encode("unicode_escape").decode("ascii")
