"""What batches are made from. A source returns the samples at given indices as one batch.

tensors and arrays      alone or in dicts, tuples, dataclasses: one index operation for a whole batch; memory-mapped
                        files are read only where they are indexed
map-style data sets     TensorDataset and its Subsets as above; others sample by sample, collated as torch does
streams                 iterable data sets: in their own order
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import IO, TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, TypeVar, cast

from flatout.data.fetch import WholeBatches, leaves, tensors_of
from flatout.data.nested import is_numpy_array, leaves_in, map_leaves, map_tensors
from flatout.data.order import epoch_seed
from flatout.errors import UsageError, describe_error
from flatout.generators import drawn_since, generators_kept, seed_generators, set_generators, undrawn_on_failure

if TYPE_CHECKING:
    import torch
    from numpy import generic
    from numpy.typing import NDArray
    from torch import Tensor

    Array: TypeAlias = Tensor | NDArray[generic]

Collate: TypeAlias = Callable[..., object]
"""Called with the list of a batch's samples."""
T = TypeVar("T")
MOST_NOTED = 2**28
"""Samples of a data set of which is kept, in a byte each, that they drew no random numbers."""
MOST_LOOKED_AT = 100
"""Entries of a list or attributes of an object that are looked through for open files."""
FILES_OF_LIBRARIES = ("h5py", "lmdb", "netCDF4", "sqlite3", "tables")
"""Packages whose objects are files that cannot be used by a process that was forked after they were opened."""
TABLE_PACKAGES = ("pandas", "polars", "cudf", "modin")


class Items(Protocol):
    """What is used of a map-style data set: samples by index."""

    def __getitem__(self, index: int, /) -> object: ...


class Indexed(Items, Protocol):
    """The same with a length."""

    def __len__(self) -> int: ...


def is_indexed(data: object) -> TypeGuard[Indexed]:
    """Does it have the methods of a map-style data set?"""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


class Arrays:
    """Nested tensors or numpy arrays with the same first size."""

    in_memory = True
    """Making a batch costs next to nothing, so that workers would not help."""

    def __init__(self, nested: object) -> None:
        _refuse_foreign_dtypes(nested)
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

    def to(self, device: torch.device) -> None:
        """Keep the data on that device from now on."""
        self._nested = map_tensors(lambda tensor: tensor.to(device), self._nested)

    def batch(self, indices: Tensor, seed: int) -> object:
        """The samples at `indices`, int64 [batch]. `seed` is that of the epoch, for random draws inside samples."""
        return map_arrays(lambda array: _rows(array, indices), self._nested)


