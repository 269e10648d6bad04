"""Orders drawn by a DataLoader's sampler, or by its batch sampler; one for each epoch.

Each is drawn from the epoch's own seed, so that a run can resume in the middle of an epoch. Not every sampler repeats
what it drew: one with a generator that is hidden from us does not. So the first order is drawn twice and compared, and
each is kept while its epoch lasts.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Generic, TypeVar

from flatout.arguments import described, wrong
from flatout.data.order import OrderInBatches, epoch_seed
from flatout.errors import UsageError
from flatout.generators import generators_kept, seed_generators

if TYPE_CHECKING:
    from torch import Generator, Tensor

T = TypeVar("T")
MOST_COMPARED = 1_000_000
"""Indices of an epoch; drawing more of them a second time takes too long."""
ENDLESS, LEAST_ENDLESS = 20, 10_000_000
"""A sampler that draws more than so many times its samples, and more than so many, is taken not to end."""
REPEATABLE = "let it draw from a torch.Generator in its attribute 'generator', or from the global generators"
"""What to do about a sampler that does not repeat what it drew."""


class EpochOrder:
    """The order that a sampler draws, of as many samples as it draws in that epoch, whatever its length says."""

    def __init__(self, sampler: Iterable[object], ranks: int = 1) -> None:
        self.samples = length_of(sampler, "the sampler")
        self.draws = _Draws(sampler, "the sampler", _positions, self.samples, ranks)
        self._kept: tuple[tuple[int, int], Tensor] | None = None
        """((seed, epoch), the order of that epoch)."""

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """The indices of an epoch, int64 [samples]."""
        import torch

        if self._kept is None or self._kept[0] != (seed, epoch):
            drawn = self.draws(seed, epoch)
            if not drawn:
                what = f"the sampler drew no sample in epoch {epoch}"
                remedy = "let its __iter__ start over each time"
                raise UsageError(what, limit="an epoch has at least one sample", remedy=remedy)
            self._kept = (seed, epoch), torch.tensor(drawn, dtype=torch.int64, device="cpu")
        return self._kept[1]


class BatchOrder(OrderInBatches):
    """The batches that a batch sampler draws: lists of indices, of any lengths but not shorter than there are ranks.

    The last one of an epoch may be shorter, and is left out then: some ranks would have no sample of it.
    """

    def __init__(self, sampler: Iterable[object], samples: int, ranks: int = 1) -> None:
        super().__init__(samples)
        self._ranks = ranks
        self.draws = _Draws(sampler, "the batch sampler", _batches, samples, ranks)

    def left_out(self, seed: int, epoch: int) -> Tensor | None:
        """The indices of the last batch, if it has fewer samples than there are ranks."""
        import torch

        last = self.batches(seed, epoch)[-1]
        return torch.tensor(last, dtype=torch.int64, device="cpu") if len(last) < self._ranks else None

    def _made(self, seed: int, epoch: int) -> list[list[int]]:
        batches = self.draws(seed, epoch)
        if not batches:
            what = f"the batch sampler made no batch in epoch {epoch}"
            remedy = "let its __iter__ start over each time, with at least one list of positions"
            raise UsageError(what, limit="an epoch has at least one batch", remedy=remedy)
        if not all(batches):
            raise UsageError("the batch sampler made an empty batch", limit="a batch has at least one sample")
        if (least := min(map(len, batches[:-1]), default=self._ranks)) < self._ranks:
            raise UsageError(
                f"the batch sampler made a batch of {least} for {self._ranks} ranks",
                limit="each rank has at least one sample of each batch but the last",
                remedy="make larger batches",
            )
        return batches


class _Draws(Generic[T]):
    """What a sampler draws for an epoch; `read` makes positions of it, given its name too."""

    def __init__(
        self,
        sampler: Iterable[object],
        name: str,
        read: Callable[[Sequence[object], str], list[T]],
        samples: int,
        ranks: int,
    ) -> None:
        self.repeats: bool | None = None
        """Does it draw the same for the same epoch? None: not known."""
        self._sampler, self._name, self._read, self._ranks = sampler, name, read, ranks
        self._most = max(ENDLESS * samples, LEAST_ENDLESS)
        self._tried = hasattr(sampler, "__next__")  # an iterator could be used up by it

    def __call__(self, seed: int, epoch: int) -> list[T]:
        drawn = self._read(self._drawn(seed, epoch), self._name)
        if not self._tried:
            self._tried = True
            if sum(len(one) if isinstance(one, list) else 1 for one in drawn) <= MOST_COMPARED:
                self._compare(drawn, seed, epoch)
        return drawn

    def _drawn(self, seed: int, epoch: int) -> list[object]:
        """What it yields in this epoch. UsageError for one that does not end, before it has taken all memory."""
        found: list[object] = []
        count = 0
        with _from_seed(self._sampler, seed, epoch):
            for one in self._sampler:
                found.append(one)
                count += max(1, len(one)) if isinstance(one, list | tuple) else 1
                if count > self._most:
                    raise UsageError(
                        f"{self._name}, {described(self._sampler)}, drew over {self._most:,} positions in an epoch",
                        limit="the order of an epoch is drawn as it begins, so it has to end",
                        remedy="let its __iter__ end after an epoch; the next one begins by itself",
                    )
        return found

    def _compare(self, drawn: list[T], seed: int, epoch: int) -> None:
        try:
            self.repeats = self._read(self._drawn(seed, epoch), self._name) == drawn
        except Exception:  # of any kind: a run that is never resumed needs no second drawing
            return
        if not self.repeats:
            warnings.warn(
                f"{self._name}, {described(self._sampler)}, drew two orders for the same epoch; it draws from a "
                f"generator of its own, so that a resumed run continues with other samples{self._among_ranks()}; "
                f"{REPEATABLE}",
                stacklevel=2,
            )

    def _among_ranks(self) -> str:
        if self._ranks == 1:
            return ""
        return (
            f", and each of the {self._ranks} ranks, which takes its share of the order that it draws itself, may draw "
            "another one: some samples then come twice and others not at all"
        )


def _positions(drawn: Sequence[object], name: str) -> list[int]:
    """As ints, whichever kind of whole number they are."""
    try:
        return [*map(operator.index, drawn)]  # type: ignore[arg-type]  # what has no index is named below
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name} drew {described(next(one for one in drawn if not _is_position(one)))}",
            limit="it draws the positions of samples, which are whole numbers",
            remedy="let it draw numbers from 0, and look the key up in the data set's __getitem__",
        ) from error


def _is_position(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # as above
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _batches(drawn: Sequence[object], name: str) -> list[list[int]]:
    found = []
    for batch in drawn:
        if isinstance(batch, str) or not isinstance(batch, Iterable):
            raise UsageError(f"{name} drew {described(batch)}", limit="a batch is a list of the positions of samples")
        found.append(_positions([*batch], name))
    return found


def length_of(value: object, name: str) -> int:
    """As len(). torch declares neither its samplers nor its data sets as having a length."""
    if not isinstance(value, Sized):
        raise wrong(name, value, "it has a length", "give its class __len__")
    return len(value)


@contextlib.contextmanager
def _from_seed(sampler: Iterable[object], seed: int, epoch: int) -> Iterator[None]:
    """Within, the sampler draws for this epoch: its own generators, and the global ones, start from its seed."""
    with generators_kept(), contextlib.ExitStack() as kept:
        seed_generators(epoch_seed(seed, epoch))
        for generator in _generators_of(sampler):
            kept.callback(generator.set_state, generator.get_state())
            generator.manual_seed(epoch_seed(seed, epoch))
        for one in samplers_in(sampler):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        yield


def samplers_in(sampler: object) -> Iterator[object]:
    """A sampler, and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _generators_of(sampler: object) -> Iterator[Generator]:
    import torch

    for one in samplers_in(sampler):
        if isinstance(generator := getattr(one, "generator", None), torch.Generator):
            yield generator
