"""Batches from the user's own iterable, resumed by reading up to the position.

Whether it yields the same batches again cannot be known in advance. So it is read up to the position with the random
generators in the states that they had when the epoch began, and the last batch is compared with the one of that time.
It is not compared where a step had changed it in place: what it held is not known when the state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, NotRequired, TypeGuard

from flatout.data.batches import Batches, batches, makes_its_own_batches
from flatout.data.checksums import Kept, checksum
from flatout.data.handing_out import PlaceState, no_batch, other_kind
from flatout.data.nested import countable_samples, to_device
from flatout.data.sources import is_indexed
from flatout.data.stream import Stream
from flatout.errors import UsageError
from flatout.generators import generator_states, generators_kept, set_generators, undrawn_on_failure
from flatout.plan import Plan

if TYPE_CHECKING:
    import torch

_END = object()
BATCH_SIZE = 64
"""For data that is not in batches yet."""


class GivenBatchesState(PlaceState):
    """The position, in batches, and what is needed to find it again."""

    batches: bool
    generators: NotRequired[Mapping[str, object] | None]
    generators_of_last: NotRequired[Mapping[str, object] | None]
    checksum: NotRequired[int]


class GivenBatches:
    """Iterating gives the rest of the current epoch, each batch as it comes, on the device."""

    def __init__(self, data: Iterable[object], device: torch.device) -> None:
        self.epoch, self.position = 0, 0
        """The current epoch, and how many of its batches were handed out."""
        self.batch_size = 1
        """Samples in the last batch; 1 where they cannot be counted."""
        self.once = hasattr(data, "__next__")
        """Is it an iterator, which can be read only once? (iter(data), which may start workers, is not called.)"""
        self._data, self._device = data, device
        self._began: Mapping[str, object] | None = None
        self._before_last: Mapping[str, object] | None = None
        """Random states: when the epoch began, and before its last batch was made."""
        self._last: Kept | int | None = None
        """The last batch as it was given, or its checksum; None where that is not known."""

    @property
    def count(self) -> int | None:
        """Batches in an epoch; None where the data does not say."""
        try:
            return len(self._data) if isinstance(self._data, Sized) else None
        except (TypeError, NotImplementedError):  # a DataLoader of an iterable data set has the method, and no length
            return None

    def state_dict(self) -> GivenBatchesState:
        """Where the next batch begins, and what is needed to find it again."""
        state: GivenBatchesState = {"epoch": self.epoch, "position": self.position, "batches": True}
        if self.position:
            state["generators"], state["generators_of_last"] = self._began, self._before_last
            if (found := self._last_checksum()) is not None:
                state["checksum"] = found
        return state

    def load_state_dict(self, state: GivenBatchesState) -> None:
        """Resume where `state` was taken."""
        if "batches" not in state:
            raise other_kind("samples", "an iterable of batches")
        self.epoch, self.position = state["epoch"], state["position"]
        self._began, self._last = state.get("generators"), state.get("checksum")
        self._before_last = state.get("generators_of_last")

    def here(self) -> Callable[[], None]:
        """As of Batches. What is known of the last batch belongs to the place."""
        before = self.epoch, self.position, self._last, self._before_last

        def go_back() -> None:
            self.epoch, self.position, self._last, self._before_last = before

        return go_back

    def __iter__(self) -> Iterator[object]:
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        rest = self._from_position() if self.position else self._from_beginning()
        while True:  # nothing is read ahead: the random draws of a batch come between those of the steps
            with undrawn_on_failure() as before:  # or where the wait is broken off: a resumed run draws again
                given = next(rest, _END)
                if given is _END:
                    break
                batch = to_device(given, self._device)
            self.position, self._last, self._before_last = self.position + 1, Kept(given), before
            counted = countable_samples(batch)
            self.batch_size = 1 if counted is None else counted
            yield batch
        if self.position == 0:
            raise no_batch("data", self.epoch, once=self.once)
        self.epoch, self.position = self.epoch + 1, 0

    def _from_beginning(self) -> Iterator[object]:
        self._began = generator_states()
        for batch in self._data:  # noqa: UP028 (`yield from` would close the iterator with this generator)
            yield batch

    def _from_position(self) -> Iterator[object]:
        """What follows the batches that were handed out before, read with the random numbers of that time."""
        expected = self._last_checksum()
        assert self._began is not None
        assert self._before_last is not None
        with generators_kept():
            set_generators(self._began)
            rest, last = iter(self._data), _END
            for passed in range(self.position):
                if passed and passed == self.position - 1:
                    set_generators(self._before_last)
                if (last := next(rest, _END)) is _END:
                    raise _other_data(f"ended after {passed} of the {self.position} batches that were trained on")
        if expected is not None and checksum(last) != expected:
            raise _other_data(f"yielded another batch {self.position} than before")
        return rest

    def _last_checksum(self) -> int | None:
        return self._last.checksum() if isinstance(self._last, Kept) else self._last


def _other_data(what: str) -> UsageError:
    return UsageError(
        f"the data {what}",
        limit="a run resumes within an epoch only if the same batches come again",
        remedy="pass a data set to flatout.batches, give the iterable set_epoch(epoch), or draw from torch's generator",
    )


def batches_of(data: object, plan: Plan, device: torch.device) -> Batches | Stream | GivenBatches:
    """What `fit` trains on: the result of `flatout.batches` as it is, and anything else made into a source of batches.

    Of a DataLoader its data, batch size, order (drawn from seed 0) and collate function are used; one with neither
    batch_size nor batch sampler, or of a class with an `__iter__` of its own, yields batches of its own making, which
    are taken as they are. Columns (a tuple or dict of tensors or arrays) and data sets are cut into batches of 64
    samples. An iterable of another kind, a list too, is one of batches. UsageError for anything else.
    """
    from torch.utils.data import DataLoader

    if isinstance(data, Batches | Stream | GivenBatches):
        return data
    plan = plan.part_for("batches")
    if isinstance(data, DataLoader):
        is_cut = data.batch_size is not None or data.batch_sampler is not None
        if is_cut and not makes_its_own_batches(data):
            return batches(data, plan=plan, device=device)
        return GivenBatches(data, device)
    if isinstance(data, list) or _is_iterable_of_batches(data):
        return GivenBatches(data, device)
    return batches(data, BATCH_SIZE, plan, device=device)


def _is_iterable_of_batches(data: object) -> TypeGuard[Iterable[object]]:
    from torch.utils.data import Dataset

    iterable = hasattr(data, "__iter__") and not isinstance(data, str | bytes | tuple | Mapping | Dataset)
    return iterable and not hasattr(data, "shape") and not is_indexed(data)
