"""Whole-batch fetching for data that lies in memory.

A DataLoader takes a batch one sample at a time: for 64 samples it makes 64 small tensors and stacks them. Where it can
be known what a sample is made of, one operation on the data gives the very same batch:

    TensorDataset       its tensors, indexed
    Subset              of any of these; its indices are read anew for each batch
    a class of others   whose `__getitem__` is simple enough to be carried out for all samples at once (`sample_code`)

    kind, obstacle = strategy(dataset, collate_fn)       # 'batched', or '' and why
    with batched_fetch():                                # every loader in this process that fits
        ...

Nothing is kept between batches, so that there is nothing to grow stale: each is made from the data, indices and
attributes as they are at that moment, whoever changed them. Code of the script runs as often as it would, or is known
to do nothing but return values. The first batch of each shape is the loader's own, and is compared with ours.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a data set can be fetched by whole batches; `kind` is '' where it cannot, and `obstacle` says why."""

    kind: str = ""
    obstacle: str = ""


def strategy(dataset: Any, collate_fn: Any) -> Strategy:
    """Whether whole-batch fetching fits `dataset`. None of its samples is fetched to find out."""
    from torch.utils.data import Dataset, IterableDataset, default_collate

    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        return Strategy(obstacle="the data set is a stream, or no Dataset")
    if collate_fn is not default_collate:
        return Strategy(obstacle="the loader has a collate function of its own")
    whole = WholeBatches()
    try:
        whole.batch(dataset, [0])
    except whole.not_possible as error:
        return Strategy(obstacle=str(error) or f"its samples cannot be read ({type(error).__name__})")
    return Strategy(kind="batched")


class WholeBatches:
    """Makes whole batches of any data set that allows it; remembers no data, only what code of `__getitem__` says."""

    def __init__(self) -> None:
        from flatout.data.sample_code import NotWholeBatch

        self._codes: dict[FunctionType, Any] = {}
        self.not_possible: tuple[type[Exception], ...] = (
            *(NotWholeBatch, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError),
        )
        """What `batch` raises where the samples have to be fetched one by one."""

    def batch(self, dataset: Any, wanted: Sequence[int]) -> Any:
        """The samples at `wanted`, collated as by torch's default_collate; one of `not_possible` where that fails."""
        if (subset := indices_above(dataset, wanted)) is not None:
            return self.batch(dataset.dataset, subset)
        if (tensors := tensors_of(dataset)) is not None:
            return _tensor_rows(tensors, wanted)
        return self._code(dataset).batch(dataset, wanted)

    def _code(self, dataset: Any) -> Any:
        from flatout.data.sample_code import sample_code

        function = type(dataset).__getitem__
        if function not in self._codes:
            self._codes[function] = sample_code(dataset)
        return self._codes[function]


def indices_above(dataset: Any, wanted: Sequence[int]) -> list[int] | None:
    """The indices below a Subset of those asked of it, as it has them now; None where `dataset` is none of torch's."""
    import torch
    from torch.utils.data import Subset

    if type(dataset) is not Subset or not _is_torchs(Subset, "__getitem__", "__getitems__"):
        return None
    indices: Any = dataset.indices
    numpy = sys.modules.get("numpy")
    if type(indices) in (list, tuple, range):
        return [indices[i] for i in wanted]
    array = type(indices) is torch.Tensor or (numpy is not None and type(indices) is numpy.ndarray)
    if array and set(map(type, wanted)) == {int}:  # True would be a mask
        found = indices[list(wanted)].tolist()
        if set(map(type, found)) == {int}:
            return found
    raise ValueError(f"its indices are a {type(indices).__name__}")


def tensors_of(dataset: Any) -> Sequence[Any] | None:
    """What a TensorDataset holds now; None where `dataset` fetches its samples in another way."""
    from torch.utils.data import TensorDataset

    kind = type(dataset)
    if not isinstance(dataset, TensorDataset) or kind.__getitem__ is not TensorDataset.__getitem__:
        return None
    if not _is_torchs(TensorDataset, "__getitem__") or kind.__getattribute__ is not object.__getattribute__:
        return None
    if getattr(dataset, "__getitems__", None) or type(vars(dataset).get("tensors")) not in (tuple, list):
        return None
    tensors: Sequence[Any] = vars(dataset)["tensors"]
    return tensors


def _is_torchs(kind: Any, *names: str) -> bool:
    """Are these methods still torch's own, not a script's in their place?"""
    home = vars(sys.modules[kind.__module__])
    functions = [vars(kind)[name] for name in names]
    return all(isinstance(one, FunctionType) and one.__globals__ is home for one in functions)


