"""The batches of a script on several ranks: which loaders feed training, and each rank's share of what they hand out.

A loader feeds training where its iterator is made with gradients enabled, after an optimizer, and while not all models
that the optimizers train are in evaluation mode. What looks like training and turns out to be an evaluation ends the
run with the reason: its figures would be those of a share.

The script's own sampler runs on every rank, and gives the indices of a whole batch; a rank keeps a contiguous part of
them. Parts differ by at most one sample. Where a batch has fewer samples than there are ranks (the last one of an
epoch), a rank without one takes the first sample all the same, with weight 0: it has to make the step too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.data.order import share_of_rank
from flatout.parameters import parameters_of
from flatout.script.patches import Patches
from flatout.script.replicas import agreement
from flatout.script.replicas.settings import UNTOUCHED, Refused
from flatout.script.replicas.streams import digest, host_states
from flatout.tracebacks import leave_no_frame

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.generators import ReadStates
    from flatout.script.replicas.replica import Replica
    from flatout.torch_private.lookup import Private

Call = Callable[..., object]  # one of torch's functions
ORDER_BITS = (1 << 61) - 1


@dataclass(frozen=True)
class Share:
    """A rank's part of one batch."""

    samples: int
    whole: int
    """Samples of the batch on all ranks."""
    ranks: int

    @property
    def weight(self) -> float:
        """By how much a mean over this rank's samples counts in the mean over the ranks, which is then that over all
        samples: 1 where all ranks have as many."""
        return self.samples * self.ranks / self.whole if self.whole else 1.0

    @property
    def even(self) -> bool:
        """Do all ranks have as many samples?"""
        return self.whole % self.ranks == 0


class NotABatch(Exception):
    """What a sampler gave cannot be split: says what it is."""


def share_of(indices: Any, rank: int, ranks: int) -> tuple[Any, Share]:  # a list, or what else holds indices
    """This rank's part of the indices, of their own type. Raises NotABatch for what has no parts."""
    if isinstance(indices, str | bytes) or not hasattr(indices, "__len__") or not hasattr(indices, "__getitem__"):
        raise NotABatch(f"a single index ({type(indices).__name__})")
    try:
        whole = len(indices)
    except TypeError:  # a tensor without dimensions
        raise NotABatch(f"a single index ({type(indices).__name__})") from None
    start, stop = share_of_rank(0, whole, rank, ranks)
    try:
        part = indices[start:stop] if stop > start else indices[:1]
    except (TypeError, KeyError):
        raise NotABatch(f"a {type(indices).__name__}, which cannot be sliced") from None
    return part, Share(stop - start, whole, ranks)


class SharedOrder:
    """In place of the iterator over a loader's batch sampler: the same batches, this rank's part of each.

    Holds no reference to the loader's iterator, which holds it.
    """

    def __init__(
        self,
        order: Iterator[object],
        draw: Callable[[Iterator[object]], object],
        split: Callable[[object], tuple[object, Share]],
    ) -> None:
        """draw: the next batch's indices; split: this rank's part of them."""
        self._order, self._draw, self._split = order, draw, split
        self._drawn: deque[Share] = deque()
        self.handed = 0
        """Batches that the script has got."""
        self.backwards_before: int | None = None
        """Backward passes of this process before the first of them."""
        self.ahead = False
        """Does the script draw batches before it has trained on those it has?"""
        self.python = True
        """May the dataset draw from Python's or numpy's generator?"""

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        indices, share = self._split(self._draw(self._order))
        self._drawn.append(share)
        return indices

    def hand_out(self) -> Share | None:
        """The share of the batch that the script gets now: workers draw some batches ahead, and hand them out in
        order."""
        self.handed += 1
        return self._drawn.popleft() if self._drawn else None


def digest_with(before: int, indices: Sequence[object]) -> int:
    """Of all indices so far and these; the same in every process (PYTHONHASHSEED is the same for all ranks)."""
    tolist = getattr(indices, "tolist", None)
    values = tolist() if tolist is not None else list(indices)
    try:
        return hash((before, *values)) & ORDER_BITS
    except TypeError:  # lists of lists
        return hash((before, repr(values))) & ORDER_BITS


