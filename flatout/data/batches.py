"""A batch source: any data in, batches out, in an order that can be resumed at the exact sample.

    train = batches((images, labels), 256, seed=1)
    for epoch in range(train.epoch, 10):
        for batch in train:                      # the rest of the current epoch
            step(batch)
            saved = train.state_dict()           # what was handed out, not what was read ahead

The order depends on the seed and the epoch alone: not on workers, not on prefetching, not on the number of ranks. A run
that resumes with another batch size continues with the next sample.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypeGuard  # Any: samples are the user's

from flatout import environment
from flatout.arguments import as_collate_fn, as_device, as_plan, as_whole_number
from flatout.data.buckets import BucketOrder, Lengths, as_tokens, lengths_of
from flatout.data.given_orders import REPEATABLE, BatchOrder, EpochOrder, length_of, samplers_in
from flatout.data.handing_out import HandingOut, PlaceState, left_out_text, other_kind
from flatout.data.order import OrderInBatches, epoch_order, epoch_seed, share_of_rank, spans
from flatout.data.prefetch import on_device
from flatout.data.sources import Arrays, Collate, Samples, Source, Whole, source_of
from flatout.data.stream import Stream
from flatout.data.workers import Key, Pacing, Workers, start_method
from flatout.errors import UsageError, describe_error
from flatout.machine.detect import usable_cores
from flatout.machine.ranks import joined, joined_rank, joined_ranks
from flatout.machine.ranks import ranks as ranks_of_run
from flatout.plan import Plan, shares_of_batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader


class BatchesState(PlaceState):
    """The same with what the order depends on, and within an epoch a checksum of the order so far."""

    seed: int
    samples: int
    buckets: NotRequired[dict[str, int | None]]
    order: NotRequired[int]


class Batches:
    """What `batches` returns. Iterating gives the rest of the current epoch; then the next epoch begins."""

    def __init__(
        self,
        source: Source,
        handing_out: HandingOut,
        *,
        shuffle: bool,
        seed: int,
        order: EpochOrder | OrderInBatches | None = None,
    ) -> None:
        self.seed = seed
        self.samples = len(source) if order is None else order.samples
        """Samples in an epoch; where a sampler's number varies, what its length was at first."""
        self.epoch, self.position = 0, 0
        """The current epoch, and how many of its samples were handed out (by all ranks together)."""
        self.batch_size = handing_out.batch_size
        self._source, self._out, self._shuffle, self._order = source, handing_out, shuffle, order
        self._current: tuple[tuple[int, int], Tensor] | None = None
        """((seed, epoch), the order of that epoch), while it is iterated over."""
        self._summed = (seed, 0), 0, 0
        """(seed, epoch), a position, and the checksum of the indices before it."""
        self._workers: tuple[int, Workers] | None = None
        self._pacing = self._first_pacing()
        self._warned = self._warned_of_left_out = False
        """Of generators of the data set's own; of samples that are in no step."""
        self.trains = True
        """Are its batches steps? Not while `whole_epoch` evaluates them."""
        self._check_enough(self.samples, "the data set has")

    def __len__(self) -> int:
        """Batches in a whole epoch; in the current one where their number varies: with `length` or a sampler."""
        if isinstance(self._order, OrderInBatches):
            return len(self._order.spans(self.seed, self.epoch, 0, least=self._least))
        whole, rest = divmod(self._samples_now(), self._out.batch_size)
        return whole + (rest >= self._out.least_samples)

    @property
    def rank(self) -> int:
        """Which share of each batch this process has, from 0."""
        return self._out.rank

    @property
    def ranks(self) -> int:
        """How many ranks share each batch."""
        return self._out.ranks

    def too_few_for_ranks(self) -> object | None:
        """The samples at the end of the current epoch that are no batch, because they are fewer than the ranks; whole.

        None where there are none, and with `drop_last` or `length`. The epoch goes on unchanged.
        """
        if isinstance(self._order, BatchOrder):
            left_out = self._order.left_out(self.seed, self.epoch)
            return None if left_out is None else self._source.batch(left_out, epoch_seed(self.seed, self.epoch))
        if self._order is not None and not isinstance(self._order, EpochOrder):
            return None
        samples = self._samples_now()
        rest = samples % self._out.batch_size
        if self._out.drop_last or not 0 < rest < self._out.ranks:
            return None
        order = self._order_of(self.seed, self.epoch)
        return self._source.batch(order[samples - rest :], epoch_seed(self.seed, self.epoch))

    @property
    def workers(self) -> tuple[int, str]:
        """(number of worker processes, why that number)."""
        return self._pacing.count, self._pacing.reason

    def here(self) -> Callable[[], None]:
        """Returns a function that goes back to this place, as if no batch had been handed out since."""
        epoch, position = self.epoch, self.position

        def go_back() -> None:
            self.epoch, self.position = epoch, position

        return go_back

    @property
    def at_end(self) -> bool:
        """Was the last batch of the epoch handed out? The next iteration then ends the epoch and yields no batch."""
        return next(self._spans(), None) is None

    @property
    def padding_share(self) -> float | None:
        """The share of padding in this epoch's batches, each padded to its longest sample; None without `length`."""
        if not isinstance(self._order, BucketOrder):
            return None
        out = self._out
        return self._order.padding_share(self.seed, self.epoch, out.ranks, least=out.least_samples)

    def state_dict(self) -> BatchesState:
        """Where the next batch begins. A few numbers, whatever the size of the data."""
        seed, epoch, position = self.seed, self.epoch, self.position
        state: BatchesState = {"seed": seed, "epoch": epoch, "position": position, "samples": self.samples}
        if isinstance(self._order, BucketOrder):
            state["buckets"] = self._order.rule
        if self.position:
            state["order"] = self._order_checksum(self.seed, self.epoch, self.position)
        self._warn_of_own_generators()
        return state

    def load_state_dict(self, state: BatchesState) -> None:
        """Resume where `state` was taken; batch size, workers and ranks may differ."""
        if "samples" not in state:
            raise other_kind("batches" if "batches" in state else "samples of a stream", "a data set")
        if state["samples"] != self.samples:
            raise UsageError(
                f"the saved position is in a data set of {state['samples']} samples; this one has {self.samples}",
                limit="the order depends on the number of samples",
                remedy="resume with the data of that run, or do not restore the data",
            )
        rule = self._order.rule if isinstance(self._order, BucketOrder) else None
        if state["position"] and state.get("buckets") != rule:
            raise UsageError(
                f"the saved position is in an epoch of {_described(state.get('buckets'))}; here is {_described(rule)}",
                limit="the order within an epoch depends on the lengths and on how they are batched",
                remedy="resume with the same tokens, batch_size and length, or at the end of an epoch",
            )
        seed, epoch, position = state["seed"], state["epoch"], state["position"]
        if position and "order" in state and state["order"] != self._order_checksum(seed, epoch, position):
            own = isinstance(self._order, EpochOrder | BatchOrder) and self._order.draws.repeats is False
            why = ", and the sampler draws from a generator of its own" if own else ""
            remedy = REPEATABLE if own else "resume with the same shuffle, sampler and length"
            raise UsageError(
                f"the saved position is in epoch {epoch} of samples that came in another order than here",
                limit=f"an epoch goes on in the order in which it began{why}",
                remedy=f"{remedy}, or resume at the end of an epoch",
            )
        self.seed, self.epoch, self.position = seed, epoch, position
        self._warn_of_own_generators()

    def __iter__(self) -> Iterator[Any]:  # the type of a batch depends on the data
        order, seed = self._order_of(self.seed, self.epoch), epoch_seed(self.seed, self.epoch)
        self._current = (self.seed, self.epoch), order
        if isinstance(self._order, EpochOrder) and not self.position:
            self._check_enough(len(order), f"in epoch {self.epoch} the sampler drew")
        while True:
            todo = list(self._spans())
            if self.trains:
                self._look_at_left_out()
            made = self._made([(seed, self._share(order, span)) for span in todo])
            ends = iter(todo)
            pin = self._out.plan.pin_memory is not False and not self._workers
            for batch in self._pacing.timed(on_device(made, self._out.device, pin=pin)):
                self.position = next(ends)[1]
                yield batch
            if next(ends, None) is None:
                break
        self.epoch, self.position, self._current = self.epoch + 1, 0, None

    def _spans(self) -> Iterator[tuple[int, int]]:
        if isinstance(self._order, OrderInBatches):
            return iter(self._order.spans(self.seed, self.epoch, self.position, least=self._least))
        return spans(self._samples_now(), self.position, self._out.batch_size, least=self._least)

    @property
    def _least(self) -> int:
        """Samples of a batch: a batch sampler's own are handed out if each rank has one of them."""
        return self._out.ranks if isinstance(self._order, BatchOrder) else self._out.least_samples

    def _samples_now(self) -> int:
        """In the current epoch: a sampler may draw another number in each."""
        return len(self._order(self.seed, self.epoch)) if isinstance(self._order, EpochOrder) else self.samples

    def _check_enough(self, samples: int, what: str) -> None:
        if samples < self._out.least_samples:
            raise UsageError(
                f"{what} {samples} samples, and a batch at least {self._out.least_samples}",
                limit="an epoch would have no batch",
                remedy="use a smaller batch_size, or drop_last=False",
            )

    def _look_at_left_out(self) -> None:
        """Of samples at the end of an epoch that are fewer than the ranks, warn once; refuse them where all ranks take
        such a batch, and the pipeline would refuse it after the rest of the epoch."""
        out = self._out
        ranks = joined_ranks() if out.plan.parallel == "pipeline" else out.ranks
        if ranks == 1 or out.drop_last or isinstance(self._order, OrderInBatches):
            return
        rest = self._samples_now() % out.batch_size
        if not 0 < rest < ranks:
            return
        if out.plan.parallel == "pipeline":
            raise UsageError(
                f"the last batch of an epoch has {rest} samples, and there are {ranks} ranks",
                limit="parallel = 'pipeline' has a part of the batch on each stage",
                remedy="pass drop_last=True, or another batch_size",
            )
        if out.rank == 0 and not self._warned_of_left_out:
            self._warned_of_left_out = True
            warnings.warn(left_out_text(rest, self._samples_now(), out), stacklevel=3)

    def _warn_of_own_generators(self) -> None:
        """Once, where a state is saved or restored, for whose run it matters."""
        if self._warned or not (self.epoch or self.position) or not isinstance(self._source, Samples):
            return
        if found := self._source.own_generators():
            self._warned = True
            warnings.warn(
                f"{', '.join(found)}: the state of the data set's own random generator is not saved. If samples draw "
                "from it, a resumed run continues with other samples; draw from the global generators of torch, numpy "
                "or Python, which are seeded for each sample",
                stacklevel=3,
            )

    def _share(self, order: Tensor, span: tuple[int, int]) -> Tensor:
        start, stop = share_of_rank(*span, self._out.rank, self._out.ranks)
        return order[start:stop]

    def _order_of(self, seed: int, epoch: int) -> Tensor:
        if self._order is not None:
            return self._order(seed, epoch)
        return epoch_order(self.samples, seed=seed, epoch=epoch, shuffle=self._shuffle)

    def _order_checksum(self, seed: int, epoch: int, position: int) -> int:
        """Of the indices before `position`, by which a resumed run notices another order. Continues the one before."""
        key, begin, found = self._summed
        if key != (seed, epoch) or begin > position:
            begin, found = 0, 0
        if begin < position:
            current = self._current
            order = current[1] if current is not None and current[0] == (seed, epoch) else self._order_of(seed, epoch)
            found = zlib.crc32(order[begin:position].contiguous().numpy().data, found)
            self._summed = (seed, epoch), position, found
        return found

    def _first_pacing(self) -> Pacing:
        pacing = Pacing(max(1, usable_cores() // (environment.local_world_size() or 1)))
        if self._source.in_memory:
            pacing.decided, pacing.reason = True, "the data is in memory: whole batches are indexed at once"
        elif self._out.plan.loader_workers is not None:
            pacing.decided, pacing.count, pacing.reason = True, self._out.plan.loader_workers, "the plan says so"
        elif isinstance(self._source, Samples) and (shared := self._source.shared_files()):
            pacing.give_up(f"{shared[0]} is open: workers would share it, and move one another's place in it")
        elif (method := start_method()) != "fork":
            pacing.give_up(f"processes start by {method!r} here, which imports the script again")
        return pacing

    def _made(self, keys: Sequence[Key]) -> Iterator[object]:
        count, plan = self._pacing.count, self._out.plan
        if count == 0:
            self._workers = None
            return self._made_here(keys)
        if self._workers is None or self._workers[0] != count:
            made = Workers(
                self._source,
                count,
                prefetch_factor=plan.prefetch_factor or self._pacing.prefetch_factor,
                pin_memory=self._out.device.type == "cuda" and plan.pin_memory is not False,
                persistent=plan.persistent_workers is True,
            )
            self._workers = count, made
        workers = self._workers[1]
        return workers.batches(keys) if plan.loader_workers is not None else self._tried(workers, keys)

    def _made_here(self, keys: Sequence[Key]) -> Iterator[object]:
        return (self._source.batch(indices, seed) for seed, indices in keys)

    def _tried(self, workers: Workers, keys: Sequence[Key]) -> Iterator[object]:
        """The batches of workers that nobody asked for: where they fail, this process makes the rest."""
        made = 0
        try:
            for batch in workers.batches(keys):
                made += 1
                yield batch
            return
        except Exception as error:  # of any kind: what is wrong with the data set itself is raised again below
            self._workers = None
            self._pacing.give_up(f"the workers failed: {describe_error(error)}")
        yield from self._made_here(keys[made:])


def _described(rule: dict[str, int | None] | None) -> str:
    return "batches in plain order" if rule is None else ", ".join(f"{name} {value}" for name, value in rule.items())


@contextlib.contextmanager
def whole_epoch(data: object) -> Iterator[None]:
    """What iterates over this inside has a whole epoch, and does not move the place at which training goes on.

    An iterator, which can be read only once, and data of any other kind are as they are.
    """
    if not isinstance(data, Batches | Stream):
        yield
        return
    go_back = data.here()
    goes_back = isinstance(data, Batches) or not data.once
    if goes_back:
        data.position = 0
    data.trains = False
    try:
        yield
    finally:
        if goes_back:
            go_back()
        data.trains = True


def batches(
    data: object,
    batch_size: int | None = None,
    plan: Plan | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    tokens: int | None = None,
    length: Lengths | None = None,
    collate_fn: Callable[[list[Any]], object] | None = None,
    device: torch.device | str | int | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> Batches | Stream:
    """Batches of `batch_size` samples (of all ranks together) from `data`.

    `data`: tensors or numpy arrays [samples, ...], alone or in dicts, tuples, dataclasses, memory-mapped ones too; a
    map-style or iterable data set; or a DataLoader, whose data set, batch size, order and collate function are used.
    `shuffle` is on by default, except for streams, which keep their order. `device` is where batches are handed out
    (default: the CPU). `rank` and `ranks` default to those of torch.distributed, which a plan with `parallel` begins.

    `length` puts samples of similar lengths into one batch, so that little is padded: a function of a sample, or the
    lengths of all samples, in order. With `tokens` a batch has as many samples as fit into that number of tokens once
    each is padded to the longest (of all ranks together; `batch_size` then only limits the number of samples). The
    order is still random: samples are shuffled, sorted by length within pools and cut into batches, and the batches
    are shuffled. `padding_share` of the result is the share of padding.

    If a data set's own code slows the steps down, it runs in worker processes: they have the data set as it is when
    an epoch begins, and changes that it makes to itself there are not seen here. `Plan(loader_workers=0)` keeps it in
    this process, where a stream always is, and a data set that holds an open file. A loader's batch sampler makes the
    batches, unless batch_size is given.

    What samples draw from the global random generators of torch, numpy and Python follows from seed, epoch and sample,
    in a resumed run too. The state of a generator that a data set or a sampler keeps for itself is not saved.

    Raises UsageError for data of any other kind, empty data, and arrays that differ in length.
    """
    from torch.utils.data import DataLoader

    plan = as_plan(plan, "batches")
    seed = as_whole_number(seed, "seed", least=-(2**63))
    rank, ranks = _place(rank, ranks, plan)
    order: EpochOrder | OrderInBatches | None = None
    tokens = as_tokens(tokens, length, drop_last=drop_last)
    if isinstance(data, DataLoader):
        loader, data, most = data, data.dataset, batch_size
        batch_size, shuffle, order = _of_loader(loader, batch_size, shuffle, ranks)
        collate_fn, drop_last = collate_fn or _collate_of(loader), drop_last or loader.drop_last
        if tokens is not None:
            batch_size = most
    if length is not None:
        if order is not None or _is_stream(data):
            raise UsageError(
                "length is given for a stream, or for a loader with its own sampler",
                limit="it decides the order of the samples",
                remedy="pass the data set, or leave length out",
            )
        order = _buckets(data, length, tokens, batch_size, shuffle is not False, ranks)
        batch_size = order.largest_batch
    size = _checked(batch_size, ranks)
    if collate_fn is not None:
        as_collate_fn(collate_fn)
    handing_out = HandingOut(
        batch_size=size,
        plan=plan,
        drop_last=drop_last,
        device=as_device("cpu" if device is None else device),
        rank=rank,
        ranks=ranks,
    )
    if _is_stream(data):
        return _stream(data, handing_out, collate_fn, shuffle=shuffle, seed=seed)
    source = source_of(data, collate_fn)
    if isinstance(order, BucketOrder) and order.samples != len(source):
        limit, remedy = f"the data has {len(source)} samples", "give a length for each sample, in their order"
        raise UsageError(f"length has {order.samples} entries", limit=limit, remedy=remedy)
    if plan.data_device is not None and isinstance(source, Arrays | Whole):
        source.to(handing_out.device)
    return Batches(source, handing_out, shuffle=shuffle is not False, seed=seed, order=order)


def _buckets(
    data: object, length: Lengths, tokens: int | None, batch_size: int | None, shuffle: bool, ranks: int
) -> BucketOrder:
    if tokens is None or batch_size is not None:
        batch_size = _checked(batch_size, ranks)
    lengths = lengths_of(data, length)
    if not lengths:
        raise UsageError("the data set is empty", limit="an epoch needs at least one sample")
    return BucketOrder(lengths, tokens, batch_size, shuffle=shuffle, ranks=ranks)


def _is_stream(data: object) -> TypeGuard[Iterable[object]]:
    from torch.utils.data import IterableDataset

    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _stream(
    data: Iterable[object], handing_out: HandingOut, collate_fn: Collate | None, *, shuffle: bool | None, seed: int
) -> Stream:
    from torch.utils.data import default_collate

    if shuffle:
        raise UsageError("shuffle is True for a stream", limit="a stream has one order", remedy="shuffle it inside")
    return Stream(data, handing_out, collate_fn or default_collate, seed=seed)


def makes_its_own_batches(loader: DataLoader[object]) -> bool:
    """Is it of a class that changes what torch's loader yields?"""
    from torch.utils.data import DataLoader

    from flatout.torch_private.loading import GET_ITERATOR

    kind = type(loader)
    return any(getattr(kind, name) is not getattr(DataLoader, name, None) for name in ("__iter__", GET_ITERATOR))


def _collate_of(loader: DataLoader[object]) -> Collate | None:
    """None for what a loader without batches does to a sample, which makes no batch."""
    from torch.utils.data import default_convert

    return None if loader.collate_fn is default_convert else loader.collate_fn


def _of_loader(
    loader: DataLoader[object], batch_size: int | None, shuffle: bool | None, ranks: int
) -> tuple[int | None, bool | None, EpochOrder | BatchOrder | None]:
    """(batch size, shuffle, order of an epoch) of a DataLoader; the order is that of its sampler, if not torch's."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    if makes_its_own_batches(loader):
        raise UsageError(
            f"the loader is a {type(loader).__name__}, which makes batches in a way of its own",
            limit="batches are formed here, from the data set and the collate function",
            remedy="pass its data set; flatout.fit and evaluate take the loader as it is",
        )
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:
            warnings.warn(
                f"the loader's {loader.num_workers} workers are not used: a stream is read in this process, so that a "
                "run resumes at the exact sample; let the stream itself read ahead where it is too slow",
                stacklevel=3,
            )
        return batch_size or loader.batch_size, shuffle, None
    for one in samplers_in(loader.sampler if loader.batch_sampler is None else loader.batch_sampler):
        if ranks > 1 and (getattr(one, "num_replicas", None) or 1) > 1:
            limit = "each rank's share of the whole order is taken here"
            what = f"the loader's sampler is a {type(one).__name__}"
            raise UsageError(what, limit=limit, remedy="pass its data set")
    if loader.batch_size is None and batch_size is None:
        if loader.batch_sampler is None:
            limit = "batches are formed here, so that a run can resume within an epoch"
            raise UsageError("the loader makes no batches", limit=limit, remedy="pass batch_size=64")
        order = BatchOrder(loader.batch_sampler, length_of(loader.dataset, "the loader's data set"), ranks)
        largest = max((stop - start for start, stop in order.spans(0, 0, 0, least=ranks)), default=0)
        if not largest:
            raise UsageError(
                f"the batch sampler made a single batch, of fewer samples than the {ranks} ranks",
                limit="each rank has at least one sample of a batch",
                remedy="make larger batches",
            )
        return largest, False, order
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:  # the loader's own sampler is a placeholder
        if type(loader.batch_sampler) is BatchSampler:
            sampler = loader.batch_sampler.sampler
        elif shuffle is None:
            raise UsageError(
                f"batch_size is {batch_size}, and the loader's own batches are those of a batch sampler",
                limit="the order of single samples is not known from it",
                remedy="leave batch_size out, or say shuffle=True or shuffle=False",
            )
    random = type(sampler) is RandomSampler and not sampler.replacement
    random = random and length_of(sampler, "the sampler") == length_of(loader.dataset, "the loader's data set")
    if shuffle is None and not random and type(sampler) is not SequentialSampler:
        return batch_size or loader.batch_size, True, EpochOrder(sampler, ranks)
    return batch_size or loader.batch_size, random if shuffle is None else shuffle, None


def _checked(batch_size: int | None, ranks: int) -> int:
    batch_size = as_whole_number(batch_size, "batch_size", remedy="pass batch_size=64")
    if batch_size < ranks:
        raise UsageError(
            f"batch_size is {batch_size} for {ranks} ranks",
            limit="it counts all ranks' samples: one each",
        )
    return batch_size


def _place(rank: int | None, ranks: int | None, plan: Plan) -> tuple[int, int]:
    if rank is None and ranks is None:
        if plan.parallel is not None:
            here = ranks_of_run()
            shares = shares_of_batch(plan, here.count)
            return here.rank // (here.count // shares), shares
        if joined():
            return joined_rank(), joined_ranks()
        if (launched := environment.launched()) is not None and launched[1] > 1:
            raise UsageError(
                f"this is rank {launched[0]} of {launched[1]}, and torch.distributed has not begun",
                limit="every rank would get all the samples",
                remedy="call flatout.ranks() first; or pass rank=0, ranks=1 for all of them",
            )
    rank = as_whole_number(0 if rank is None else rank, "rank", least=0)
    ranks = as_whole_number(1 if ranks is None else ranks, "ranks")
    if not 0 <= rank < ranks:
        raise UsageError(f"rank is {rank} of {ranks}", limit="ranks are numbered from 0")
    return rank, ranks
