"""A module's outputs as an exported file can return them: tensors in tuples, lists and dicts, without classes.

A file is read where the user's classes (and transformers) may not be installed, so a dataclass, a named tuple or a
custom mapping becomes a dict of its fields. Non-tensors are dropped, with a note.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatout.infer.exporting.report import ExportFailure, NotExported


def with_plain_outputs(model: nn.Module, notes: list[str]) -> nn.Module:
    """A module with the same parameters, submodules and `forward` whose call returns plain outputs.

    The same objects, not copies; changes are added to `notes`. The module itself is not changed.
    """
    shallow = _shallow_copy(model)
    shallow._forward_hooks = OrderedDict(model._forward_hooks)
    shallow.register_forward_hook(lambda _module, _inputs, output: plain(output, notes))
    return shallow


def _shallow_copy(model: nn.Module) -> nn.Module:
    """copy.copy(model), also of a module with a parametrization of its own: torch refuses to give its state."""
    if not parametrize.is_parametrized(model):
        return copy.copy(model)
    shallow = type(model).__new__(type(model))
    vars(shallow).update(vars(model))
    return shallow


def plain(output: object, notes: list[str]) -> object:
    """The outputs without classes. NotExported where no tensor is left."""
    kept = _plain(output, "output", notes)
    if not any(True for _ in named_tensors(kept)):
        limit = "an exported file returns tensors, alone or in tuples, lists, dicts, named tuples or dataclasses"
        what = f"the module returns a {type(output).__module__}.{type(output).__qualname__} without a tensor in it"
        raise NotExported(ExportFailure(what=what, limit=limit, remedy="return its tensors"))
    return kept


def _plain(value: object, path: str, notes: list[str]) -> object:
    if isinstance(value, Tensor) or value is None:
        return value
    fields = _fields(value)
    if fields is not None:
        if type(value) is not dict:
            _note(notes, f"{path}, a {type(value).__name__}, is a dict in the file")
        if len({str(key) for key in fields}) < len(fields):
            limit = "a file's outputs are named by texts"
            what = f"{path} has keys that are the same as texts: {', '.join(map(repr, fields))}"
            raise NotExported(ExportFailure(what=what, limit=limit, remedy="name each output by a text of its own"))
        if not all(isinstance(key, str) for key in fields):
            _note(notes, f"{path}'s keys are texts in the file: {', '.join(repr(str(key)) for key in fields)}")
        named = {str(key): _plain(one, f"{path}[{key!r}]", notes) for key, one in fields.items()}
        return {key: one for key, one in named.items() if one is not None}
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_plain(one, f"{path}[{number}]", notes) for number, one in enumerate(value))
    kind = "int" if isinstance(value, torch.SymInt) else type(value).__name__  # a size, under trace
    _note(notes, f"{path}, a {kind}, is left out: a file returns tensors")
    return None


def _fields(value: object) -> Mapping[object, object] | None:
    """Name -> value of what has named parts; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def named_tensors(value: object, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of plain outputs in their order, each with a name: 'logits', 'output_1'."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from named_tensors(one, str(key) if name == "output" else f"{name}_{key}")
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from named_tensors(one, f"{name}_{number}")
