"""What batches are made of. A source gives the samples at given indices as one batch.

tensors and arrays      alone or in dicts, tuples, dataclasses: one index operation for a whole batch; memory-mapped
                        files are read only where they are indexed
map-style data sets     TensorDataset and its Subsets as above; others sample by sample, collated as torch does
streams                 iterable data sets: in the order in which they come
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from flatout.data.fetch import WholeBatches, tensors_of
from flatout.data.nested import leaves_in, map_leaves, map_tensors
from flatout.data.order import epoch_seed
from flatout.errors import UsageError
from flatout.generators import generators_kept, seed_generators


class Source(Protocol):
    """A length, and any samples of it as a batch."""

    in_memory: bool
    """True where making a batch costs next to nothing, so that no worker could help."""

    def __len__(self) -> int: ...

    def batch(self, indices: Any, epoch: int) -> Any:
        """The samples at `indices`, int64 [batch], as they are in `epoch`."""


class Arrays:
    """A nest of tensors or numpy arrays that agree in their first size."""

    in_memory = True

    def __init__(self, nested: Any) -> None:
        self._nested = map_arrays(_readable, nested)
        sizes = {path: len(array) for path, array in arrays_in(self._nested)}
        if len(set(sizes.values())) != 1:
            listed = ", ".join(f"{path} has {size}" for path, size in sizes.items()) or "there is none"
            raise UsageError(
                f"the arrays differ in their first size: {listed}", limit="it is the number of samples, the same in all"
            )
        self._length = next(iter(sizes.values()))

    def __len__(self) -> int:
        return self._length

    def to(self, device: Any) -> None:
        """Keep the data on that device from now on."""
        self._nested = map_tensors(lambda tensor: tensor.to(device), self._nested)

    def batch(self, indices: Any, epoch: int) -> Any:
        return map_arrays(lambda array: _rows(array, indices), self._nested)


class Samples:
    """A map-style data set, sample by sample. Random draws inside a sample depend on (seed, epoch, index) alone."""

    in_memory = False

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate_fn, seed
        self._draws, self._checked_epoch = False, -1
        """Was a random number seen to be drawn? Looked for in each epoch anew; until then samples need no seeds."""

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Any, epoch: int) -> Any:
        wanted = indices.tolist()
        if not self._draws and self._checked_epoch == epoch:
            return self._plain(wanted)
        if not self._draws:
            with generators_kept() as changed:
                made = self._plain(wanted)
                self._draws, self._checked_epoch = changed(), epoch
            if not self._draws:
                return made  # else augmentation begins here, and this batch too is one of (seed, epoch, index)
        return self._seeded(wanted, epoch)

    def _plain(self, wanted: list[int]) -> Any:
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate(many(wanted) if many else [self._dataset[i] for i in wanted])

    def _seeded(self, wanted: list[int], epoch: int) -> Any:
        with generators_kept():
            samples = []
            for i in wanted:
                seed_generators(epoch_seed(epoch_seed(self._seed, epoch), i + 1))
                samples.append(self._dataset[i])
            return self._collate(samples)


class Whole:
    """A data set that lies in memory as tensors (TensorDataset, Subsets of one): whole batches at once.

    Tensors and indices are read as they are when a batch is made, but for a copy that was put on a device.
    """

    in_memory = True

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._whole = dataset, WholeBatches()

    def __len__(self) -> int:
        return len(self._dataset)

    def to(self, device: Any) -> None:
        """Keep a copy of the data on that device from now on."""
        from torch.utils.data import TensorDataset

        from flatout.data.indices import Indices

        everything = self._whole.batch(self._dataset, Indices(range(len(self))))
        self._dataset = TensorDataset(*(tensor.to(device) for tensor in everything))

    def batch(self, indices: Any, epoch: int) -> Any:
        from flatout.data.indices import Indices

        if (tensors := tensors_of(self._dataset)) is not None:
            return [tensor.index_select(0, indices.to(tensor.device)) for tensor in tensors]
        return self._whole.batch(self._dataset, Indices(indices.tolist()))


def _lies_in_tensors(dataset: Any) -> bool:
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
    tensors = tensors_of(dataset)
    return tensors is not None and not any(tensor.requires_grad for tensor in tensors)


def source_of(data: Any, collate_fn: Callable[[list[Any]], Any] | None, *, seed: int) -> Source:
    """The source for data of any kind but streams. UsageError for what cannot be indexed, or is empty."""
    from torch.utils.data import default_collate

    found = _source_of(data, collate_fn or default_collate, seed)
    if len(found) == 0:
        raise UsageError("the data set is empty", limit="an epoch needs at least one sample")
    return found


def _source_of(data: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> Source:
    from torch.utils.data import default_collate

    if any(True for _ in arrays_in(data)):
        _refuse_lists(data)
        return Arrays(data)
    if type(data) is tuple and data and all(isinstance(one, list) for one in data):
        raise UsageError(
            f"the data is a tuple of {len(data)} lists",
            limit="a tuple holds columns, as tensors or arrays; a list holds samples",
            remedy="pass (torch.tensor(inputs), torch.tensor(targets)), or list(zip(inputs, targets))",
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, (str, bytes, Mapping)):
        raise UsageError(
            f"{type(data).__name__} is no source of batches",
            limit="tensors or arrays (in dicts, tuples, dataclasses), a Dataset, a stream or a DataLoader are",
        )
    if collate_fn is default_collate and _lies_in_tensors(data):
        return Whole(data)
    return Samples(data, collate_fn, seed=seed)


def _refuse_lists(data: Any) -> None:
    """A list as long as the arrays beside it is meant as a column, and would come whole with each batch."""
    sizes = {len(array) for _, array in arrays_in(data)}
    for path, column in leaves_in(data, "data", lambda value: isinstance(value, list), lists=False):
        if len(column) in sizes:
            raise UsageError(
                f"{path} is a list of {len(column)}",
                limit="columns are tensors or numpy arrays",
                remedy="convert it: torch.tensor(values), or numpy.array(texts, dtype=object)",
            )


def map_arrays(function: Callable[[Any], Any], nested: Any) -> Any:
    """`function` on each tensor or numpy array of a nest of dicts, tuples and dataclasses. A list holds samples."""
    return map_leaves(function, nested, _is_array, lists=False)


def arrays_in(nested: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """Each tensor or numpy array of such a nest, with the expression that leads to it."""
    return leaves_in(nested, path, _is_array, lists=False)


def _is_array(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0


def _readable(array: Any) -> Any:
    """Tensors for arrays in memory; files mapped into memory stay arrays, so that only what is used is read."""
    import torch

    if isinstance(array, torch.Tensor):
        return array.detach()
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.memmap) or not array.flags.writeable or array.dtype.hasobject:
        return array
    return torch.from_numpy(array)


def _rows(array: Any, indices: Any) -> Any:
    import torch

    if isinstance(array, torch.Tensor):
        return array.index_select(0, indices if array.device.type == "cpu" else indices.to(array.device))
    rows = array[indices.numpy()]
    return rows if rows.dtype.hasobject else torch.from_numpy(rows)
