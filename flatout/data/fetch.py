"""Whole-batch fetching for data that is in memory.

A DataLoader makes a batch sample by sample: for 64 samples it makes 64 small tensors and stacks them. Where it is known
what a sample is made of, one operation on the data gives exactly the same batch:

    TensorDataset       its tensors, indexed
    Subset              of any of these; its indices are read again for each batch
    other classes       whose `__getitem__` is simple enough to be carried out for all samples at once (`sample_code`)

    obstacle_to_batching(dataset, collate_fn)           # '': it fits
    with batched_fetch():                                # every loader in this process that fits
        ...

Nothing is kept between batches, so nothing can become stale: each batch is made from the data, indices and attributes
as they are at that moment, whoever changed them. The script's code runs as often as it would otherwise, or is known
to do nothing but return values. The first batch of each shape is the loader's own, and is compared with ours.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from flatout.replaced import replaced
from flatout.torch_private.lookup import require

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.data._utils.fetch import _MapDatasetFetcher
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from flatout.data.indices import Indices, LoaderOrder
    from flatout.data.sample_code import SampleCode
    from flatout.data.sources import Items

Shape: TypeAlias = "tuple[tuple[torch.dtype, torch.Size], ...]"
"""Of each tensor of a batch its dtype and shape, to compare by."""
Fetch: TypeAlias = "Callable[[_MapDatasetFetcher, Sequence[int]], object]"

DATA_SETS = "torch.utils.data.dataset"
"""Where torch's own data sets are; looked up for every batch, as an `import` there would take microseconds."""


def obstacle_to_batching(dataset: object, collate_fn: object) -> str:
    """Why `dataset` cannot be fetched by whole batches; '' if it can. No sample is fetched to find out."""
    from torch.utils.data import Dataset, IterableDataset, default_collate

    from flatout.data.indices import Indices

    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        return "the data set is a stream, or no Dataset"
    if collate_fn is not default_collate:
        return "the loader has its own collate function"
    whole = WholeBatches()
    try:
        whole.batch(dataset, Indices([0]))
    except whole.not_possible as error:
        return str(error) or f"its samples cannot be read ({type(error).__name__})"
    return ""


class WholeBatches:
    """Makes whole batches of any data set that allows it; keeps no data, only the parsed code of `__getitem__`."""

    def __init__(self) -> None:
        from flatout.data.indices import NotWholeBatch

        self._codes: dict[object, SampleCode] = {}
        self.not_possible: tuple[type[Exception], ...] = (
            *(NotWholeBatch, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError),
        )
        """What `batch` raises if the samples have to be fetched one by one."""

    def batch(self, dataset: Items, wanted: Indices) -> object:
        """The samples `wanted`, collated as by torch's default_collate; raises one of `not_possible` if that fails."""
        if (subset := _below_subset(dataset, wanted)) is not None:
            return self.batch(*subset)
        if (tensors := tensors_of(dataset)) is not None:
            return [wanted.rows_of(tensor) for tensor in tensors]
        return self._code(dataset).batch(dataset, wanted)

    def _code(self, dataset: Items) -> SampleCode:
        from flatout.data.sample_code import sample_code

        function = type(dataset).__getitem__
        if function not in self._codes:
            self._codes[function] = sample_code(dataset)
        return self._codes[function]


def _below_subset(dataset: Items, wanted: Indices) -> tuple[Items, Indices] | None:
    """(the data set below a Subset, the indices there of its samples `wanted`), as it has them now; None if `dataset`
    is not torch's Subset."""
    home = sys.modules[DATA_SETS]
    if type(dataset) is not home.Subset or not _are_torchs(home, home.Subset, "__getitem__", "__getitems__"):
        return None
    from flatout.data.indices import Indices

    below, indices = vars(dataset)["dataset"], vars(dataset)["indices"]
    if type(indices) in (list, tuple, range):
        return below, Indices([indices[i] for i in wanted.numbers])
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    array = type(indices) is torch.Tensor or (numpy is not None and type(indices) is numpy.ndarray)
    if array and set(map(type, wanted.numbers)) == {int}:  # True would be a mask
        found = indices[list(wanted.numbers)].tolist()
        if set(map(type, found)) == {int}:
            return below, Indices(found)
    raise ValueError(f"its indices are a {type(indices).__name__}")


