"""Batches as people shape them: tensors in dicts, tuples, lists, dataclasses, in any depth.

batch_length(({"x": x}, y))                  # 256, the first size that all tensors share
slice_batch(batch, 0, 64)                    # the first 64 samples, as views
to_device(batch, "cuda")                     # the same nest on another device
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from flatout.arguments import as_device
from flatout.errors import UsageError

IsLeaf = Callable[[Any], bool]

_ATOMS = (str, bytes, int, float, bool, type(None))


def is_tensor(value: Any) -> bool:
    """A tensor, or what moves like one (a PackedSequence)."""
    return hasattr(value, "to") and hasattr(value, "device")


def map_tensors(function: Callable[[Any], Any], nested: Any) -> Any:
    """`nested` with `function` applied to each tensor. Containers keep their types; everything else stays as it is."""
    return map_leaves(function, nested, is_tensor)


def map_leaves(function: Callable[[Any], Any], nested: Any, is_leaf: IsLeaf, *, lists: bool = True) -> Any:
    """The same for any kind of leaf; without `lists` a list is left alone."""
    if isinstance(nested, _ATOMS):
        return nested
    if is_leaf(nested):
        return function(nested)
    if isinstance(nested, Mapping):
        mapped = {key: map_leaves(function, value, is_leaf, lists=lists) for key, value in nested.items()}
        return _with_items(nested, mapped)
    if isinstance(nested, tuple) or (lists and isinstance(nested, list)):
        values = [map_leaves(function, value, is_leaf, lists=lists) for value in nested]
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return _with_fields(nested, lambda value: map_leaves(function, value, is_leaf, lists=lists))
    return nested


def _with_fields(instance: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a dataclass with other values, made without `__init__`, which may compute or refuse."""
    changed = copy.copy(instance)
    for field in dataclasses.fields(instance):
        object.__setattr__(changed, field.name, function(getattr(instance, field.name)))
    return changed


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type (an OrderedDict, a tokenizer's BatchEncoding) with other values."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    changed = copy.copy(mapping)
    for key, value in items.items():
        changed[key] = value
    return changed


def tensors_in(nested: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Each tensor with the expression that leads to it: `batch[0]['x']`."""
    return leaves_in(nested, path, is_tensor)


def leaves_in(nested: Any, path: str, is_leaf: IsLeaf, *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """The same for any kind of leaf; without `lists` nothing in a list is one."""
    if isinstance(nested, _ATOMS):
        return
    if is_leaf(nested):
        yield path, nested
    elif isinstance(nested, Mapping):
        for key, value in nested.items():
            yield from leaves_in(value, f"{path}[{key!r}]", is_leaf, lists=lists)
    elif isinstance(nested, tuple) or (lists and isinstance(nested, list)):
        for i, value in enumerate(nested):
            yield from leaves_in(value, f"{path}[{i}]", is_leaf, lists=lists)
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        for field in dataclasses.fields(nested):
            yield from leaves_in(getattr(nested, field.name), f"{path}.{field.name}", is_leaf, lists=lists)


def batch_length(batch: Any) -> int:
    """How many samples a batch has: the first size of its tensors, where all agree.

    Raises UsageError where there is no tensor, or the first sizes differ: then nobody can say what a sample is.
    """
    sizes: dict[str, int] = {path: len(tensor) for path, tensor in tensors_in(batch) if tensor.dim() > 0}
    if not sizes:
        raise UsageError(
            f"the batch is {type(batch).__name__} without a tensor that has a batch dimension",
            limit="a batch holds tensors [batch, ...], alone or in dicts, tuples, lists, dataclasses",
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} has {size}" for path, size in list(sizes.items())[:4])
        raise UsageError(
            f"the batch's tensors differ in their first size: {listed}",
            limit="it is the number of samples, along which a batch is split",
            remedy="put what is not per sample elsewhere, or train with micro_batches = 1 and out_of_memory = 'raise'",
        )
    return next(iter(sizes.values()))


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop`: tensors as views, lists of texts or numbers that are as long as the batch sliced."""
    return _each_along_the_batch(batch, batch_length(batch), lambda values: values[start:stop])


def repeat_batch(batch: Any, samples: int) -> Any:
    """The batch with its samples repeated, or cut, to another number: tensors as copies, lists too."""
    import torch

    length = batch_length(batch)
    order = torch.arange(samples) % length
    return batch if samples == length else resize_batch(batch, samples, lambda tensor: tensor[order.to(tensor.device)])


def resize_batch(batch: Any, samples: int, resized: Callable[[Any], Any]) -> Any:
    """The same for tensors of any making: `resized(tensor)` has that many samples."""
    length = batch_length(batch)

    def change(values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            return resized(values)
        repeated = [values[i % length] for i in range(samples)]
        return repeated if isinstance(values, list) else tuple(repeated)

    return _each_along_the_batch(batch, length, change)


def _each_along_the_batch(nested: Any, length: int, change: Callable[[Any], Any]) -> Any:
    """`change` made to what has one entry a sample: tensors, and lists of texts or numbers as long as the batch."""
    if isinstance(nested, (list, tuple)) and len(nested) == length and all(isinstance(v, _ATOMS) for v in nested):
        return change(nested)
    if isinstance(nested, Mapping):
        changed = {key: _each_along_the_batch(value, length, change) for key, value in nested.items()}
        return _with_items(nested, changed)
    if isinstance(nested, (list, tuple)):
        values = [_each_along_the_batch(value, length, change) for value in nested]
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return _with_fields(nested, lambda value: _each_along_the_batch(value, length, change))
    return map_tensors(lambda tensor: change(tensor) if tensor.dim() else tensor, nested)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """`parts` batches whose sizes differ by at most one; fewer where there are fewer samples."""
    if parts == 1:
        return [batch]
    length = batch_length(batch)
    parts = max(1, min(parts, length))
    edges = [length * i // parts for i in range(parts + 1)]
    return [slice_batch(batch, edges[i], edges[i + 1]) for i in range(parts)]


def to_device(nested: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """`nested` with every tensor on `device`; what is there already is not copied.

    Copies to an accelerator do not block where the memory is pinned; copies to the host always do, because nobody
    could tell when their values are there. Raises UsageError for a device that torch cannot use here.
    """
    target = as_device(device)
    return map_tensors(lambda t: t.to(target, non_blocking=non_blocking and target.type != "cpu"), nested)