class Samples:
    """A map-style data set, sample by sample. Random draws inside a sample depend on (seed, epoch, index) alone."""

    in_memory = False

    def __init__(self, dataset: Indexed, collate_fn: Collate) -> None:
        from torch.utils.data import default_collate

        self._dataset, self._collate = dataset, collate_fn
        self._may_draw = type(dataset) is not list or collate_fn is not default_collate
        """Does any code of the user's run here? The check costs as much as a batch of a list."""
        self._draws = False
        """Did a sample draw random numbers? Until one does, samples need no seeds."""
        self._quiet = bytearray()
        """For each sample: has it come up in this process without a draw? Of this process alone, as what came up before
        differs between a resumed run and one that never stopped, and between workers."""
        self._checked_seed: int | None = None
        """Of the epoch whose first batch was checked: augmentation may begin in a later one."""

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Tensor, seed: int) -> object:
        wanted: list[int] = indices.tolist()
        if not self._may_draw:
            return self._plain(wanted)
        if self._draws:
            return self._seeded(wanted, seed)
        if seed == self._checked_seed and all(self._was_quiet(i) for i in wanted):
            return self._plain(wanted)
        with undrawn_on_failure() as before:
            made = self._plain(wanted)
        if drawn_since(before):
            set_generators(before)  # augmentation begins here: this batch too is made from (seed, epoch, index)
            self._draws = True
            return self._seeded(wanted, seed)
        self._checked_seed = seed
        for i in wanted:
            self._note_quiet(i)
        return made

    def _was_quiet(self, index: int) -> bool:
        return 0 <= index < len(self._quiet) and bool(self._quiet[index])

    def _note_quiet(self, index: int) -> None:
        """A sampler may go beyond the length, which may be a fiction: the room grows, up to a limit."""
        if 0 <= index < MOST_NOTED:
            if index >= len(self._quiet):
                self._quiet.extend(bytes(max(index + 1, 2 * len(self._quiet)) - len(self._quiet)))
            self._quiet[index] = True

    def own_generators(self) -> list[str]:
        """The attributes of the data set, and of those that it is made from, that hold random generators."""
        found: list[str] = []
        dataset: object = self._dataset
        while dataset is not None:
            attributes = getattr(dataset, "__dict__", {})
            found += [f"{type(dataset).__name__}.{name}" for name, one in attributes.items() if _is_own_generator(one)]
            dataset = attributes.get("dataset")
        return found

    def shared_files(self) -> list[str]:
        """The attributes of the data set, and of those that it is made from, that hold open files. Processes that are
        forked share the place at which the next byte is read."""
        found: list[str] = []
        datasets: list[object] = [self._dataset]
        for dataset in datasets:  # which grows
            attributes = dict(getattr(dataset, "__dict__", {}))
            below, several = attributes.pop("dataset", None), attributes.pop("datasets", None)
            found += [f"{type(dataset).__name__}.{name}" for name, one in attributes.items() if _holds_open_file(one)]
            parts = [below, *(several if isinstance(several, list | tuple) else ())]
            datasets += [one for one in parts if one is not None and not any(one is other for other in datasets)]
        return found

    def _plain(self, wanted: list[int]) -> object:
        many = getattr(self._dataset, "__getitems__", None)
        return collated(self._collate, many(wanted) if many else [self._dataset[i] for i in wanted])

    def _seeded(self, wanted: list[int], seed: int) -> object:
        many = getattr(self._dataset, "__getitems__", None)
        with generators_kept():
            samples = []
            for i in wanted:
                seed_generators(epoch_seed(seed, i + 1))
                samples.append(many([i])[0] if many else self._dataset[i])
            return collated(self._collate, samples)


def collated(collate_fn: Collate, samples: list[object]) -> object:
    """The batch of these samples. UsageError for samples that torch's own function cannot put together; what another
    function raises stays as it is."""
    from torch import OutOfMemoryError
    from torch.utils.data import default_collate

    try:
        return collate_fn(samples)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        if collate_fn is not default_collate or isinstance(error, OutOfMemoryError):
            raise
        raise UsageError(
            f"{len(samples)} samples cannot be put together: {describe_error(error)}",
            limit="torch stacks tensors, arrays and numbers of equal shapes, alone or in dicts and tuples",
            remedy="pass collate_fn=..., which makes a batch of a list of samples: it pads, or stacks field by field",
        ) from error


def _is_own_generator(value: object) -> bool:
    """Is it a random generator, and none of the global ones, which are seeded for each sample?"""
    import torch

    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not getattr(random.random, "__self__", None)
    numpy = sys.modules.get("numpy.random")
    if numpy is None or not isinstance(value, numpy.Generator | numpy.RandomState):
        return False
    return value is not getattr(numpy.get_state, "__self__", None)


def _holds_open_file(value: object) -> bool:
    """Is it one, one in a list or dict, or of a class that reads one, such as ZipFile?"""
    if isinstance(value, list | tuple | dict):  # no other mapping, which may read what it is asked for
        entries = islice(value.values() if isinstance(value, dict) else value, MOST_LOOKED_AT)
        return any(_holds_open_file(one) for one in entries if not isinstance(one, list | tuple | dict))
    package = type(value).__module__.partition(".")[0]
    if package in FILES_OF_LIBRARIES:
        return True
    if package in ("torch", "multiprocessing", "logging"):  # what these hold is meant to be shared
        return False
    inside = islice(getattr(value, "__dict__", {}).values(), MOST_LOOKED_AT)
    return any(map(_is_open_file, (value, *inside)))


