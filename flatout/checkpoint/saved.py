"""One checkpoint on the disk: its kinds of file written, verified and read.

model.safetensors optimizer.safetensors state.safetensors   tensors; a file is missing if it would be empty
part-00000.safetensors part-00001.safetensors ...           parts of tensors that were spread over ranks, of each rank
state.json                                                  the nesting of the state, and everything else in it
manifest.json                                               step, metric, versions, checksums
"""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flatout import __version__
from flatout.checkpoint import manifest
from flatout.checkpoint.disk import hashed_file, sha256_of
from flatout.checkpoint.manifest import SCHEMA, WITHOUT_PARTS, Manifest, StoredFile, damaged, read_manifest
from flatout.checkpoint.parts import PREFIX, Part, entries
from flatout.checkpoint.storages import Slot
from flatout.checkpoint.structure import join
from flatout.checkpoint.tensor_file import read_tensors, write_tensors
from flatout.errors import UsageError
from flatout.plan import Plan

STRUCTURE = "state.json"
TENSORS = ".safetensors"
_MALFORMED = (ValueError, TypeError, AttributeError, RuntimeError)
"""What Python and torch raise for a structure that Flatout did not save."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on the disk whose manifest is intact and whose files have the right sizes; nothing else is read."""

    folder: Path
    step: int
    metric: float | None
    """None if it was saved without one."""
    versions: Mapping[str, str]
    """Program -> the version that saved it: python, torch, flatout, and numpy and cuda if they were there."""
    files: Mapping[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        """Of the files that hold the state."""
        return sum(one.size_bytes for one in self.files.values())

    def load(self) -> dict[str, Any]:  # as torch's state_dict(): a user knows the types in it
        """The state, every byte verified, tensors on the CPU. Raises UsageError naming the file that is damaged."""
        for name, expected in self.files.items():
            _verify(self.folder / name, expected)
        path = self.folder
        try:
            tensors: dict[Slot, torch.Tensor] = {}
            paths = sorted(self.folder / name for name in self.files if name.endswith(TENSORS))
            parts = [path for path in paths if path.name.startswith(PREFIX)]
            for path in (one for one in paths if one not in parts):
                tensors |= {(path.stem, name): tensor for name, tensor in read_tensors(path).items()}
            path = self.folder / STRUCTURE
            return join(json.loads(path.read_bytes()), tensors, parts)
        except (OSError, SafetensorError, ArithmeticError, LookupError, *_MALFORMED) as error:
            raise damaged(path, f"it cannot be read ({error!r})") from error


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint and the state that it holds."""

    checkpoint: Checkpoint
    state: dict[str, Any]  # as Checkpoint.load() gives it
    notes: tuple[str, ...] = ()
    """What was skipped: damaged checkpoints, interrupted saves."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None if it was saved without one."""
        text = self.state.get("plan")
        return None if text is None else Plan.from_toml(text, str(self.checkpoint.folder))


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint in this folder. Raises UsageError if it is not one, damaged, or of a newer Flatout."""
    folder = Path(folder)
    held = read_manifest(folder)
    for name, expected in held.files.items():
        _verify_size(folder / name, expected)
    return Checkpoint(folder=folder, step=held.step, metric=held.metric, versions=held.versions, files=held.files)


def structure_text(structure: Mapping[str, object]) -> bytes:
    """The content of state.json."""
    return json.dumps(structure, allow_nan=False, separators=(",", ":")).encode("ascii")


def write_parts(folder: Path, rank: int, parts: Mapping[str, Part]) -> tuple[str, StoredFile]:
    """Write one rank's parts into the unfinished folder of a checkpoint, flushed to the disk. Raises OSError."""
    name = f"{PREFIX}{rank:05d}{TENSORS}"
    tensors, header = entries({key: part for key, part in parts.items() if part.first_copy})
    with hashed_file(folder / name) as file:
        write_tensors(file, tensors, **header)
    return name, StoredFile(size_bytes=file.size_bytes, sha256=file.sha256)


def fill(
    folder: Path,
    structure: bytes,
    tensors: Mapping[Slot, torch.Tensor],
    step: int,
    metric: float | None,
    parts: Callable[[Path], Mapping[str, StoredFile]] | None = None,
) -> None:
    """Write the files of a checkpoint into an empty folder, each flushed to the disk. Raises OSError.

    parts(folder): writes rank 0's parts and returns the files of all ranks, once they are there.
    """
    by_file: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for (stem, name), tensor in tensors.items():
        by_file[stem + TENSORS][name] = tensor
    files = {}
    for file_name, content in by_file.items():
        with hashed_file(folder / file_name) as file:
            write_tensors(file, content)
        files[file_name] = StoredFile(size_bytes=file.size_bytes, sha256=file.sha256)
    with hashed_file(folder / STRUCTURE) as file:
        file.write(structure)
    files[STRUCTURE] = StoredFile(size_bytes=file.size_bytes, sha256=file.sha256)
    if parts is not None:
        files |= parts(folder)
    schema = WITHOUT_PARTS if parts is None else SCHEMA
    text = Manifest(step=step, metric=metric, versions=versions(), files=files, schema=schema).to_text()
    with hashed_file(folder / manifest.NAME) as file:
        file.write(text.encode())


def versions() -> dict[str, str]:
    """Program -> version, as it is here and now."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "flatout": __version__}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].__version__
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _verify(path: Path, expected: StoredFile) -> None:
    _verify_size(path, expected)
    try:
        checksum = sha256_of(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if checksum != expected.sha256:
        raise damaged(path, "its checksum is not the one it was saved with")


def _verify_size(path: Path, expected: StoredFile) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if size != expected.size_bytes:
        raise damaged(path, f"it has {size} bytes, and was saved with {expected.size_bytes}")
