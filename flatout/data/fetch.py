"""Whole-batch fetching for data that is, or fits, in memory.

A DataLoader takes a batch one sample at a time: for 64 samples it makes 64 small tensors and stacks them. When the
data lies in tensors one index operation gives the very same batch; when a dataset computes its samples without
randomness, they can be computed once and kept.

    kind, obstacle = strategy(dataset, collate_fn)       # 'batched', 'cached' or '' and why
    with batched_fetch(kinds={"batched"}):               # every loader in this process that fits
        ...

Both give bit-same batches: the first of each data set is compared with the loader's own, and while samples are kept one
of each batch is fetched anew and compared. What differs is taken back, and the loader's own way goes on.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.generators import generators_kept
from flatout.machine.detect import available_memory_bytes

MEMORY_SHARE = 0.25
"""Samples are kept only if they take less than this share of the available memory."""

STARTUP_LIMIT_SECONDS = 180.0
PROBED_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a data set can be fetched by whole batches; `kind` is '' where it cannot, and `obstacle` says why."""

    kind: str = ""
    obstacle: str = ""
    startup_seconds: float | None = None
    """What computing every sample once will take, extrapolated from a few."""
    draws_random_numbers: bool | None = None


def strategy(dataset: Any, collate_fn: Any) -> Strategy:
    """Which kind of whole-batch fetching fits `dataset`, found out without changing any random state."""
    from torch.utils.data import Dataset, IterableDataset, default_collate

    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        return Strategy(obstacle="the data set is a stream, or no Dataset")
    if collate_fn is not default_collate:
        return Strategy(obstacle="the loader has a collate function of its own")
    if tensors_below(dataset) is not None:
        return Strategy(kind="batched", draws_random_numbers=False)
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        return Strategy(obstacle="the data set does not say how long it is")
    return _probe_samples(dataset)


def tensors_below(dataset: Any) -> tuple[Sequence[Any], Sequence[int] | None] | None:
    """The tensors below a TensorDataset or Subsets of one, with the indices that lead there."""
    from torch.utils.data import Subset, TensorDataset

    if type(dataset) is TensorDataset:
        return None if any(tensor.requires_grad for tensor in dataset.tensors) else (dataset.tensors, None)
    if type(dataset) is Subset:
        below = tensors_below(dataset.dataset)
        if below is None:
            return None
        tensors, indices = below
        return tensors, dataset.indices if indices is None else [indices[i] for i in dataset.indices]
    return None


def _probe_samples(dataset: Any) -> Strategy:
    """Fetch a few samples twice: are they equal, were random numbers drawn, how long and how large is one?"""
    from torch.utils.data import default_collate

    count = len(dataset)
    picked = [i * (count - 1) // max(1, PROBED_SAMPLES - 1) for i in range(min(PROBED_SAMPLES, count))]
    try:
        with generators_kept() as changed:
            start = time.perf_counter()
            first = [dataset[i] for i in picked]
            seconds = (time.perf_counter() - start) / len(picked)
            if changed():
                return Strategy(obstacle="its samples draw random numbers", draws_random_numbers=True)
            second = [dataset[i] for i in picked]
        batch, again = default_collate(first), default_collate(second)
    except Exception as error:
        return Strategy(obstacle=f"its samples cannot be put together ahead of time ({type(error).__name__}: {error})")
    if not same_bits(batch, again):
        return Strategy(obstacle="its samples differ from one fetch to the next")
    needed = sum(tensor.nbytes for tensor in leaves(batch)) / len(picked) * count
    available = available_memory_bytes()
    if needed > MEMORY_SHARE * available:
        return Strategy(
            obstacle=f"its samples would take {needed / 2**30:.1f} GiB of {available / 2**30:.1f} available"
        )
    startup = seconds * count
    if startup > STARTUP_LIMIT_SECONDS:
        return Strategy(obstacle=f"computing all samples once would take {startup:.0f} s")
    return Strategy(kind="cached", startup_seconds=startup, draws_random_numbers=False)


def leaves(batch: Any) -> list[Any]:
    """The tensors of a collated batch."""
    if isinstance(batch, dict):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch] if hasattr(batch, "nbytes") else []


