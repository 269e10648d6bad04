"""Nested values <-> JSON and tensors: whatever a state_dict holds comes back as it was, type for type.

None, booleans, whole numbers, finite floats, texts and lists are stored as they are; everything else is an object with
one key that names its kind, {"tuple": [...]}. Nothing that could run code is ever written or read.

>>> split({"extra": {0: (1.5, float("inf"))}}).structure
{'extra': {'items': [[0, {'tuple': [1.5, {'float': 'inf'}]}]]}}
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import numpy as np
import torch

from flatout.checkpoint.parts import Part, read_parts
from flatout.checkpoint.storages import Found, Reference, Slot, free_slot, place, view
from flatout.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEPTH_LIMIT = 100
"""Levels of nesting; a value that holds itself is caught by it too."""
OWN_FILES = ("model", "optimizer")
"""Sections whose tensors have a file of their own, under the names that other tools expect."""

Path = tuple[object, ...]
_WHOLE_NUMBER_BITS = 64  # JSON readers agree up to here; Python refuses to print very long ones


@dataclass(frozen=True, kw_only=True)
class Split:
    """A state in two: JSON, and the tensors it refers to (live memory, not copied)."""

    structure: dict[str, object]
    tensors: dict[Slot, torch.Tensor]
    parts: dict[str, Part]
    """This rank's parts of tensors that are spread over ranks, by the names that these have on all ranks."""


def split(state: Mapping[str, object]) -> Split:
    """Split a state. Raises UsageError with path and type of the first value that cannot be stored."""
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        what = f"the state is a {type(state).__name__}"
        raise UsageError(what, limit="it must be a dict with texts as keys", remedy="make it with capture(...)")
    encoder = _Encoder()
    structure = {key: encoder.node(value, (key,)) for key, value in state.items()}
    return Split(structure=structure, tensors=place(encoder.found), parts=encoder.parts)


def join(
    structure: Mapping[str, object], tensors: Mapping[Slot, torch.Tensor], parts: Iterable[FilePath] = ()
) -> dict[str, object]:
    """Put a state together again. parts: files of the parts of tensors that were spread over ranks.

    Raises ValueError, KeyError or TypeError if they do not belong together.
    """
    spread = {name: whole for node in structure.values() for name, whole in _spread_in(node)}
    decoder = _Decoder(tensors, read_parts(parts, spread))
    return {key: decoder.value(node) for key, node in structure.items()}


def _spread_in(node: object) -> Iterator[tuple[str, tuple[list[int], str]]]:
    """(name, (shape, dtype)) of each tensor that is stored in parts."""
    inside = node if isinstance(node, list) else []
    if isinstance(node, dict):
        ((kind, content),) = node.items()
        if kind == "spread":
            name, shape, dtype = content
            yield name, (shape, dtype)
        elif kind == "dict":
            inside = list(content.values())
        elif kind in _SEQUENCES or kind in _MAPPINGS:
            inside = content
    for one in inside:
        yield from _spread_in(one)


class _Encoder:
    def __init__(self) -> None:
        self.found: list[Found] = []
        self.parts: dict[str, Part] = {}
        self._kinds: dict[type, Callable[..., object]] = {
            **dict.fromkeys((type(None), bool, str), lambda value, path: value),
            int: lambda value, path: value if value.bit_length() <= _WHOLE_NUMBER_BITS else {"int": hex(value)},
            float: lambda value, path: value if math.isfinite(value) else {"float": repr(value)},
            complex: lambda value, path: {"complex": self._all((value.real, value.imag), path)},
            bytes: lambda value, path: {"bytes": base64.b64encode(value).decode()},
            list: self._all,
            **{kind: partial(self._tagged, name, self._all) for name, kind in _SEQUENCES.items()},
            **{kind: partial(self._tagged, name, self._items) for name, kind in _MAPPINGS.items()},
            dict: self._dict,
            torch.Size: lambda value, path: {"size": list(value)},
            torch.dtype: lambda value, path: {"dtype": str(value).removeprefix("torch.")},
            torch.device: lambda value, path: {"device": str(value)},
            **dict.fromkeys((torch.Tensor, torch.nn.Parameter), self._tensor),
            Part: self._part,
            np.ndarray: self._array,
        }

    def node(self, value: object, path: Path) -> object:
        if len(path) > DEPTH_LIMIT:
            raise _refusal(path[:5], f"is nested deeper than {DEPTH_LIMIT} levels, or holds itself")
        encode = self._kinds.get(type(value))
        if encode is None and isinstance(value, np.generic):
            encode = self._scalar
        if encode is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise _refusal(path, f"is of type {kind}")
        return encode(value, path)

    def _tagged(self, name: str, encode: Callable[..., object], value: object, path: Path) -> dict[str, object]:
        return {name: encode(value, path)}

    def _all(self, values: Iterable[object], path: Path) -> list[object]:
        return [self.node(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, values: dict[object, object], path: Path) -> dict[str, object]:
        if all(type(key) is str for key in values):
            return {"dict": {key: self.node(value, (*path, key)) for key, value in values.items()}}
        return {"items": self._items(values, path)}

    def _items(self, values: Mapping[object, object], path: Path) -> list[object]:
        return [[self.node(key, (*path, key)), self.node(value, (*path, key))] for key, value in values.items()]

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, object]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _refusal(path, f"is a tensor of layout {tensor.layout} and dtype {tensor.dtype}")
        if tensor.is_meta:
            raise _refusal(path, "is on the meta device: it has no values")
        reference: Reference = {}
        values = tensor.detach()  # an imaginary part or a conjugate is a view with a flag: its bytes are not its values
        values = values.resolve_conj().resolve_neg() if values.is_conj() or values.is_neg() else values
        self.found.append(Found(tensor=values, slot=_slot(path), reference=reference))
        return {"tensor": reference}

    def _part(self, part: Part, path: Path) -> dict[str, object]:
        _, name = free_slot(("", ".".join(str(key) for key in path)), {("", taken) for taken in self.parts})
        self.parts[name] = part
        return {"spread": [name, list(part.shape), str(part.dtype).removeprefix("torch.")]}

    def _array(self, array: NDArray[np.generic], path: Path) -> dict[str, object]:
        _check_numpy(array.dtype, path)
        content = bytearray(array.tobytes())
        stored = (
            torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return {"array": [array.dtype.str, list(array.shape), self._tensor(stored, path)]}

    def _scalar(self, value: np.generic, path: Path) -> dict[str, object]:
        _check_numpy(value.dtype, path)
        return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}


