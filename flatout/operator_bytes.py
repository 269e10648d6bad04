"""The bytes that an operator reads and writes, by what it is given and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from flatout.torch_private.attributes import changed_arguments, name_in_schema

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

_LOOKUPS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::_embedding_bag")
"""They read as much as they return, not all of their first argument."""
_OVERWRITES = (
    *("aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"),
    *("aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_", "aten::exponential_"),
)
"""They do not read what they write to, their first argument."""
# fmt: off
_NO_WORK = frozenset({
    "view", "reshape", "_reshape_alias", "_unsafe_view", "transpose", "t", "permute", "expand", "as_strided", "slice",
    "select", "squeeze", "unsqueeze", "unbind", "split", "split_with_sizes", "chunk", "narrow", "detach", "detach_",
    "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "unfold",
    "view_as", "expand_as", "diagonal", "lift", "lift_fresh", "is_same_size", "result_type", "item", "is_nonzero",
    "record_stream", "to", "zero_grad", "flatten", "unflatten", "movedim", "swapaxes", "numpy_T", "adjoint", "mT",
    "real", "imag",
})
# fmt: on


def moves_no_data(name: str) -> bool:
    """Views, and results that nothing has filled yet: they touch no memory. name: as in its schema, 'aten::view'."""
    return name.partition("::")[2] in _NO_WORK


def moved_bytes(
    operation: OpOverload[..., object], args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> float:
    """That it reads and writes; 0 where it moves no data."""
    name = name_in_schema(operation)
    if moves_no_data(name):
        return 0.0
    if out is None:  # what changes lists of tensors in place returns nothing
        out = tuple(args[place] for place in changed_arguments(operation) if place < len(args))
    written = [_touched_bytes(one) for one in tensors_among(out)]
    given = args[1:] if name in _OVERWRITES else args
    read = [_touched_bytes(one) for one in (*tensors_among(tuple(given)), *tensors_among(tuple(kwargs.values())))]
    if name in _LOOKUPS and read:
        read[0] = min(read[0], sum(written))
    return float(sum(read) + sum(written))


def tensors_among(values: object) -> Iterator[Tensor]:
    """Among arguments or results, and in lists of them."""
    from torch import Tensor

    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, (tuple, list)):
            yield from (inner for inner in value if isinstance(inner, Tensor))
        elif isinstance(value, Tensor):
            yield value


def _touched_bytes(tensor: Tensor) -> int:
    """That reading it touches: an expanded or a sparse tensor is smaller than it looks."""
    import torch

    if tensor.layout != torch.strided:
        from flatout.torch_private.tensors import stored_parts

        return sum(one.numel() * one.element_size() for one in stored_parts(tensor))
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or size == 0:
            count *= size
    return count * tensor.element_size()