def tensors_of(dataset: object) -> Sequence[Tensor] | None:
    """What a TensorDataset holds now; None if `dataset` fetches its samples in another way."""
    home = sys.modules[DATA_SETS]
    kind, torchs = type(dataset), home.TensorDataset
    if not isinstance(dataset, torchs) or _method(kind, "__getitem__") is not torchs.__getitem__:
        return None
    if not _are_torchs(home, torchs, "__getitem__") or _method(kind, "__getattribute__") is not object.__getattribute__:
        return None
    held = vars(dataset)
    if getattr(dataset, "__getitems__", None) or type(held.get("tensors")) not in (tuple, list):
        return None
    tensors: Sequence[Tensor] = held["tensors"]
    return tensors


def _method(kind: type, name: str) -> object:
    return getattr(kind, name)


def _are_torchs(home: ModuleType, kind: type, *names: str) -> bool:
    """Are these methods still torch's own, not replaced by a script?"""
    functions = vars(kind)
    for name in names:
        function = functions[name]
        if type(function) is not FunctionType or function.__globals__ is not vars(home):
            return False
    return True


def leaves(batch: object) -> list[Tensor]:
    """The tensors of a collated batch."""
    if isinstance(batch, dict):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch] if _is_tensor(batch) else []


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return hasattr(value, "nbytes")


