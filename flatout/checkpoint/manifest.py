"""manifest.json: what a checkpoint holds, with the checksum of every file and, last, of the manifest itself.

Its last line is the checksum of the text before it, so any changed byte shows. A later schema keeps this frame: then
an old Flatout can tell 'newer' from 'damaged'.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.errors import UsageError

SCHEMA = 1
"""Raised when a reader of the old checkpoints would misread the new ones."""
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest, its own checksum verified. Raises UsageError if it is missing, damaged or of a newer schema."""
    document = _read(folder)
    header = document["flatout"]
    if header["schema"] > SCHEMA:
        raise newer_schema(folder, header["schema"], header.get("version"))
    try:
        return Manifest(
            step=document["step"],
            metric=None if document["metric"] is None else float(document["metric"]),
            versions=document["versions"],
            files={_file_name(name): StoredFile(**one) for name, one in document["files"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder / NAME, f"it lacks what a manifest says ({error!r})") from error


def schema_of(folder: Path) -> int | None:
    """The schema of an undamaged manifest, however new; None if it is damaged."""
    try:
        schema: int = _read(folder)["flatout"]["schema"]
    except UsageError:
        return None
    return schema


def damaged(path: Path, why: str) -> UsageError:
    """A file of a checkpoint that is not as it was written."""
    return UsageError(f"{path} is damaged: {why}", remedy="load another checkpoint; Checkpoints.load() finds one")


def newer_schema(folder: Path, schema: int, version: object) -> UsageError:
    return UsageError(
        f"{folder} was written by Flatout {version}, schema {schema}",
        limit=f"this is {__version__}, which reads up to schema {SCHEMA}",
        remedy="pip install --upgrade flatout",
    )


def _read(folder: Path) -> dict[str, Any]:
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
        if document["flatout"]["document"] == "checkpoint" and isinstance(document["flatout"]["schema"], int):
            return dict(document)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it is no manifest ({error!r})") from error
    raise damaged(path, "it is no manifest of a checkpoint")


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_name(name: str) -> str:
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is outside the folder")
    return name