def _is_open_file(value: object) -> bool:
    """Is it a file or socket that this process reads from?"""
    standard = any(value is one for one in (sys.stdin, sys.stdout, sys.stderr))
    if standard or not callable(getattr(type(value), "fileno", None)):
        return False
    file = cast("IO[bytes]", value)
    try:
        return (file.readable() if hasattr(value, "readable") else True) and file.fileno() >= 0
    except (OSError, ValueError):  # closed, or in memory
        return False


class Whole:
    """A data set that is in memory as tensors (TensorDataset, Subsets of one): whole batches at once.

    Later changes to tensors and indices are seen, unless `to` has copied them to a device.
    """

    in_memory = True

    def __init__(self, dataset: Indexed) -> None:
        self._dataset, self._whole = dataset, WholeBatches()

    def __len__(self) -> int:
        return len(self._dataset)

    def to(self, device: torch.device) -> None:
        """Keep a copy of the data on that device from now on."""
        import torch
        from torch.utils.data import TensorDataset

        everything = leaves(self.batch(torch.arange(len(self), device="cpu"), 0))
        self._dataset = TensorDataset(*(tensor.to(device) for tensor in everything))

    def batch(self, indices: Tensor, seed: int) -> object:
        from torch.utils.data import default_collate

        from flatout.data.indices import Indices

        if (tensors := tensors_of(self._dataset)) is not None:
            return [_rows(tensor, indices) for tensor in tensors]
        wanted: list[int] = indices.tolist()
        with contextlib.suppress(*self._whole.not_possible):
            return self._whole.batch(self._dataset, Indices(wanted))
        return default_collate([self._dataset[i] for i in wanted])  # a Subset by numpy's integers, for example


Source: TypeAlias = Arrays | Samples | Whole
"""A length, and any samples of it as a batch."""


def _is_in_tensors(dataset: object) -> bool:
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
    tensors = tensors_of(dataset)
    return tensors is not None and not any(tensor.requires_grad for tensor in tensors)


def source_of(data: object, collate_fn: Collate | None) -> Source:
    """The source for data of any kind but streams. UsageError for data that cannot be indexed, or is empty."""
    from torch.utils.data import default_collate

    found = _source_of(data, collate_fn or default_collate)
    if len(found) == 0:
        raise UsageError("the data set is empty", limit="an epoch needs at least one sample")
    return found


def _source_of(data: object, collate_fn: Collate) -> Source:
    from torch.utils.data import default_collate

    _refuse_tables(data)
    makes_samples = dataclasses.is_dataclass(data) and is_indexed(data)  # then its fields are no columns
    if not makes_samples and any(True for _ in arrays_in(data)):
        if collate_fn is not default_collate:
            return Samples(_rows_to_collate(data), collate_fn)
        _refuse_lists(data)
        return Arrays(data)
    if type(data) is tuple and data and all(isinstance(one, list) for one in data):
        raise UsageError(
            f"the data is a tuple of {len(data)} lists",
            limit="a tuple holds columns, as tensors or arrays; a list holds samples",
            remedy="pass (torch.tensor(inputs), torch.tensor(targets)), or list(zip(inputs, targets))",
        )
    if not is_indexed(data) or _is_tensor(data) or isinstance(data, (str, bytes, Mapping, type)):
        what = f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__
        raise UsageError(
            f"{what} is not a source of batches",
            limit="tensors or arrays (in dicts, tuples, dataclasses), a Dataset, a stream or a DataLoader are",
        )
    if collate_fn is default_collate and _is_in_tensors(data):
        return Whole(data)
    return Samples(data, collate_fn)


