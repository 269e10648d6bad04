"""manifest.json: what a checkpoint holds, with the checksum of every file and, last, of the manifest itself.

Its last line is the checksum of the text before it, so any changed byte shows. A later schema keeps this frame, so that
an old Flatout can tell 'newer' from 'damaged'.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from flatout import __version__
from flatout.decoding import decode
from flatout.errors import UsageError

SCHEMA = 2
"""Incremented when an older reader would misread the new checkpoints."""
WITHOUT_PARTS = 1
"""What a checkpoint is written as whose tensors are all whole, so that an older reader can read it."""
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    metric: float | None
    """None if it was saved without one."""
    versions: Mapping[str, str]
    """Program -> the version that saved it."""
    files: Mapping[str, StoredFile]
    schema: int = SCHEMA

    def to_text(self) -> str:
        metric = self.metric if self.metric is None or math.isfinite(self.metric) else repr(self.metric)
        document = {
            "flatout": {"document": "checkpoint", "schema": self.schema, "version": __version__},
            "step": self.step,
            "metric": metric,
            "versions": dict(self.versions),
            "files": {name: {"size_bytes": one.size_bytes, "sha256": one.sha256} for name, one in self.files.items()},
        }
        body = json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}") + ",\n"
        return f'{body} "sha256": "{_checksum(body)}"\n}}\n'


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What every schema begins with."""

    document: str
    schema: int
    version: object


def read_manifest(folder: Path) -> Manifest:
    """The manifest, its own checksum verified. Raises UsageError if it is missing, damaged or of a newer schema."""
    header, document = _read(folder)
    if header.schema > SCHEMA:
        raise UsageError(
            f"{folder} was written by Flatout {header.version}, schema {header.schema}",
            limit=f"this is {__version__}, which reads up to schema {SCHEMA}",
            remedy="update Flatout",
        )
    try:
        metric = document["metric"]
        known = {name: document[name] for name in ("step", "versions", "files")}
        found = decode(Manifest, {**known, "metric": float(metric) if isinstance(metric, str) else metric})
        for name in found.files:
            _check_file_name(name)
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder / NAME, f"it is not complete ({error!r})") from error


def schema_of(folder: Path) -> int | None:
    """The schema of an undamaged manifest, however new; None if it is damaged."""
    try:
        return _read(folder)[0].schema
    except UsageError:
        return None


def damaged(path: Path, why: str) -> UsageError:
    """A file of a checkpoint that is not as it was written."""
    return UsageError(f"{path} is damaged: {why}", remedy="load another checkpoint; Checkpoints.load() finds one")


def _read(folder: Path) -> tuple[_Header, Mapping[str, object]]:
    """The document, of any schema, if its checksum is right."""
    path = folder / NAME
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="name a checkpoint's folder") from error
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not text") from error
    body, _, rest = text.rpartition(' "sha256": "')
    if rest != f'{_checksum(body)}"\n}}\n':
        raise damaged(path, "its checksum is not that of its content")
    try:
        document = json.loads(text)
        begins = {"version": None, **document["flatout"]}
        header = decode(_Header, {one.name: begins[one.name] for one in fields(_Header)})
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it is not a manifest ({error!r})") from error
    if header.document != "checkpoint":
        raise damaged(path, "it is not the manifest of a checkpoint")
    return header, document


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_file_name(name: str) -> None:
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is outside the folder")
