"""Inputs from a file, read one at a time: only the current one is in memory (.npy files are memory-mapped).

    .npy                    one input per row: [inputs, tokens], or images [inputs, channels, height, width]
    .npz, .safetensors      one array as above; several with one row per input (keyword arguments of the model);
                            or ragged: a flat array [all tokens] and `lengths` [inputs] beside it
    .jsonl                  one input per line: [3, 14, 15], "a text", {"text": "..."}, {"prompt": "..."} or
                            {"input_ids": [...], ...}
    .txt                    one text per line

Texts need a tokenizer. A line that cannot be read yields a UsageError in its place.
"""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.errors import UsageError, describe_error

Encode = Callable[[str], object]
ARRAYS = (".npy", ".npz", ".safetensors")
SUFFIXES = (*ARRAYS, ".jsonl", ".txt")
LENGTHS = "lengths"
REMEDY = "name a file of inputs"


if TYPE_CHECKING:
    from torch import Tensor

    Array = NDArray[np.generic] | Tensor


@dataclass(frozen=True)
class InputFile:
    """The number of inputs, and an iterator over them from any index."""

    count: int
    begin: Callable[[int], Iterator[object]]


def open_inputs(path: Path, encode: Encode | None = None) -> InputFile:
    """The inputs in this file. UsageError: no such file, an unknown suffix, or arrays that do not match."""
    if path.suffix not in SUFFIXES:
        remedy = "save tokens as .npy, ragged ones as .jsonl or .npz with lengths"
        raise UsageError(f"the inputs are {path}", limit=f"they end in {', '.join(SUFFIXES)}", remedy=remedy)
    try:
        if path.suffix not in ARRAYS:
            return _lines(path, encode)
        arrays = _arrays(path)
    except UsageError:
        raise
    except Exception as error:  # on a damaged file the readers of numpy and safetensors raise of many kinds
        raise UsageError(f"cannot read {path}: {describe_error(error)}", remedy=REMEDY) from error
    return _of_arrays(arrays, path)


def _arrays(path: Path) -> Mapping[str, Array]:
    if path.suffix == ".npy":
        return {"": np.lib.format.open_memmap(path, mode="r")}
    if path.suffix == ".npz":
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # numpy would take it for a pickle
                raise UsageError(f"cannot read {path}: it is not a complete .npz archive", remedy=REMEDY)
            file.seek(0)
            with np.load(file) as arrays:
                return {name: arrays[name] for name in arrays.files}
    from safetensors.torch import load_file

    return load_file(path)


def _of_arrays(arrays: Mapping[str, Array], path: Path) -> InputFile:
    names = [name for name in arrays if name != LENGTHS]
    if not names:
        raise UsageError(f"{path} holds no inputs", limit=f"it holds {', '.join(arrays) or 'nothing'}")
    if len(names) > 1 and all(re.fullmatch(r"arr_\d+", name) for name in names):
        # What numpy.savez calls arrays without names: as keywords of a model they would only fail there.
        limit = "several arrays are keyword arguments of the model, by their names, each with one row an input"
        remedy = (
            f"save one array with a row an input, np.savez(file, inputs=...), ragged ones flat, {LENGTHS!r} beside it"
        )
        raise UsageError(f"{path} holds {names[0]} to {names[-1]}, arrays without names", limit=limit, remedy=remedy)
    if LENGTHS in arrays:
        return _ragged({name: arrays[name] for name in names}, np.asarray(arrays[LENGTHS]), path)
    counts = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in names}
    if len(set(counts.values())) > 1 or any(arrays[name].ndim < 2 and len(names) == 1 for name in names):
        shapes = ", ".join(f"{name or 'array'} is {list(arrays[name].shape)}" for name in names)
        limit = "an array has one row an input"
        raise UsageError(f"{path}: {shapes}", limit=limit, remedy=f"give a flat array of tokens {LENGTHS!r} beside it")

    return _rows({name: arrays[name] for name in names}, counts[names[0]], lambda place: place)


def _ragged(arrays: Mapping[str, Array], lengths: NDArray[np.int64], path: Path) -> InputFile:
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        what = f"{path}: {LENGTHS} is {lengths.dtype} {list(lengths.shape)}"
        raise UsageError(what, limit="it holds a whole number for each input, none of them negative")
    total = int(lengths.sum())
    for name, array in arrays.items():
        held = len(array) if array.ndim else 0
        if held != total:
            raise UsageError(f"{path}: {name} holds {held} tokens", limit=f"{LENGTHS} add up to {total}")
    ends = np.cumsum(lengths, dtype=np.int64)

    return _rows(arrays, len(lengths), lambda place: slice(int(ends[place] - lengths[place]), int(ends[place])))


def _rows(arrays: Mapping[str, Array], count: int, part: Callable[[int], int | slice]) -> InputFile:
    """part: where each array holds an input."""

    def begin(start: int) -> Iterator[object]:
        for place in range(start, count):
            row = {name: _copied(array[part(place)]) for name, array in arrays.items()}
            yield next(iter(row.values())) if len(row) == 1 else row

    return InputFile(count, begin)


def _copied(row: object) -> object:
    """A copy, as torch warns about read-only memory, which a mapped file is, and takes no foreign byte order."""
    return np.array(row, dtype=row.dtype.newbyteorder("=")) if isinstance(row, np.ndarray | np.generic) else row


def _lines(path: Path, encode: Encode | None) -> InputFile:
    with open(path, "rb") as file:
        count = sum(1 for line in file)
    read = _json_line if path.suffix == ".jsonl" else _text

    def begin(start: int) -> Iterator[object]:
        with open(path, "rb") as file:
            for number, line in enumerate(itertools.islice(file, start, None), start):
                try:
                    text = line.decode("utf-8" if number else "utf-8-sig")  # some editors begin a file with a mark
                    yield read(text.rstrip("\r\n"), encode)
                except UnicodeDecodeError as error:
                    yield UsageError(f"the line is not UTF-8: {error.reason} at byte {error.start}")
                except UsageError as error:
                    yield error

    return InputFile(count, begin)


def _json_line(line: str, encode: Encode | None) -> object:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"the line is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the line's JSON is nested too deeply", limit="an input is numbers, or a text") from error
    if isinstance(value, str):
        return _text(value, encode)
    if isinstance(value, dict):
        for name in ("text", "prompt"):
            if isinstance(value.get(name), str):
                return _text(value[name], encode)
    return value


def _text(line: str, encode: Encode | None) -> object:
    if encode is None:
        limit = "the model takes token ids"
        raise UsageError("the input is a text", limit=limit, remedy="name a tokenizer with --tokenizer")
    return encode(line)
