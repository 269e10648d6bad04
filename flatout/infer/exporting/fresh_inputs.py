"""The example inputs of an export: how the module is called, which sizes may vary, and fresh inputs like them.

Dimension 0 that agrees with the first tensor's is the batch; dimension 1 that agrees with the first sequence's is the
length. Fresh inputs keep dtypes and ranges: whole numbers stay within the example's, so that an index stays in its
table; floating-point values are drawn with its mean and spread; a mask's rows are rows of the example's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.arguments import described
from flatout.data.nested import map_leaves, map_tensors, tensors_in
from flatout.errors import UsageError
from flatout.infer.exporting.report import Dynamic

_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A call of the module. `batch` and `length` are the sizes that count as such; None: there is none."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    batch: int | None
    length: int | None
    limits: Mapping[str, int] = field(default_factory=dict)
    """Path of a tensor of whole numbers -> rows of the embedding that it indexes."""

    @property
    def sizes(self) -> dict[str, int]:
        """'batch' and 'length', without one that there is not."""
        both = {"batch": self.batch, "length": self.length}
        return {name: size for name, size in both.items() if size is not None}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Path -> tensor, in the order of the call."""
        return dict(tensors_in((self.args, self.kwargs), "inputs"))

    def sizes_named(self, tensor: Tensor, dynamic: Dynamic) -> dict[int, str]:
        """Dimension -> 'batch' or 'length', for the sizes of this tensor that may vary."""
        found = {}
        if dynamic != "none" and tensor.ndim > 0 and tensor.shape[0] == self.batch:
            found[0] = "batch"
        if dynamic == "length" and tensor.ndim > 1 and tensor.shape[1] == self.length:
            found[1] = "length"
        return found


def example_from(model: nn.Module, example_inputs: object, dynamic: Dynamic) -> Example:
    """How the module is called: a tensor or tuple is positional; a dict is by name where `forward` knows the names.

    Arrays of numpy are taken as tensors. UsageError: inputs that a file cannot take, or that `forward` does not.
    """
    args, kwargs = _call_of(model, _as_tensors(model, example_inputs))
    _check_kinds((args, kwargs))
    tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
    if any(tensor.is_meta for tensor in tensors):
        limit, remedy = "the module is run on them", "pass tensors that hold values"
        raise UsageError("example_inputs are on the meta device", limit=limit, remedy=remedy)
    sized = [tensor for tensor in tensors if tensor.ndim > 0]
    batch = sized[0].shape[0] if sized else None
    length = _length(sized)
    if dynamic != "none" and not tensors:
        limit = "it is a tensor, a tuple of positional inputs, or a dict of named ones"
        remedy = "for example torch.zeros(2, 3, 32, 32); if the module takes no tensor, pass dynamic='none'"
        what = f"example_inputs is {described(example_inputs)}" + (
            ", without a tensor in it" if isinstance(example_inputs, Mapping | tuple | list) else ""
        )
        raise UsageError(what, limit=limit, remedy=remedy)
    if dynamic != "none" and batch is None:
        limit = "a batch is the first dimension of a tensor"
        raise UsageError("the example inputs have no batch", limit=limit, remedy="pass dynamic='none'")
    if dynamic == "length" and length is None:
        limit = "a length is dimension 1 of whole numbers [batch, length] or of vectors [batch, length, width]"
        raise UsageError("the example inputs have no sequence", limit=limit, remedy="pass dynamic='batch'")
    if batch == 0 or (dynamic == "length" and length == 0):
        raise UsageError("the example inputs are empty", limit="they hold at least one sample")
    return Example(args=args, kwargs=kwargs, batch=batch, length=length)


def _as_tensors(model: nn.Module, inputs: object) -> object:
    """Arrays of numpy as tensors, floating-point ones in the dtype of the model's weights (numpy's own is float64)."""
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        try:  # a copy: torch takes no negative strides, nor foreign bytes, and warns of memory that is read-only
            made = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            limit, remedy = "an input holds numbers", "pass numbers of one dtype, texts and objects outside of arrays"
            raise UsageError(f"an input is an array of {array.dtype}", limit=limit, remedy=remedy) from error
        return made.to(dtype) if made.is_floating_point() else made

    return map_leaves(tensor, inputs, lambda one: isinstance(one, np.ndarray))