class TrainingData:
    """Of one rank."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._orders: weakref.WeakKeyDictionary[object, SharedOrder] = weakref.WeakKeyDictionary()
        """Iterator of a loader -> its order, where it is shared."""
        self.handed: list[tuple[SharedOrder, Share]] = []
        """What the script got since its last backward pass."""
        self.on_share = False
        """Is the last batch that was drawn a shared one?"""
        self.plain_calls = 0
        """Of a model without gradients, since the last batch that was handed out and not trained on."""
        self.unshared = ""
        """Why the last loader was not shared."""
        self.uneven = self.realigned = 0
        self.largest: Share | None = None
        self.multiplied = False

    def install(self, patches: Patches) -> None:
        """Once torch has been imported."""
        from torch.utils.data import DataLoader

        from flatout.torch_private.loading import RESET, BaseIterator

        patches.replace(DataLoader, "__init__", self._wrap_loader)
        for name in ("__init__", RESET):
            patches.replace(BaseIterator, name, self._wrap_order)
        patches.replace(BaseIterator, "__next__", self._wrap_next)

    def _wrap_loader(self, original: Call) -> Call:
        """With --batch per-device: a training loader's batch size counts the samples of one rank."""

        def __init__(loader: DataLoader[object], dataset: object, *args: object, **kwargs: object) -> None:
            names = ("batch_size", "shuffle", "sampler", "batch_sampler")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            trains = bool(given.get("shuffle")) or given.get("sampler") is not None
            size = given.get("batch_size", 1)
            multiplies = self._replica.settings.batch == "per-device" and self._replica.here()
            if multiplies and trains and isinstance(size, int):
                self.multiplied = True
                rest = args[1:] if args else ()
                kwargs.pop("batch_size", None)
                args = (size * self._replica.count, *rest)
            original(loader, dataset, *args, **kwargs)

        return __init__

    def _wrap_order(self, original: Call) -> Call:
        from flatout.torch_private.loading import ORDER, WORKERS_SEED

        def begin(iterator: Private, loader: DataLoader[object], *args: object, **kwargs: object) -> object:
            if not self._replica.here():
                return original(iterator, loader, *args, **kwargs)
            shared = self._begins_training(loader)
            result = original(iterator, loader, *args, **kwargs)
            self._orders.pop(iterator, None)
            if shared and (begun := getattr(iterator, ORDER, None)) is not None:
                order = SharedOrder(begun, self._draw, self._split)
                order.python = type(loader.dataset).__name__ != "TensorDataset"
                setattr(iterator, ORDER, order)
                if original.__name__ == "__init__":
                    seed = self._replica.streams.seed_of_workers(getattr(iterator, WORKERS_SEED))
                    setattr(iterator, WORKERS_SEED, seed)
                self._orders[iterator] = order
            return result

        return begin

    def _begins_training(self, loader: DataLoader[object]) -> bool:
        """Is this iterator's order to be shared? Then all ranks begin with the same random numbers."""
        from torch.utils.data import IterableDataset

        self.unshared = self._why_not_training()
        if self.unshared:
            return False
        if isinstance(loader.dataset, IterableDataset):
            raise self._replica.refusals.refuse(
                f"{self._replica.line()}: the loader's {type(loader.dataset).__name__} is an IterableDataset",
                limit="its samples have no indices of which each rank could take its share",
                remedy=f"use a dataset with __getitem__ and __len__, or share it by rank and start it with {UNTOUCHED}",
            )
        size = loader.batch_size
        if size is not None and size < self._replica.count:
            raise self._replica.refusals.refuse(
                f"{self._replica.line()}: the loader's batches have {size} sample{'s' * (size != 1)}, and there are "
                f"{self._replica.count} ranks",
                limit="each rank takes at least one sample of a batch",
                remedy="use fewer devices, a larger batch size, or --batch per-device",
            )
        if not getattr(loader, "in_order", True):
            raise self._replica.refusals.refuse(
                f"{self._replica.line()}: the loader has in_order=False",
                limit="every rank has to be handed the batches in the same order",
                remedy="leave in_order as it is",
            )
        self._align()
        return True

    def _why_not_training(self) -> str:
        """'' where a batch that is drawn now is trained on."""
        import torch

        if not torch.is_grad_enabled():
            return "it was drawn under torch.no_grad()"
        if not self._replica.trained.optimizers:
            return "there was no optimizer yet when its iterator was made"
        held = {id(one) for optimizer in self._replica.trained.optimizers for one in parameters_of(optimizer)}
        modes = [one.training for one in self._replica.steps.modes if any(id(p) in held for p in one.parameters())]
        return "its iterator was made while the model was in evaluation mode" if modes and not any(modes) else ""

    def _align(self) -> None:
        """All ranks draw the same random numbers from here on. They do already, unless the script has drawn by the size
        of its share, from a clock or by the number of its process."""
        if self._replica.count == 1:
            return
        with self._replica.answering():
            states = host_states()
            rows = self._replica.agreement.compare(self._replica.row(agreement.DATA, given=digest(states)))
            if len({row.given for row in rows}) > 1:
                self.realigned += 1
                self._take_states_from_first(states)

    def _take_states_from_first(self, states: ReadStates) -> None:
        from torch import distributed

        from flatout.generators import set_generators

        sent = [states]
        distributed.broadcast_object_list(sent, 0, group=self._replica.agreement.group)
        set_generators(sent[0])

    def _draw(self, order: Iterator[object]) -> object:
        with self._replica.streams.common():
            return next(order)

    def _split(self, indices: object) -> tuple[object, Share]:
        try:
            part, share = share_of(indices, self._replica.number, self._replica.count)
        except NotABatch as reason:
            raise self._replica.refusals.refuse(
                f"the loader draws {reason} at a time",
                limit="a rank takes its share of a batch of indices",
                remedy="give the loader a batch_size, or a batch_sampler that yields lists of indices",
            ) from None
        self._replica.order = digest_with(self._replica.order, indices)  # type: ignore[arg-type]  # share_of has tried it
        self._replica.batches += 1
        self.uneven += not share.even
        if self.largest is None or share.whole > self.largest.whole:
            self.largest = share
        return part, share

    def _wrap_next(self, original: Call) -> Call:
        def __next__(iterator: Private) -> object:
            try:
                return self._next(original, iterator) if self._replica.here() else original(iterator)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return __next__

    def _next(self, original: Call, iterator: Private) -> object:
        if self.handed and self.plain_calls and self.on_share:  # the last shared batch was not trained on
            raise self._evaluated("the model was called without gradients, and no backward pass followed")
        order = self._orders.get(iterator)
        if order is None:
            batch = original(iterator)
            self.on_share = False
            return batch
        if order.backwards_before is None:
            order.backwards_before = self._replica.backwards
        try:
            with self._fetching(iterator, order):
                batch = original(iterator)
        except StopIteration:
            if order.handed and order.backwards_before == self._replica.backwards:
                raise self._evaluated("its loop ended without a backward pass") from None
            raise
        share = order.hand_out()
        if share is not None:
            if any(one is order for one, _ in self.handed):
                order.ahead = True
            self.handed.append((order, share))
            if order.ahead and not share.even:
                raise self._replica.refusals.refuse(
                    f"a batch of {share.whole} samples is shared by {self._replica.count} ranks, and the script draws "
                    "batches before it has trained on those it has, or leaves some out",
                    limit="ranks then have shares of different sizes, and which loss belongs to which is not known",
                    remedy="use drop_last=True and a batch size that the number of devices divides",
                )
        self.on_share = True
        self.plain_calls = 0
        return batch

    def _fetching(self, iterator: Private, order: SharedOrder) -> contextlib.AbstractContextManager[None]:
        """In this process; workers have seeds of their own."""
        from flatout.torch_private.loading import SingleProcessIterator

        if self._replica.count == 1 or not isinstance(iterator, SingleProcessIterator):
            return contextlib.nullcontext()
        return self._replica.streams.own(python=order.python)

    def _evaluated(self, seen: str) -> Refused:
        return self._replica.refusals.refuse(
            f"{self._replica.line()}: batches of a loader were shared among the ranks, as for training, but {seen}",
            limit="the figures of an evaluation would be those of a share",
            remedy="put the whole loop under torch.no_grad(), or call model.eval() before it",
        )