class _Decoder:
    def __init__(self, tensors: Mapping[Slot, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._seen: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, Callable[..., object]] = {
            "int": lambda text: int(text, 16),
            "float": float,
            "complex": self._complex,
            "bytes": lambda text: base64.b64decode(text, validate=True),
            "dict": lambda values: {key: self.value(value) for key, value in values.items()},
            **{name: partial(self._made, kind, self._all) for name, kind in _SEQUENCES.items()},
            **{name: partial(self._made, kind, self._items) for name, kind in _MAPPINGS.items()},
            "size": torch.Size,
            "dtype": lambda name: getattr(torch, name),
            "device": torch.device,
            "tensor": self._tensor,
            "spread": lambda parts: whole[parts[0]],
            "array": self._array,
            "scalar": lambda parts: np.frombuffer(base64.b64decode(parts[1]), np.dtype(parts[0]))[0],
        }

    def value(self, node: object) -> object:
        if isinstance(node, list):
            return self._all(node)
        if isinstance(node, dict):
            ((kind, content),) = node.items()
            return self._kinds[kind](content)
        return node

    def _made(self, kind: Callable[..., object], decode: Callable[..., object], content: object) -> object:
        return kind(decode(content))

    def _complex(self, parts: list[object]) -> complex:
        real, imaginary = self._all(parts)
        if not isinstance(real, float) or not isinstance(imaginary, float):
            raise TypeError(f"a complex number is stored as {parts}")
        return complex(real, imaginary)

    def _all(self, nodes: list[object]) -> list[object]:
        return [self.value(node) for node in nodes]

    def _items(self, items: list[tuple[object, object]]) -> dict[object, object]:
        return {self.value(key): self.value(value) for key, value in items}

    def _tensor(self, reference: Reference) -> torch.Tensor:
        key = repr(reference)  # tied tensors come back as one
        if key not in self._seen:
            self._seen[key] = view(self._tensors, reference)
        return self._seen[key]

    def _array(self, parts: tuple[str, list[int], object]) -> NDArray[np.generic]:
        dtype, shape, node = parts
        stored = self.value(node)
        if not isinstance(stored, torch.Tensor):
            raise TypeError(f"an array is stored as a {type(stored).__name__}")
        return np.frombuffer(stored.numpy().tobytes(), np.dtype(dtype)).reshape(shape).copy()


_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"items": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def _slot(path: Path) -> Slot:
    file, inside = (path[0], path[1:]) if path[0] in OWN_FILES else ("state", path)
    return file, ".".join(str(key) for key in inside)


def _check_numpy(dtype: np.dtype[np.generic], path: Path) -> None:
    if dtype.hasobject or np.dtype(dtype.str) != dtype:  # not the name of structures, or of types of other packages
        raise _refusal(path, f"is of numpy's dtype {dtype}")


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"state{''.join(f'[{key!r}]' for key in path)} {what}",  # as Python would address it
        limit="a checkpoint holds numbers, texts, bytes, tensors, arrays, and dicts, lists, tuples and sets of them",
        remedy="leave it out, or store what it is made of",
    )