def _call_of(model: nn.Module, inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    signature = inspect.signature(model.forward)
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        named = dict(inputs)
        if _binds(signature, (), named):  # in the order of `forward`: exporters put them so
            order = list(signature.parameters)
            return (), dict(sorted(named.items(), key=lambda item: (*order, item[0]).index(item[0])))
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not _binds(signature, args, {}):
        given = ", ".join(inputs) if isinstance(inputs, Mapping) else f"{len(args)} inputs"
        remedy = "pass a tensor, a tuple of positional inputs, or a dict of named ones"
        raise UsageError(f"forward does not take {given}", limit=f"it is forward{signature}", remedy=remedy)
    return args, {}


def _binds(signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _check_kinds(value: object, path: str = "inputs") -> None:
    if isinstance(value, Mapping | tuple | list) and not hasattr(value, "_fields"):
        items: Iterable[tuple[object, object]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            _check_kinds(one, f"{path}[{key!r}]")
    elif not isinstance(value, (Tensor, *_PLAIN)):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        limit = "an exported file takes tensors, numbers, texts and None, alone or in tuples, lists and dicts"
        remedy = "pass its tensors, and let forward take them"
        raise UsageError(f"{path} is a {kind}", limit=limit, remedy=remedy)


def _length(tensors: list[Tensor]) -> int | None:
    for tensor in tensors:
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        if (whole and tensor.ndim == 2) or (not whole and tensor.ndim == 3):
            return tensor.shape[1]
    return None


def with_sizes(example: Example, sizes: Mapping[str, int], dynamic: Dynamic, kind: str, seed: int) -> Example:
    """Inputs like the example's with this batch and length: `fresh` values, or rows `resampled` from the example."""
    generator = torch.Generator().manual_seed(seed)
    paths: dict[int, str] = {id(tensor): path for path, tensor in example.tensors.items()}

    def remade(tensor: Tensor) -> Tensor:
        named = example.sizes_named(tensor, dynamic)
        shape = [sizes.get(named.get(number, ""), size) for number, size in enumerate(tensor.shape)]
        if kind == "resampled" or _is_mask(tensor):
            return _resampled(tensor, shape, 0 in named, generator)
        return _fresh(tensor, shape, example.limits.get(paths[id(tensor)]), generator)

    args, kwargs = map_tensors(remade, (example.args, example.kwargs))
    batch, length = sizes.get("batch", example.batch), sizes.get("length", example.length)
    return replace(example, args=args, kwargs=kwargs, batch=batch, length=length)


def _resampled(tensor: Tensor, shape: list[int], rows_vary: bool, generator: torch.Generator) -> Tensor:
    picked = tensor
    if rows_vary:
        rows = torch.randint(tensor.shape[0], (shape[0],), generator=generator, device="cpu")
        picked = tensor[rows.to(tensor.device)]
    if len(shape) > 1 and shape[1] != tensor.shape[1]:
        # Stretched, so that padding stays on its side.
        places = torch.arange(shape[1], device=tensor.device) * tensor.shape[1] // shape[1]
        picked = picked[:, places]
    return picked.clone()


def _is_mask(tensor: Tensor) -> bool:
    """Bool, 0 and 1, or 0 and -inf. Its rows are the example's: drawn at random some would mask all that a token sees,
    and attention over nothing means something else to each runtime."""
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        return tensor.dtype is torch.bool
    if tensor.is_floating_point():
        return not bool(tensor.isfinite().all())
    return not tensor.is_complex() and tuple(int(one) for one in tensor.long().aminmax()) == (0, 1)


def _fresh(tensor: Tensor, shape: list[int], limit: int | None, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, whose generator is the same everywhere."""
    values = tensor.detach().cpu()
    if values.numel() == 0:
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    if values.is_complex():
        drawn = torch.randn(shape, generator=generator, dtype=torch.complex64, device="cpu")
    elif values.is_floating_point():
        wide = values.double()
        spread = float(wide.std(correction=0)) or 1.0
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        drawn = drawn * spread + float(wide.mean())
        if float(wide.min()) < float(wide.max()):  # what is never negative, or a share, stays so
            drawn = drawn.clamp(float(wide.min()), float(wide.max()))
    else:
        low, high = (int(one) for one in values.long().aminmax())
        if low == high and limit is not None and 0 <= low < limit:  # zeros((2, 16)) stand for any tokens
            low, high = 0, limit - 1
        drawn = torch.randint(low, high + 1, (*shape,), generator=generator, device="cpu")
    return drawn.to(tensor.dtype).to(tensor.device)


@contextmanager
def embedding_limits(model: nn.Module, example: Example) -> Iterator[Callable[[], dict[str, int]]]:
    """While the module runs on the example: path of each input that an nn.Embedding looks up -> its rows."""
    known = {(tensor.data_ptr(), tensor.shape): path for path, tensor in example.tensors.items()}
    found: dict[str, int] = {}

    def note(module: nn.Embedding, inputs: tuple[object, ...]) -> None:
        looked_up = inputs[0] if inputs else None
        if isinstance(looked_up, Tensor) and (path := known.get((looked_up.data_ptr(), looked_up.shape))):
            rows = int(getattr(module, "vocab_size", module.num_embeddings))
            found[path] = min(rows, found.get(path, rows))

    handles = [one.register_forward_pre_hook(note) for one in model.modules() if isinstance(one, nn.Embedding)]
    try:
        yield lambda: found
    finally:
        for handle in handles:
            handle.remove()
