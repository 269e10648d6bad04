"""Batches of a data set that can only be read from its beginning."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

from flatout.data.checksums import checksum
from flatout.data.handing_out import HandingOut, PlaceState, left_out_text, no_batch, other_kind
from flatout.data.order import epoch_seed, share_of_rank
from flatout.data.prefetch import on_device
from flatout.data.sources import Collate, collated
from flatout.errors import UsageError
from flatout.generators import generator_states, generators_kept, seed_generators, set_generators


class StreamState(PlaceState):
    """The same with what is needed to find the place again."""

    seed: NotRequired[int]
    checksum: NotRequired[int]


class Stream:
    """Batches of a data set that can only be read from its beginning. Resumes by reading up to the position.

    What the stream and the collate function draw from the global random generators depends on seed, epoch and position
    alone, so that a resumed run draws the same numbers; those of the training are left alone.
    """

    def __init__(self, data: Iterable[object], handing_out: HandingOut, collate_fn: Collate, *, seed: int) -> None:
        self.seed = seed
        self.epoch, self.position = 0, 0
        self.batch_size = handing_out.batch_size
        self.once = iter(data) is data
        """Is it an iterator, which can be read once?"""
        self._data, self._out, self._collate = data, handing_out, collate_fn
        self._reading: _Reading | None = None
        """Of an iterator: what was read of it in this process."""
        self.last: tuple[int, int, int] | None = None
        """(epoch, position, checksum of the sample before it)."""
        self._left_out: tuple[list[object], int] | None = None
        """The samples at the end of the last pass that are no batch, being fewer than the ranks, and a seed."""
        self._warned_of_left_out = False
        self.trains = True
        """As of Batches."""

    @property
    def rank(self) -> int:
        """Which share of each batch this process has, from 0."""
        return self._out.rank

    @property
    def ranks(self) -> int:
        """How many ranks share each batch."""
        return self._out.ranks

    def too_few_for_ranks(self) -> object | None:
        """As of Batches, of the pass that has just ended: no sooner is it known."""
        return None if self._left_out is None else self._collated(*self._left_out)

    def state_dict(self) -> StreamState:
        """Where the next batch begins."""
        state: StreamState = {"epoch": self.epoch, "position": self.position, "seed": self.seed}
        if self.last is not None and self.last[:2] == (self.epoch, self.position):
            state["checksum"] = self.last[2]
        return state

    def load_state_dict(self, state: StreamState) -> None:
        """Resume where `state` was taken. The stream has to yield the same samples again."""
        if "samples" in state or "batches" in state:
            raise other_kind("samples of a data set" if "samples" in state else "batches", "a stream of samples")
        if self._reading is not None:
            self._reading.ahead.clear()
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state.get("seed", self.seed)
        saved = state.get("checksum")
        self.last = None if saved is None else (self.epoch, self.position, saved)

    def here(self) -> Callable[[], None]:
        """As of Batches."""
        epoch, position, last = self.epoch, self.position, self.last

        def go_back() -> None:
            self.epoch, self.position, self.last = epoch, position, last

        return go_back

    def __iter__(self) -> Iterator[Any]:  # as for Batches
        set_epoch = getattr(self._data, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        reading = self._reading or _Reading(self._data, epoch_seed(self.seed, self.epoch))
        if self.once:
            self._reading = reading
        self._skip_to_position(reading)
        made = self._made(reading)
        for batch in on_device(made, self._out.device, pin=self._out.plan.pin_memory is not False):
            one = reading.ahead.popleft()
            self.position += one.samples
            self.last = self.epoch, self.position, one.checksum
            yield batch
        if self.position == 0:
            raise no_batch("stream", self.epoch, once=self.once)
        self.epoch, self.position, self._reading = self.epoch + 1, 0, None

    def _skip_to_position(self, reading: _Reading) -> None:
        read = reading.read - sum(one.samples for one in reading.ahead)
        if read > self.position:
            raise UsageError(
                f"{read} samples of the iterator were read already",
                limit=f"the saved position is after sample {self.position}, and an iterator cannot go back",
                remedy="pass an object whose __iter__ starts over each time",
            )
        if read == self.position:
            return
        last = reading.skip(self.position - read)
        if reading.read < self.position:
            raise UsageError(
                f"the stream ended after {reading.read} samples",
                limit=f"the saved position is after sample {self.position}",
                remedy="resume with the data of that run",
            )
        saved = self.last
        if saved is not None and saved[:2] == (self.epoch, self.position) and saved[2] != checksum(last):
            warnings.warn(
                f"the stream yielded another sample {self.position} than before; the run continues, but not bit for "
                "bit as it would have",
                stacklevel=3,
            )

    def _made(self, reading: _Reading) -> Iterator[object]:
        """The batches that were made and not handed out, as a loop over them was left, and those that follow."""
        self._left_out = None
        yield from [one.batch for one in reading.ahead]
        out = self._out
        while group := reading.take(out.batch_size):
            begin = reading.read - len(group)
            if len(group) < out.least_samples:
                if not out.drop_last:
                    self._left_out = group, epoch_seed(reading.seed, begin + 1)
                    self._warn_of_left_out(len(group), reading.read)
                return
            start, stop = share_of_rank(0, len(group), out.rank, out.ranks)
            found = checksum(group[-1])  # before the collate function, which may change its samples
            batch = self._collated(group[start:stop], epoch_seed(reading.seed, begin + start + 1))
            reading.ahead.append(_Made(samples=len(group), checksum=found, batch=batch))
            yield batch

    def _warn_of_left_out(self, rest: int, samples: int) -> None:
        """Once, as of Batches; here it is known no sooner than an epoch ends."""
        if self._out.rank or self._warned_of_left_out or not self.trains:
            return
        self._warned_of_left_out = True
        warnings.warn(left_out_text(rest, samples, self._out), stacklevel=3)

    def _collated(self, samples: list[object], seed: int) -> object:
        with generators_kept():
            seed_generators(seed)
            return collated(self._collate, samples)


@dataclass(frozen=True, kw_only=True)
class _Made:
    samples: int
    """Of all ranks together."""
    checksum: int
    """Of the last one."""
    batch: object


class _Reading:
    """One pass over a stream, in states of the random generators that are its own."""

    def __init__(self, data: Iterable[object], seed: int) -> None:
        self.seed = seed
        self.read = 0
        """Samples so far."""
        self.ahead: deque[_Made] = deque()
        """Batches that were made of them and not handed out yet."""
        self._data = data
        self._samples: Iterator[object] | None = None
        self._begun: list[object] = []
        """Samples of a batch that was broken off: an iterator does not yield them again."""
        self._generators: Mapping[str, object] | None = None

    def take(self, count: int) -> list[object]:
        """The next samples; fewer at the end."""
        with self._drawing() as samples:
            for sample in itertools.islice(samples, count - len(self._begun)):
                self._begun.append(sample)
        taken, self._begun = self._begun, []
        self.read += len(taken)
        return taken

    def skip(self, count: int) -> object:
        """Returns the last one; None if the stream ends before `count`."""
        last: object = None
        with self._drawing() as samples:
            for sample in itertools.islice(itertools.chain(self._begun, samples), count):
                last = sample
                self.read += 1
        self._begun = self._begun[count:]
        return last

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[Iterator[object]]:
        with generators_kept():
            if self._generators is None:
                seed_generators(self.seed)
            else:
                set_generators(self._generators)
            if self._samples is None:
                self._samples = iter(self._data)
            try:
                yield self._samples
            finally:
                self._generators = generator_states()