def same_bits(a: Any, b: Any) -> bool:
    """Equal structure, dtype, shape and bits (NaN equals NaN)."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        b = b.to(a.device)
        if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
            return False
        return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


def take(stored: Any, indices: Any) -> Any:
    """The samples at `indices` (an int64 tensor) from a collated whole, as a collated batch."""
    if isinstance(stored, dict):
        return {key: take(value, indices) for key, value in stored.items()}
    if isinstance(stored, (list, tuple)) and stored and isinstance(stored[0], (str, bytes)):
        return type(stored)(stored[i] for i in indices.tolist())
    if isinstance(stored, (list, tuple)):
        values = [take(value, indices) for value in stored]
        return type(stored)(*values) if hasattr(stored, "_fields") else values
    taken = stored[indices.to(stored.device) if stored.device.type != "cpu" else indices]
    return taken.contiguous()  # as stacking samples gives it, however the whole lies


class _Batches:
    """One data set's whole-batch source."""

    def __init__(self, dataset: Any, kind: str, device: str | None) -> None:
        from torch.utils.data import default_collate

        self.kind, self.checked, self.calls = kind, False, 0
        self.indices: Any = None
        if kind == "batched":
            found = tensors_below(dataset)
            assert found is not None
            tensors, indices = found
            self.version = _version(dataset)
            self.stored: Any = list(tensors)
            self.indices = _index_tensor(indices) if indices is not None else None
        else:
            with generators_kept() as changed:
                self.stored = default_collate([dataset[i] for i in range(len(dataset))])
                if changed():
                    raise ValueError("some samples draw random numbers")
        if device is not None:
            self.stored = [tensor.to(device) for tensor in self.stored]

    def batch(self, wanted: Sequence[int]) -> Any:
        index = _index_tensor(wanted)
        return take(self.stored, index if self.indices is None else self.indices[index])


def _version(dataset: Any) -> tuple[Any, ...]:
    """Changes when other tensors, other indices or other values take the place of those that were stored."""
    found: list[Any] = []
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        found.append(id(dataset.indices))
        dataset = dataset.dataset
    tensors = vars(dataset).get("tensors", ())
    return (*found, *((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors))


def _index_tensor(indices: Sequence[int]) -> Any:
    import torch

    return torch.as_tensor(indices, dtype=torch.int64)


@contextlib.contextmanager
def batched_fetch(
    kinds: Collection[str], *, device: str | None = None, on_mismatch: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Let every loader of this process that fetches in its main process take whole batches where that fits.

    `kinds` are the strategies allowed ('batched', 'cached'). `device` keeps the samples there. `on_mismatch` is told
    when a batch differed from the loader's own; that data set is left alone from then on.
    """
    from torch.utils.data import Dataset, default_collate
    from torch.utils.data._utils import fetch as torch_fetch

    sources: dict[int, tuple[weakref.ref[Any], _Batches | None]] = {}  # by identity: a data set may not be hashable
    fetcher_class: Any = torch_fetch._MapDatasetFetcher
    original = fetcher_class.fetch

    def fetch(fetcher: Any, wanted: Any) -> Any:
        if not fetcher.auto_collation or torch_worker():
            return original(fetcher, wanted)
        dataset = fetcher.dataset
        if not isinstance(dataset, Dataset):  # a list, say: nothing that could be followed weakly
            return original(fetcher, wanted)
        if fetcher.collate_fn is not default_collate:  # another loader of the same data may have one
            return original(fetcher, wanted)
        key = id(dataset)
        if key not in sources:
            reference = weakref.ref(dataset, lambda _: sources.pop(key, None))
            sources[key] = (reference, _source(dataset, kinds, device))
        reference, source = sources[key]
        if source is None or not len(wanted):
            return original(fetcher, wanted)
        if source.kind == "batched" and source.version != _version(dataset):
            source = _source(dataset, kinds, device)
            sources[key] = (reference, source)
        if source is None:
            return original(fetcher, wanted)
        try:
            batch = source.batch(wanted)
        except (IndexError, TypeError, ValueError, RuntimeError):  # indices of some other kind: the data set's matter
            sources[key] = (reference, None)
            return original(fetcher, wanted)
        if _agrees(source, batch, fetcher, wanted, original):
            return batch
        sources[key] = (reference, None)
        if on_mismatch is not None:
            on_mismatch(f"a whole batch of {type(dataset).__name__} differed from the loader's own")
        return original(fetcher, wanted)

    fetcher_class.fetch = fetch
    try:
        yield
    finally:
        fetcher_class.fetch = original


def _source(dataset: Any, kinds: Collection[str], device: str | None) -> _Batches | None:
    found = strategy(dataset, _default_collate())
    if found.kind not in kinds:
        return None
    try:
        return _Batches(dataset, found.kind, device)
    except Exception:  # whatever a stranger's samples raise when all of them are computed, or put together
        return None


def _default_collate() -> Any:
    from torch.utils.data import default_collate

    return default_collate


def _agrees(source: _Batches, batch: Any, fetcher: Any, wanted: Sequence[int], original: Callable[..., Any]) -> bool:
    """The first batch is compared whole; of kept samples one of each batch is."""
    if not source.checked:
        source.checked = True
        with generators_kept():
            return same_bits(original(fetcher, wanted), batch)
    if source.kind == "batched":
        return True
    source.calls += 1
    place = source.calls % len(wanted)
    fresh = fetcher.collate_fn([fetcher.dataset[wanted[place]]])
    return same_bits(fresh, take(batch, _index_tensor([place])))


def torch_worker() -> bool:
    """True inside a loader's worker process."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
