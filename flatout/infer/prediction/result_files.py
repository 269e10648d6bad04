"""Results written to disk as they arrive, so that an interrupted run resumes where it stopped.

    NAME.jsonl    a line for each input: {"index": 3, "output": [...]} or {"index": 3, "failed": "why"}
    a folder      files of 1024 results each, results-00000000.safetensors: tensors "3" or "3.last_hidden_state"

An incomplete last line is removed on resume; a file in a folder is written atomically. `run.json` beside them records
what they are of (`run_identity`): results of different runs are never mixed. It has the schema of all these files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout import __version__
from flatout.data.nested import leaves_in
from flatout.errors import UsageError, describe_error
from flatout.infer.prediction.predicted import Failed
from flatout.plan_document import short
from flatout.whole_files import written_whole

SCHEMA = 1
"""Raised when an older Flatout would go on wrongly. The first files of schema 1 do not say so."""
RESULTS_A_FILE = 1024
LINES_A_FLUSH = 64


class Results(Protocol):
    """Where results go."""

    done: int
    """How many were there already, or are now safe."""
    failed: int
    """How many of all are failures, earlier runs included."""

    def add(self, index: int, result: object) -> None:
        """The result of input `index`; they come in order."""

    def close(self) -> None:
        """Everything that was added is on the disk."""


def open_results(path: Path, of: Mapping[str, object], *, restart: bool, keep: str = "") -> Results:
    """`of` says what the results are of. UsageError where the place holds other results, or anything else."""
    lines = path.suffix == ".jsonl"
    if not lines and path.suffix and not path.suffix[1:].isdigit() and not path.is_dir():
        raise UsageError(
            f"the results are to be {path.name}",
            limit="they are NAME.jsonl, or a folder of safetensors files",
            remedy=f"--out {path.with_suffix('.jsonl')}, or --out {path.with_suffix('')}",
        )
    note = path.with_name(f"{path.name}.run.json") if lines else path / "run.json"
    if restart:
        _forget(path, note, lines)
    expected = json.loads(json.dumps({"schema": SCHEMA, **of}))
    if _is_empty(path, note, lines):
        note.unlink(missing_ok=True)
    elif path.exists() and (lines or not path.is_dir() or any(path.iterdir())):
        _check_same(path, note, expected)
    try:
        if not lines:
            path.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            _write_whole(note, lambda temporary: temporary.write_text(json.dumps(expected, indent=1) + "\n"))
        return _Lines(path, keep) if lines else _Folder(path, keep)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", remedy="name a place you may write") from error


def _is_empty(path: Path, note: Path, lines: bool) -> bool:
    """Has an earlier run of predict begun here, and left no result?"""
    if not note.exists():
        return False
    if lines:
        return path.is_file() and not path.stat().st_size
    return path.is_dir() and not any(one != note and one.suffix != ".tmp" for one in path.iterdir())


def _check_same(path: Path, note: Path, expected: dict[str, object]) -> None:
    try:
        known = {"schema": 1, **json.loads(note.read_text())}
    except (OSError, ValueError, TypeError):
        raise UsageError(
            f"{path} is there already", limit="it holds no results of predict", remedy="name another place"
        ) from None
    if known["schema"] != SCHEMA:
        raise UsageError(
            f"{path} holds results of a newer Flatout, schema {short(known['schema'])}",
            limit=f"this is {__version__}, which goes on with schema {SCHEMA}",
            remedy="update Flatout, or start over with --restart",
        )
    for name in sorted({*known, *expected}):
        if known.get(name) != expected.get(name):
            what = f"{path} holds results with {name.replace('_', ' ')} {known.get(name)!r}"
            remedy = "name another place, or start over with --restart"
            raise UsageError(what, limit=f"this run has {expected.get(name)!r}", remedy=remedy)


def _forget(path: Path, note: Path, lines: bool) -> None:
    """Only what predict wrote."""
    if not note.exists():
        return
    if lines:
        path.unlink(missing_ok=True)
        note.unlink()
        return
    for file in path.glob("results-*.safetensors"):
        file.unlink()
    note.unlink()


class _Lines:
    def __init__(self, path: Path, keep: str) -> None:
        self.done = self.failed = 0
        self._path, self._keep = path, keep
        path.touch()
        self._file = open(path, "r+b")  # noqa: SIM115
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self.done += 1
            self.failed += b'"failed": ' in line[:40]
        self._file.seek(whole)
        self._file.truncate()
        self._unsaved = 0

    def add(self, index: int, result: object) -> None:
        line: dict[str, object] = {"index": index}
        if isinstance(result, Failed):
            self.failed += 1
            line["failed"] = str(result).partition(": ")[2]
        else:
            line["output"] = _plain(kept(result, self._keep))
        with _written(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._unsaved += 1
            if self._unsaved >= LINES_A_FLUSH:
                self._save()

    def close(self) -> None:
        with _written(self._path):
            try:
                self._save()
            finally:
                self._file.close()

    def _save(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done, self._unsaved = self.done + self._unsaved, 0


class _Folder:
    def __init__(self, path: Path, keep: str) -> None:
        self.done = self.failed = 0
        self._path, self._keep = path, keep
        self._tensors: dict[str, Tensor] = {}
        self._failures: dict[int, str] = {}
        self._added = 0
        while (file := self._name()).exists():
            try:
                with safe_open(file, "pt") as known:
                    about = known.metadata()
                self.failed += len(json.loads(about["failed"]))
                self.done += int(about["count"])
            except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                what = f"{file} is not a file of results: {describe_error(error)}"
                remedy = "delete it and those after it, or start over with --restart"
                raise UsageError(what, limit="a run goes on behind those that are there", remedy=remedy) from error
        for left in path.glob("*.tmp"):
            left.unlink()

    def add(self, index: int, result: object) -> None:
        if isinstance(result, Failed):
            self.failed += 1
            self._failures[index] = str(result).partition(": ")[2]
        else:
            for name, tensor in named_tensors(kept(result, self._keep)).items():
                self._tensors[f"{index}.{name}" if name else str(index)] = tensor
        self._added += 1
        if self._added == RESULTS_A_FILE:
            self._save()

    def close(self) -> None:
        if self._added:
            self._save()

    def _name(self) -> Path:
        return self._path / f"results-{self.done:08d}.safetensors"

    def _save(self) -> None:
        about = {"first": str(self.done), "count": str(self._added), "failed": json.dumps(self._failures)}
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors.items()}
        _write_whole(self._name(), lambda temporary: save_file(tensors, temporary, about))
        self.done, self._added = self.done + self._added, 0
        self._tensors, self._failures = {}, {}


def kept(result: object, name: str) -> object:
    """The part of a result with this name (a key, an attribute or a place); all of it for ''."""
    if not name:
        return result
    if isinstance(result, Mapping) and name in result:
        return result[name]
    if isinstance(result, list | tuple) and name.isdecimal() and int(name) < len(result):
        return result[int(name)]
    if name.isidentifier() and hasattr(result, name) and not hasattr(result, "device"):
        return getattr(result, name)
    there = ", ".join(named_tensors(result)) or "one tensor without a name"
    raise UsageError(f"the output has no {name!r}", limit=f"it has {there}", remedy="name another with --keep")


def named_tensors(result: object) -> dict[str, Tensor]:
    """The tensors of a result by name: '' for a single one, else 'pooled', '0', 'a.b'."""
    found = {}
    if hasattr(result, "_asdict"):  # a named tuple
        result = result._asdict()
    for path, leaf in leaves_in(result, "", lambda one: hasattr(one, "device")):
        words = path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
        found[words.strip(".")] = leaf
    return found


def _plain(result: object) -> object:
    tensors = named_tensors(result)
    if set(tensors) == {""}:
        return _numbers(tensors[""].tolist())
    return {name: _numbers(tensor.tolist()) for name, tensor in tensors.items()}


def _numbers(value: object) -> object:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Around what writes it: UsageError where the system does not let it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = "name a place you may write"
        if not path.parent.exists():
            remedy = f"create the folder {path.parent} first"
        elif shutil.disk_usage(path.parent).free < 1 << 20 or getattr(error, "errno", None) == errno.ENOSPC:
            remedy = "free some space"
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot write {path}: {why}", remedy=remedy) from error


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    with _written(path), written_whole(path) as temporary:
        write(temporary)