def _tensor_rows(tensors: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    from flatout.data.sample_code import index_tensor, rows_of, within

    indices = index_tensor(wanted)
    return [rows_of(tensor, within(indices, wanted, len(tensor))) for tensor in tensors]


def leaves(batch: Any) -> list[Any]:
    """The tensors of a collated batch."""
    if isinstance(batch, dict):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch] if hasattr(batch, "nbytes") else []


def same_bits(a: Any, b: Any) -> bool:
    """Equal structure, dtype, place, shape, strides and bits (NaN equals NaN)."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.device, a.shape, a.stride()) != (b.dtype, b.device, b.shape, b.stride()):
            return False
        return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


@contextlib.contextmanager
def batched_fetch(*, on_mismatch: Callable[[str], None] | None = None) -> Iterator[None]:
    """Let every loader of this process that fetches in its main process take whole batches where that fits.

    `on_mismatch` is told when a batch differed from the loader's own; that data set is left alone from then on.
    """
    from torch.utils.data._utils import fetch as torch_fetch

    patch = _Patch(on_mismatch)
    fetcher_class: Any = torch_fetch._MapDatasetFetcher
    patch.original = original = fetcher_class.fetch

    def fetch(fetcher: Any, wanted: Any) -> Any:
        return patch.fetch(fetcher, wanted)

    fetcher_class.fetch = fetch
    try:
        yield
    finally:
        patch.on = False  # whoever has put something around it since goes on calling it
        if fetcher_class.fetch is fetch:
            fetcher_class.fetch = original


class _Patch:
    """Stands in the place of torch's fetch."""

    original: Callable[[Any, Any], Any]

    def __init__(self, on_mismatch: Callable[[str], None] | None) -> None:
        from torch.utils.data import Dataset, default_collate
        from torch.utils.data._utils import worker
        from torch.utils.data._utils.collate import default_collate_fn_map

        self.on = True
        self._collations: Any = default_collate_fn_map
        self._torchs_collations = dict(self._collations)
        self._whole = WholeBatches()
        self._on_mismatch = on_mismatch
        self._dataset_class, self._default_collate, self._worker = Dataset, default_collate, worker
        self._seen: dict[int, tuple[weakref.ref[Any], set[Any] | None]] = {}
        """By identity, for a data set may not be hashable: the shapes compared so far; None: it is left alone."""

    def fetch(self, fetcher: Any, wanted: Any) -> Any:
        if not self.on or not fetcher.auto_collation or fetcher.collate_fn is not self._default_collate:
            return self.original(fetcher, wanted)
        if self._collations != self._torchs_collations:  # the script has registered one of its own
            return self.original(fetcher, wanted)
        dataset = fetcher.dataset
        if type(wanted) not in (list, tuple) or not wanted or self._worker._worker_info is not None:
            return self.original(fetcher, wanted)
        seen = self._shapes(dataset)
        if seen is None:
            return self.original(fetcher, wanted)
        try:
            batch = self._whole.batch(dataset, wanted)
        except self._whole.not_possible:  # the script's own error, if it is one, is raised below
            return self.original(fetcher, wanted)
        shape = _shape(batch)
        if shape in seen:
            return batch
        return self._compared(fetcher, wanted, batch, shape)

    def _shapes(self, dataset: Any) -> set[Any] | None:
        key = id(dataset)
        found = self._seen.get(key)
        if found is None:
            if not isinstance(dataset, self._dataset_class):  # a list, say: nothing that could be followed weakly
                return None
            reference = weakref.ref(dataset, lambda _: self._seen.pop(key, None))
            fits = strategy(dataset, self._default_collate)
            found = self._seen[key] = (reference, set() if fits.kind else None)
        return found[1]

    def _compared(self, fetcher: Any, wanted: Any, batch: Any, shape: Any) -> Any:
        """The loader's own batch; ours is taken from now on if it is the same."""
        own = self.original(fetcher, wanted)
        reference, seen = self._seen[id(fetcher.dataset)]
        if seen is not None and same_bits(own, batch):
            seen.add(shape)
            return own
        self._seen[id(fetcher.dataset)] = (reference, None)
        if self._on_mismatch is not None:
            self._on_mismatch(f"a whole batch of {type(fetcher.dataset).__name__} differed from the loader's own")
        return own


def _shape(batch: Any) -> Any:
    """Of each tensor of a batch its type and shape, as something to compare by."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves(batch))
