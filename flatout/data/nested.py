"""Batches in any shape: tensors in dicts, tuples, lists, dataclasses, to any depth.

batch_length(({"x": x}, y))                  # 256, the first size that all tensors share
slice_batch(batch, 0, 64)                    # the first 64 samples, as views
to_device(batch, "cuda")                     # the same nest on another device
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, overload

from flatout.arguments import as_device, described
from flatout.errors import UsageError

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance
    from numpy import generic
    from numpy.typing import NDArray
    from torch import Tensor

Nested: TypeAlias = Any
"""Of the type of what was given, but for its leaves."""
L = TypeVar("L")
"""A leaf."""
T = TypeVar("T")
PerSample: TypeAlias = "Tensor | list[object] | tuple[object, ...] | NDArray[generic]"
"""Entries of a batch, one for each sample."""
_ATOMS = (str, bytes, int, float, bool, type(None))


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """A tensor, or an object that moves between devices like one."""
    return hasattr(value, "to") and hasattr(value, "device")


def is_numpy_array(value: object) -> TypeGuard[NDArray[generic]]:
    """False, without an import, where numpy was not imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def map_tensors(function: Callable[[Tensor], object], nested: T) -> T:
    """`nested` with `function` applied to each tensor. Containers keep their types; everything else stays as it is."""
    mapped: T = map_leaves(function, nested, is_tensor)
    return mapped


def map_leaves(
    function: Callable[..., object], nested: object, is_leaf: Callable[[object], bool], *, lists: bool = True
) -> Nested:
    """The same for any kind of leaf; without `lists` a list is left alone."""
    if isinstance(nested, _ATOMS):
        return nested
    if is_leaf(nested):
        return function(nested)
    if isinstance(nested, Mapping):
        mapped = {key: map_leaves(function, value, is_leaf, lists=lists) for key, value in nested.items()}
        return _with_items(nested, mapped)
    if isinstance(nested, tuple) or (lists and isinstance(nested, list)):
        return _with_entries(nested, [map_leaves(function, value, is_leaf, lists=lists) for value in nested])
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return _with_fields(nested, lambda value: map_leaves(function, value, is_leaf, lists=lists))
    return nested


def _with_entries(sequence: Sequence[object], entries: list[object]) -> object:
    """A tuple, named tuple or list of the same type with other values."""
    kind: Callable[..., object] = type(sequence)
    return kind(*entries) if hasattr(sequence, "_fields") else kind(entries)


def _with_fields(instance: DataclassInstance, function: Callable[[object], object]) -> object:
    """A copy of a dataclass with other values, made without `__init__`, which may compute or raise."""
    changed = copy.copy(instance)
    for field in dataclasses.fields(instance):
        object.__setattr__(changed, field.name, function(getattr(instance, field.name)))
    return changed


def _with_items(mapping: Mapping[object, object], items: dict[object, object]) -> object:
    """A mapping of the same type (an OrderedDict, a tokenizer's BatchEncoding) with other values."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    changed = copy.copy(mapping)
    for key, value in items.items():
        changed[key] = value
    return changed


def tensors_in(nested: object, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Each tensor with the expression for it: `batch[0]['x']`."""
    return leaves_in(nested, path, is_tensor)


@overload
def leaves_in(
    nested: object, path: str, is_leaf: Callable[[object], TypeGuard[L]], *, lists: bool = True
) -> Iterator[tuple[str, L]]: ...


@overload
def leaves_in(
    nested: object, path: str, is_leaf: Callable[[object], bool], *, lists: bool = True
) -> Iterator[tuple[str, Any]]: ...  # is_leaf does not say what it looks for


def leaves_in(
    nested: object, path: str, is_leaf: Callable[[object], bool], *, lists: bool = True
) -> Iterator[tuple[str, object]]:
    """The same for any kind of leaf; without `lists` nothing inside a list is one."""
    if is_leaf(nested):
        yield path, nested
    elif isinstance(nested, _ATOMS):
        return
    elif isinstance(nested, Mapping):
        for key, value in nested.items():
            yield from leaves_in(value, f"{path}[{key!r}]", is_leaf, lists=lists)
    elif isinstance(nested, tuple) or (lists and isinstance(nested, list)):
        for i, value in enumerate(nested):
            yield from leaves_in(value, f"{path}[{i}]", is_leaf, lists=lists)
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        for field in dataclasses.fields(nested):
            yield from leaves_in(getattr(nested, field.name), f"{path}.{field.name}", is_leaf, lists=lists)


def batch_length(batch: object) -> int:
    """How many samples a batch has: the first size of its tensors, if it is the same in all.

    Raises UsageError if there is no tensor, if the first sizes differ (it is then unclear what a sample is), and for a
    PackedSequence, in which samples lie side by side.
    """
    packed = next((path for path, _ in leaves_in(batch, "batch", _is_packed)), None)
    if packed is not None:
        raise UsageError(
            f"{packed} is a PackedSequence",
            limit="its samples lie side by side, so it has no dimension along which a batch is split",
            remedy="pad them and pack in the model, or train with micro_batches = 1 and out_of_memory = 'raise'",
        )
    sizes: dict[str, int] = {path: len(tensor) for path, tensor in tensors_in(batch) if tensor.dim() > 0}
    if not sizes:
        raise UsageError(
            f"the batch is {type(batch).__name__} without a tensor that has a batch dimension",
            limit="a batch holds tensors [batch, ...], alone or in dicts, tuples, lists, dataclasses",
            remedy="take its tensors out of it, or train with micro_batches = 1 and out_of_memory = 'raise'",
        )
    if len(set(sizes.values())) > 1:
        one_of_each = {size: path for path, size in reversed(sizes.items())}
        listed = ", ".join(f"{path} has {size}" for size, path in list(reversed(one_of_each.items()))[:4])
        raise UsageError(
            f"the batch's tensors differ in their first size: {listed}",
            limit="it is the number of samples, along which a batch is split",
            remedy="keep what is not per sample out of it, or train with micro_batches = 1 and out_of_memory = 'raise'",
        )
    return next(iter(sizes.values()))


