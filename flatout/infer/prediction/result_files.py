"""Results written to disk as they arrive, so that an interrupted run resumes where it stopped.

    NAME.jsonl    a line for each input: {"index": 3, "output": [...]} or {"index": 3, "failed": "why"}
    a folder      files of 1024 results each, results-00000000.safetensors: tensors "3" or "3.last_hidden_state"

Lines hold tensors, arrays, numbers, texts, truth values and None; a folder holds tensors and arrays. A warning names
what else the outputs have, once; an output of which nothing can be written is an error.

An incomplete last line is removed on resume; a file in a folder is written atomically. `run.json` beside them records
what they are of (`run_identity`): results of different runs are never mixed. It has the schema of all these files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import io
import json
import math
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flatout import __version__
from flatout.checkpoint.disk import sha256_of
from flatout.errors import UsageError, describe_error
from flatout.infer.output_tensors import output_values
from flatout.infer.prediction.predicted import Failed
from flatout.plan import Plan
from flatout.plan_document import short
from flatout.tensor_bytes import bytes_view
from flatout.whole_files import written_whole

SCHEMA = 1
"""Raised when an older Flatout would go on wrongly. The first files of schema 1 do not say so."""
RESULTS_A_FILE = 1024
LINES_A_FLUSH = 64
DIGEST_CHARACTERS = 16


class Results(ABC):
    """Where results go. What of a result cannot be written is named in a warning, once; UsageError where it is all that
    there is."""

    holds: str
    remedy: str

    def __init__(self, path: Path, keep: str, warn: Callable[[str], None]) -> None:
        self.done = 0
        """How many were there already, or are now safe."""
        self.failed = 0
        """How many of all are failures, earlier runs included."""
        self._path, self._keep, self._warn = path, keep, warn
        self._warned = False

    def add(self, index: int, result: object) -> None:
        """The result of input `index`; they come in order."""
        if isinstance(result, Failed):
            self.failed += 1
            self._add(index, {}, str(result).partition(": ")[2])
            return
        values = named_values(kept(result, self._keep))
        found = {name: value for name, value in values.items() if self.fits(value)}
        left = {name: value for name, value in values.items() if name not in found}
        if left and not found:
            what = f"nothing of the output can be written: {_listed(left)}"
            raise UsageError(what, limit=self.holds, remedy=self.remedy)
        lost = {name: value for name, value in left.items() if value is not None}
        if lost and not self._warned:
            self._warned = True
            self._warn(f"not written: {_listed(lost)}; {self.holds}; {self.remedy}")
        self._add(index, found, "")

    @abstractmethod
    def close(self) -> None:
        """Everything that was added is on the disk."""

    @staticmethod
    @abstractmethod
    def fits(value: object) -> bool:
        """Can these files hold it?"""

    @abstractmethod
    def _add(self, index: int, values: dict[str, object], failed: str) -> None:
        """failed: why there are no values."""


def open_results(
    path: Path, of: Mapping[str, object], *, restart: bool, keep: str = "", warn: Callable[[str], None] = warnings.warn
) -> Results:
    """`of` says what the results are of; `warn` is told, once, what of them cannot be written.

    UsageError where the place holds other results, or anything else.
    """
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
        return (_Lines if lines else _Folder)(path, keep, warn)
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
        what, limit = f"{path} is there already", "it holds no results of predict"
        raise UsageError(what, limit=limit, remedy="name another place") from None
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
    for file in [path] if lines else path.glob("results-*.safetensors"):
        file.unlink(missing_ok=True)
    note.unlink()


class _Lines(Results):
    holds = "lines hold dense real tensors, arrays, numbers, texts, truth values and None"
    remedy = "return such values from the model's forward"

    def __init__(self, path: Path, keep: str, warn: Callable[[str], None]) -> None:
        super().__init__(path, keep, warn)
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

    @staticmethod
    def fits(value: object) -> bool:
        if isinstance(value, Tensor):
            return not value.is_complex() and value.layout is torch.strided
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.kind in "biufU"
        return value is None or isinstance(value, str | int | float)

    def close(self) -> None:
        with _written(self._path):
            try:
                self._save()
            finally:
                self._file.close()

    def _add(self, index: int, values: dict[str, object], failed: str) -> None:
        line: dict[str, object] = {"index": index}
        if failed:
            line["failed"] = failed
        else:
            plain = {name: _numbers(getattr(one, "tolist", lambda one=one: one)()) for name, one in values.items()}
            line["output"] = plain[""] if set(plain) == {""} else plain
        with _written(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._unsaved += 1
            if self._unsaved >= LINES_A_FLUSH:
                self._save()

    def _save(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done, self._unsaved = self.done + self._unsaved, 0


class _Folder(Results):
    holds = "a folder holds dense tensors up to complex64, and arrays"
    remedy = "write numbers and texts to a file: --out NAME.jsonl"

    def __init__(self, path: Path, keep: str, warn: Callable[[str], None]) -> None:
        super().__init__(path, keep, warn)
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

    @staticmethod
    def fits(value: object) -> bool:
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.kind in "biuf"
        return isinstance(value, Tensor) and value.dtype is not torch.complex128 and value.layout is torch.strided

    def close(self) -> None:
        if self._added:
            self._save()

    def _add(self, index: int, values: dict[str, object], failed: str) -> None:
        if failed:
            self._failures[index] = failed
        for name, value in values.items():
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
            self._tensors[f"{index}.{name}" if name else str(index)] = tensor
        self._added += 1
        if self._added == RESULTS_A_FILE:
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
    there = ", ".join(named_values(result)) or "a single value without a name"
    raise UsageError(f"the output has no {name!r}", limit=f"it has {there}", remedy="name another with --keep")


def named_values(result: object) -> dict[str, object]:
    """What of a result holds no further values (tensors, numbers, texts, None, objects) by name: '' for a single one,
    else 'pooled', '0', 'a.b'."""
    found = {}
    if hasattr(result, "_asdict"):  # a named tuple
        result = result._asdict()
    for path, value in output_values(result):
        words = path.removeprefix("output").replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
        found[words.strip(".")] = value
    return found


def _listed(values: Mapping[str, object]) -> str:
    def kind(value: object) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{'' if value.layout is torch.strided else 'sparse '}Tensor, {value.dtype}"

    return ", ".join(f"{name or 'one value'} (of type {kind(value)})" for name, value in values.items())


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


def run_identity(
    spec: str, model: nn.Module, inputs: Path, plan: Plan, *, tokenizer: str | None, keep: str, check_finite: bool
) -> dict[str, object]:
    """In values that JSON knows. spec: what names the model on the command line; model: as it was loaded.

    A model that is made with new random weights each time is another one each time.
    """
    return {
        "model": spec,
        "weights_digest": weights_digest(model),
        "code_digest": _code_digest(spec, model),
        "inputs": str(inputs.resolve()),
        "inputs_digest": sha256_of(inputs)[:DIGEST_CHARACTERS],
        "tokenizer": tokenizer,
        "plan": plan.choices(),
        "keep": keep,
        "check_finite": check_finite,
    }


def _code_digest(spec: str, model: nn.Module) -> str | None:
    """Of the file that `spec` names, the settings in a folder, or the file of the model's class; None: unknown."""
    source = Path(spec.rpartition(":")[0])
    try:
        files = [source] if source.suffix == ".py" else [Path(inspect.getfile(type(model)))]
        files = sorted(Path(spec).glob("*.json")) if Path(spec).is_dir() else files
        digests = [sha256_of(file) for file in files]
    except (OSError, TypeError):  # a class without a file, or in an archive
        return None
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:DIGEST_CHARACTERS]


def weights_digest(model: nn.Module) -> str:
    """Of parameters and buffers, with their names, shapes and dtypes."""
    found = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
        found.update(_bytes_of(tensor.detach()))
    return found.hexdigest()[:DIGEST_CHARACTERS]


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    try:
        return bytes_view(tensor).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):  # a tensor class that has no bytes of its own
        whole = io.BytesIO()
        torch.save(tensor, whole)
        return whole.getvalue()