def _rows_to_collate(data: object) -> Indexed:
    if not _is_array(data):
        raise UsageError(
            "collate_fn is given with columns",
            limit="columns are indexed, a whole batch at once: there are no samples to collate",
            remedy="leave it out, or pass samples: list(zip(inputs, targets))",
        )
    return data


def _refuse_tables(data: object) -> None:
    """Those of pandas and others are indexed by column or label, not by the place of a sample."""
    for path, table in leaves_in(data, "data", _is_table, lists=False):
        raise UsageError(
            f"{path} is a {type(table).__name__}",
            limit="samples are taken by their place, from tensors or numpy arrays",
            remedy=f"convert it: torch.tensor({path}.to_numpy())",
        )


def _is_table(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in TABLE_PACKAGES and hasattr(value, "to_numpy")


def _refuse_lists(data: object) -> None:
    """A list as long as the arrays beside it is meant as a column, but would come whole with each batch."""
    sizes = {len(array) for _, array in arrays_in(data)}
    for path, column in leaves_in(data, "data", lambda value: isinstance(value, list), lists=False):
        if len(column) in sizes:
            raise UsageError(
                f"{path} is a list of {len(column)}",
                limit="columns are tensors or numpy arrays",
                remedy="convert it: torch.tensor(values), or numpy.array(texts, dtype=object)",
            )


def _refuse_foreign_dtypes(data: object) -> None:
    """Those of numpy that torch lacks, and nested tensors. Arrays of objects are handed out as they are."""
    import torch

    for path, array in arrays_in(data):
        if isinstance(array, torch.Tensor) and array.is_nested:
            remedy = f"pass the samples: list({path}.unbind())"
            raise UsageError(f"{path} is a nested tensor", limit="torch cannot index it by samples", remedy=remedy)
        if isinstance(array, torch.Tensor) or array.dtype.hasobject:
            continue
        try:
            torch.from_numpy(array[:0].copy())
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is an array of dtype {array.dtype}",
                limit="torch has numbers and booleans, in the byte order of this machine",
                remedy=f"convert it: {path}.astype('float32'), or {path}.astype(object) to get it as it is",
            ) from error


def map_arrays(function: Callable[[Array], Array], nested: T) -> T:
    """`function` on each tensor or numpy array in nested dicts, tuples and dataclasses. A list holds samples."""
    mapped: T = map_leaves(function, nested, _is_array, lists=False)
    return mapped


def arrays_in(nested: object) -> Iterator[tuple[str, Array]]:
    """Each tensor or numpy array in there, with the expression for it."""
    return leaves_in(nested, "data", _is_array, lists=False)


def _is_tensor(value: object) -> bool:
    """One without a first size here: the others are columns."""
    import torch

    return isinstance(value, torch.Tensor) or (is_numpy_array(value) and value.ndim == 0)


def _is_array(value: object) -> TypeGuard[Array]:
    import torch

    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return is_numpy_array(value) and value.ndim > 0


def _readable(array: Array) -> Array:
    """Tensors for arrays in memory; memory-mapped files stay arrays, so that only what is used is read."""
    import torch

    if isinstance(array, torch.Tensor):
        return array.detach()
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.memmap) or not array.flags.writeable or array.dtype.hasobject:
        return array
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()  # torch has no such strides
    return torch.from_numpy(array)


def _rows(array: Array, indices: Tensor) -> Array:
    import torch

    if isinstance(array, torch.Tensor):
        places = indices if array.device.type == "cpu" else indices.to(array.device)
        if array.dtype in (torch.uint16, torch.uint32, torch.uint64):  # for which torch lacks the faster way
            return array[places]
        return array.index_select(0, places)
    rows: NDArray[generic] = array[indices.numpy()]
    return rows if rows.dtype.hasobject else torch.from_numpy(rows)
