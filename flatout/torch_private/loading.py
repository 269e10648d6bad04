"""The DataLoader's iterators, fetchers and workers. Importing this imports torch.

torch.utils.data has no public API for fetching a batch, or for the order of the samples in a running iterator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from types import ModuleType

from flatout.torch_private.lookup import Private, attribute, private

BaseIterator: Private = private("torch.utils.data.dataloader._BaseDataLoaderIter")
"""The base class of what `iter(loader)` returns."""
SingleProcessIterator: Private = private("torch.utils.data.dataloader._SingleProcessDataLoaderIter")
MapFetcher: Private = private("torch.utils.data._utils.fetch._MapDatasetFetcher")
"""Fetches the samples of a batch by their indices."""
worker: ModuleType = private("torch.utils.data._utils.worker")
worker_info: Callable[[ModuleType], object] = attrgetter("_worker_info")
"""Of `worker`: None outside of a worker. The public `get_worker_info` adds a Python call for every batch."""
default_collations: dict[object, Callable[..., object]] = private(
    "torch.utils.data._utils.collate.default_collate_fn_map"
)
"""The collate function of each type of sample; a script can add to it."""

RESET, WORKERS_SEED = "_reset", "_base_seed"
"""Of an iterator: the method that begins it anew, which iterators with workers call when they start too; what its
workers' seeds are made from. A method and a value that `__init__` sets."""
GET_ITERATOR = "_get_iterator"
"""Of a loader: the method that makes its iterator, which some subclasses override to change the batches."""
NEXT_INDEX, ORDER, YIELDED = "_next_index", "_sampler_iter", "_num_yielded"
"""Of an iterator: the method that returns the next batch's indices, their iterator, the number of batches so far."""

order_of: Callable[[object], Iterator[object]] = attribute("torch.utils.data.dataloader._BaseDataLoaderIter", ORDER)
yielded_by: Callable[[object], int] = attribute("torch.utils.data.dataloader._BaseDataLoaderIter", YIELDED)
batch_sampler_of: Callable[[object], Private] = attribute(
    "torch.utils.data.dataloader._BaseDataLoaderIter", "_index_sampler"
)
NAMES_IN_NEXT = (
    *("torch", "autograd", "profiler", "record_function", "_profile_name", "_sampler_iter", "_reset", "_next_data"),
    *("_num_yielded", "_dataset_kind", "_DatasetKind", "Iterable", "_IterableDataset_len_called", "_dataset"),
    *("_num_workers", "warnings", "warn"),
)
"""The names in an iterator's `__next__` in torch 2.11 to 2.15. One with other names is called unchanged."""

next_data: Callable[[object], object] = methodcaller("_next_data")
"""The next batch of an iterator, without a profiler record around it."""
