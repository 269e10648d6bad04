"""The DataLoader's iterators, fetchers and workers. Importing this imports torch.

torch.utils.data offers nothing between a data set and a whole loader: neither who fetches, nor an iterator's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any

from flatout.torch_private.lookup import attribute, private

BaseIterator: Any = private("torch.utils.data.dataloader._BaseDataLoaderIter")  # Any: has no public base class
"""What every loader's `iter` returns."""
SingleProcessIterator: Any = private("torch.utils.data.dataloader._SingleProcessDataLoaderIter")  # Any: as above
MapFetcher: Any = private("torch.utils.data._utils.fetch._MapDatasetFetcher")  # Any: as above
"""Fetches the samples of a batch by their indices, in the process that calls it."""
worker: ModuleType = private("torch.utils.data._utils.worker")
worker_info: Callable[[ModuleType], object] = attrgetter("_worker_info")
"""Of `worker`: None outside of a worker. The public `get_worker_info` is Python, and this is asked for every batch."""
default_collations: dict[Any, Callable[..., Any]] = private(  # Any: of any type of sample
    "torch.utils.data._utils.collate.default_collate_fn_map"
)
"""How the default collation puts samples of each type together; a script may add to it."""

NEXT_INDEX, ORDER, YIELDED = "_next_index", "_sampler_iter", "_num_yielded"
"""Of an iterator: the method that asks for the next batch's indices, whom it asks, how many batches it has given."""

order_of: Callable[[Any], Iterator[Any]] = attribute("torch.utils.data.dataloader._BaseDataLoaderIter", ORDER)
yielded_by: Callable[[Any], int] = attribute("torch.utils.data.dataloader._BaseDataLoaderIter", YIELDED)
batch_sampler_of: Callable[[Any], Any] = attribute("torch.utils.data.dataloader._BaseDataLoaderIter", "_index_sampler")
NAMES_IN_NEXT = (
    *("torch", "autograd", "profiler", "record_function", "_profile_name", "_sampler_iter", "_reset", "_next_data"),
    *("_num_yielded", "_dataset_kind", "_DatasetKind", "Iterable", "_IterableDataset_len_called", "_dataset"),
    *("_num_workers", "warnings", "warn"),
)
"""What an iterator's `__next__` speaks of, in torch 2.11 to 2.15. Another one is called as it is."""

next_data: Callable[[Any], Any] = methodcaller("_next_data")
"""An iterator's next batch, without the profiler's record around it."""