def same_bits(a: object, b: object) -> bool:
    """Equal structure, dtype, place, shape, strides and bits (NaN equals NaN)."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.device, a.shape, a.stride()) != (b.dtype, b.device, b.shape, b.stride()):
            return False
        return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


@contextlib.contextmanager
def batched_fetch(*, on_mismatch: Callable[[str], None] | None = None) -> Iterator[None]:
    """Let every loader of this process that fetches in the main process make whole batches where that fits.

    `on_mismatch` is called if a batch differed from the loader's own; that data set is left alone from then on.
    """
    from flatout.torch_private.loading import NEXT_INDEX, MapFetcher, SingleProcessIterator

    patch = _Patch(on_mismatch)

    def fetching(original: Fetch) -> Fetch:
        patch.original = original
        return patch.fetch

    with (
        replaced(MapFetcher, "fetch", fetching),
        replaced(SingleProcessIterator, NEXT_INDEX, lambda _: patch.next_index),
        replaced(SingleProcessIterator, "__next__", lambda _: patch.next_batch),
    ):
        yield


class _Patch:
    """Takes the place of torch's fetch."""

    original: Fetch

    def __init__(self, on_mismatch: Callable[[str], None] | None) -> None:
        from torch.utils.data import Dataset, default_collate

        from flatout.data.indices import Indices, LoaderOrder, loader_order
        from flatout.torch_private import loading
        from flatout.torch_private.dispatch import profiler_is_on

        require(loading.order_of, loading.yielded_by, loading.batch_sampler_of, loading.worker)
        self._loading = loading
        self._collations = loading.default_collations
        self._torchs_collations = dict(self._collations)
        self._whole = WholeBatches()
        self._iterator_class = loading.BaseIterator
        self._code_of_torchs_next: object = None
        """Not the function itself: while somebody holds that, the watch does not put its wrapper around it again."""
        self._profiler_enabled = profiler_is_on
        self._indices_class, self._order_class, self._loader_order = Indices, LoaderOrder, loader_order
        self._on_mismatch = on_mismatch
        self._dataset_class, self._default_collate = Dataset, default_collate
        self._worker, self._worker_info = loading.worker, loading.worker_info
        self._seen: dict[int, tuple[weakref.ref[object], set[Shape] | None]] = {}
        """By identity, since a data set may not be hashable: the shapes compared so far; None: it is left alone."""
        self._order: LoaderOrder | None = None
        """Of the loader whose indices were requested last: it fetches next."""

    def next_batch(self, iterator: _BaseDataLoaderIter) -> object:
        """As torch's own, without the profiler's record if there is no profiler: it takes as long as indexing.

        If the script or the watch has replaced torch's own, the replacement is called.
        """
        own = self._iterator_class.__next__
        if getattr(own, "__code__", None) is not self._code_of_torchs_next and not self._is_torchs_next(own):
            return own(iterator)
        loading = self._loading
        if type(loading.order_of(iterator)) is not self._order_class or self._profiler_enabled():
            return own(iterator)
        batch: object = loading.next_data(iterator)
        setattr(iterator, loading.YIELDED, loading.yielded_by(iterator) + 1)
        return batch

    def _is_torchs_next(self, function: object) -> bool:
        """Is it the version known here?"""
        if not isinstance(function, FunctionType) or function.__code__.co_names != self._loading.NAMES_IN_NEXT:
            return False
        self._code_of_torchs_next = function.__code__
        return True

    def next_index(self, iterator: _BaseDataLoaderIter) -> object:
        loading = self._loading
        if loading.yielded_by(iterator) == 0 and (order := self._loader_order(iterator)) is not None:
            setattr(iterator, loading.ORDER, order)
        order = loading.order_of(iterator)
        self._order = order if type(order) is self._order_class else None
        return next(order)

    def fetch(self, fetcher: _MapDatasetFetcher, wanted: Sequence[int]) -> object:
        if not fetcher.auto_collation or fetcher.collate_fn is not self._default_collate:
            return self.original(fetcher, wanted)
        if self._collations != self._torchs_collations:  # the script has registered its own
            return self.original(fetcher, wanted)
        dataset = fetcher.dataset
        if type(wanted) not in (list, tuple) or not wanted or self._worker_info(self._worker) is not None:
            return self.original(fetcher, wanted)
        seen = self._shapes(dataset)
        if seen is None:
            return self.original(fetcher, wanted)
        order, found = self._order, True
        try:
            indices = order.indices(wanted) if order is not None else self._indices_class(wanted)
            batch = self._whole.batch(dataset, indices)
        except self._whole.not_possible:
            found = False
        if not found:  # outside of the handler: an error of the script's own code must not show ours as its context
            return self.original(fetcher, wanted)
        shape = _shape(batch)
        if shape in seen:
            return batch
        return self._compared(fetcher, wanted, batch, shape)

    def _shapes(self, dataset: object) -> set[Shape] | None:
        key = id(dataset)
        found = self._seen.get(key)
        if found is None:
            if not isinstance(dataset, self._dataset_class):  # a list, say, which allows no weak reference
                return None
            reference: weakref.ref[object] = weakref.ref(dataset, lambda _: self._seen.pop(key, None))
            fits = not obstacle_to_batching(dataset, self._default_collate)
            found = self._seen[key] = (reference, set() if fits else None)
        return found[1]

    def _compared(self, fetcher: _MapDatasetFetcher, wanted: Sequence[int], batch: object, shape: Shape) -> object:
        """The loader's own batch; ours is used from now on if it is the same."""
        own = self.original(fetcher, wanted)
        reference, seen = self._seen[id(fetcher.dataset)]
        if seen is not None and same_bits(own, batch):
            seen.add(shape)
            return own
        self._seen[id(fetcher.dataset)] = (reference, None)
        if self._on_mismatch is not None:
            self._on_mismatch(f"a whole batch of {type(fetcher.dataset).__name__} differed from the loader's own")
        return own


def _shape(batch: object) -> Shape:
    tensor = sys.modules["torch"].Tensor
    if type(batch) is list and set(map(type, batch)) == {tensor}:  # without a call for each: this is done every step
        return tuple([(leaf.dtype, leaf.shape) for leaf in batch])
    return tuple([(leaf.dtype, leaf.shape) for leaf in leaves(batch)])