def countable_samples(batch: object) -> int | None:
    """The same; None where they cannot be counted."""
    try:
        return batch_length(batch)
    except UsageError:
        return None


def _is_packed(value: object) -> bool:
    return type(value).__name__ == "PackedSequence" and hasattr(value, "batch_sizes")


def slice_batch(batch: T, start: int, stop: int) -> T:
    """Samples `start` to `stop`: tensors as views; lists without tensors and arrays as long as the batch too.

    Raises UsageError for what holds samples and cannot be sliced: sparse and nested tensors, objects with a `to`.
    """
    sliced: T = _each_along_the_batch(batch, batch_length(batch), lambda values: values[start:stop])
    return sliced


def repeat_batch(batch: T, samples: int) -> T:
    """The batch with its samples repeated, or cut, to `samples` of them: tensors as copies, lists too."""
    import torch

    length = batch_length(batch)
    order = torch.arange(samples, device="cpu") % length
    return batch if samples == length else resize_batch(batch, samples, lambda tensor: tensor[order.to(tensor.device)])


def resize_batch(batch: T, samples: int, resized: Callable[[Tensor], Tensor]) -> T:
    """The same with tensors made by `resized(tensor)`, which returns one of `samples` samples."""
    length = batch_length(batch)

    def change(values: PerSample) -> object:
        if is_tensor(values):
            return resized(values)
        order = [i % length for i in range(samples)]
        if is_numpy_array(values):
            return values[order]
        repeated = [values[i] for i in order]
        return repeated if isinstance(values, list) else tuple(repeated)

    changed: T = _each_along_the_batch(batch, length, change)
    return changed


def _each_along_the_batch(
    nested: object, length: int, change: Callable[[PerSample], object], path: str = "batch"
) -> Nested:
    """`change` applied to what has one entry per sample: tensors, arrays, and lists without tensors of that length."""
    if isinstance(nested, _ATOMS):
        return nested
    if is_tensor(nested):
        _check_sliceable(nested, path)
        return change(nested) if nested.dim() else nested
    if is_numpy_array(nested):
        return change(nested) if nested.ndim and len(nested) == length else nested
    if isinstance(nested, Mapping):
        changed = {
            key: _each_along_the_batch(value, length, change, f"{path}[{key!r}]") for key, value in nested.items()
        }
        return _with_items(nested, changed)
    if isinstance(nested, (list, tuple)):
        if len(nested) == length and not _holds_tensors(nested):
            return change(nested)
        parts = [_each_along_the_batch(value, length, change, f"{path}[{i}]") for i, value in enumerate(nested)]
        return _with_entries(nested, parts)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        names = {id(getattr(nested, field.name)): field.name for field in dataclasses.fields(nested)}
        return _with_fields(
            nested, lambda value: _each_along_the_batch(value, length, change, f"{path}.{names[id(value)]}")
        )
    if moves_itself(nested):
        raise UsageError(
            f"{path} is {described(nested)}",
            limit="which of its contents belong to which sample is not known, so that it cannot be split",
            remedy="keep it out of the batch, or train with micro_batches = 1 and out_of_memory = 'raise'",
        )
    return nested


def _holds_tensors(entries: Sequence[object]) -> bool:
    """Or what moves as one does, and may hold some."""
    return any(True for _ in leaves_in(entries, "", moves_itself))


def _check_sliceable(tensor: Tensor, path: str) -> None:
    layout = str(getattr(tensor, "layout", "torch.strided"))
    nested = bool(getattr(tensor, "is_nested", False))
    if layout == "torch.strided" and not nested:
        return
    kind = "nested" if nested else layout.removeprefix("torch.")
    raise UsageError(
        f"{path} is a tensor of layout {kind}",
        limit="torch cannot slice it along its samples, as splitting a batch does",
        remedy="make it dense or padded, or train with micro_batches = 1 and out_of_memory = 'raise'",
    )


def split_batch(batch: T, parts: int) -> list[T]:
    """`parts` batches whose sizes differ by at most one; fewer if there are fewer samples."""
    if parts == 1:
        return [batch]
    length = batch_length(batch)
    parts = max(1, min(parts, length))
    edges = [length * i // parts for i in range(parts + 1)]
    return [slice_batch(batch, edges[i], edges[i + 1]) for i in range(parts)]


def to_device(nested: T, device: torch.device | str | int, *, non_blocking: bool = True) -> T:
    """`nested` with every tensor on `device`; tensors that are there already are not copied.

    Copies from pinned memory to an accelerator do not block; copies to the host always do, because nothing would say
    when their values have arrived. Raises UsageError for a device that torch cannot use here.
    """
    import torch

    target = as_device(device)

    def moved(leaf: Any) -> object:  # whatever moves itself
        if isinstance(leaf, torch.Tensor):
            return leaf.to(target, non_blocking=non_blocking and target.type != "cpu")
        found = leaf.to(target)
        return leaf if found is None else found  # some move in place

    found: T = map_leaves(moved, nested, moves_itself)
    return found


def moves_itself(value: object) -> bool:
    """A tensor; or an object with a `to` of its own, such as a PackedSequence, whose batch sizes stay on the CPU.

    Mappings and dataclasses are moved part by part: the `to` of a tokenizer's BatchEncoding changes the original.
    """
    if is_tensor(value):
        return True
    in_parts = isinstance(value, Mapping | type) or dataclasses.is_dataclass(value)
    return not in_parts and callable(getattr(value, "to", None))
