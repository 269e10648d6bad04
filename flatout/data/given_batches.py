"""Batches that somebody else makes: an iterable of them, resumed by reading on to the position.

Whether it gives the same batches again cannot be known beforehand. So the random generators are put back to where they
were when the epoch began, while it is read to the position, and the last batch is compared with what it was then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from flatout.data.batches import Batches, Stream, batches
from flatout.data.nested import batch_length, tensors_in, to_device
from flatout.errors import UsageError
from flatout.generators import generator_states, generators_kept, set_generators
from flatout.plan import Plan

_END = object()
BATCH_SIZE = 64
"""For data that is not in batches yet."""


class GivenBatches:
    """Iterating gives the rest of the current epoch, each batch as it comes, on the device."""

    def __init__(self, data: Any, device: Any) -> None:
        self.epoch, self.position = 0, 0
        """The epoch that is under way, and how many of its batches were handed out."""
        self.batch_size = 1
        """Samples of the last batch, as far as they can be counted."""
        self.once = hasattr(data, "__next__")
        """Is it an iterator, which can be read once? (Asking it for one may start its workers.)"""
        self._data, self._device = data, device
        self._began: Mapping[str, Any] | None = None
        self._before_last: Mapping[str, Any] | None = None
        """Random states: when the epoch began, and when its last batch was made."""
        self._last: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and what is needed to find it again."""
        place: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "batches": True}
        if self.position:
            states = {"generators": self._began, "generators_of_last": self._before_last}
            place |= {**states, "checksum": self._last_checksum()}
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        if "batches" not in state:
            raise UsageError(
                "the saved position is that of samples",
                limit="here the data is an iterable of batches",
                remedy="resume with the data of that run",
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._began, self._last = state.get("generators"), state.get("checksum")
        self._before_last = state.get("generators_of_last")

    def __iter__(self) -> Iterator[Any]:
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        if self.position:
            rest = self._from_position()
        else:
            self._began = generator_states()
            rest = iter(self._data)
        while True:  # none is read ahead: its random draws have their place between those of the steps
            before = generator_states()
            given = next(rest, _END)
            if given is _END:
                break
            batch = to_device(given, self._device)
            self.position, self._last, self._before_last = self.position + 1, batch, before
            self.batch_size = _samples_of(batch)
            yield batch
        if self.position == 0:
            raise UsageError(
                f"the data gave no batch in epoch {self.epoch}",
                limit="an iterator is used up after one epoch" if self.once else "an epoch has at least one batch",
                remedy="pass an object whose __iter__ begins anew each time, or train for as long as the data lasts",
            )
        self.epoch, self.position = self.epoch + 1, 0

    def _from_position(self) -> Iterator[Any]:
        """What comes after the batches that were handed out before, read under the random numbers of then."""
        expected = self._last_checksum()
        assert self._began is not None
        assert self._before_last is not None
        with generators_kept():
            set_generators(self._began)
            rest, last = iter(self._data), None
            for passed in range(self.position):
                if passed and passed == self.position - 1:
                    set_generators(self._before_last)
                if (last := next(rest, _END)) is _END:
                    raise _other_data(f"ended after {passed} of the {self.position} batches that were trained on")
        if _checksum(last) != expected:
            raise _other_data(f"gave another batch {self.position} than before")
        return rest

    def _last_checksum(self) -> int:
        return self._last if isinstance(self._last, int) else _checksum(self._last)


def _other_data(what: str) -> UsageError:
    return UsageError(
        f"the data {what}",
        limit="a run resumes within an epoch only where the same batches come again",
        remedy="pass a data set to flatout.batches, give the iterable set_epoch(epoch), or draw from torch's generator",
    )


def _checksum(batch: Any) -> int:
    """Of all tensors' bytes."""
    import torch

    found = 0
    for path, tensor in tensors_in(batch):
        values = getattr(tensor, "data", tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(values.numpy(), zlib.crc32(f"{path} {tensor.dtype} {list(tensor.shape)}".encode(), found))
    return found


def _samples_of(batch: Any) -> int:
    try:
        return batch_length(batch)
    except UsageError:
        return 1


def batches_of(data: Any, plan: Plan, device: Any) -> Batches | Stream | GivenBatches:
    """What `fit` trains on: a source of `flatout.batches` as it is, and anything else made into one.

    A DataLoader gives its data, batch size, order (drawn from seed 0) and collate function. Columns
    (a tuple or dict of tensors or arrays) and data sets are cut into batches of 64 samples. Any other iterable, a list
    too, is one of batches. UsageError for what is none of these.
    """
    from torch.utils.data import DataLoader, Dataset

    if isinstance(data, Batches | Stream | GivenBatches):
        return data
    plan = plan.part_for("batches")
    if isinstance(data, DataLoader):
        return batches(data, plan=plan, device=device)
    iterable = hasattr(data, "__iter__") and not isinstance(data, str | bytes | tuple | Mapping | Dataset)
    if isinstance(data, list) or (iterable and not hasattr(data, "shape") and not _is_indexed(data)):
        return GivenBatches(data, device)
    return batches(data, BATCH_SIZE, plan, device=device)


def _is_indexed(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
