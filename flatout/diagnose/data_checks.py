"""Does the model wait for its data, why, and what is in the batches?"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose.check import Seen, check, slowest_lines, where
from flatout.diagnose.facts import Facts
from flatout.levers.observed import LoaderSeen
from flatout.script.behaviour_seen import SourceLine
from flatout.units import format_seconds

RUN_SHARE_LIMIT, DATA_SHARE_LIMIT = 0.15, 0.33
"""Of a step, for a run, and for a profile: there small loops that read from memory wait for up to a third."""
CONTENDED_SHARE_LIMIT = 0.5
TRANSFORM_SHARE = 0.5
"""Of loading, in code of the script's own."""
EPOCH_START_LIMIT = 0.02
PADDING_LIMIT = 0.4
LEAST_POSITIONS = 500
TINY_BATCH = 4
LEAST_BATCHES = 32
BUSY_SECONDS_A_CALL = 25e-6
"""An operator that takes longer does not mainly wait for Python."""


@check(
    means="The training loop waits for the loader in each step.",
    needs="a wait of at least a third of a step in a profile, 15 % in a run, in steps that nothing slowed down; of "
    "half a step where others kept the processor busy",
    if_wrong="loader workers take memory, and cores from the training loop",
)
def starved_loader(facts: Facts) -> Seen | None:
    share, seconds, step = facts.part_share("data"), facts.part_seconds("data"), facts.step_seconds
    limit = RUN_SHARE_LIMIT if facts.profile is None else DATA_SHARE_LIMIT
    if facts.contended:
        limit = CONTENDED_SHARE_LIMIT
    if share is None or seconds is None or step is None or share < limit:
        return None
    return Seen(
        title=f"the model waits for data: {share:.0%} of a step",
        evidence=f"{format_seconds(seconds)} of {format_seconds(step)} a step",
        remedy=_faster_loading(facts.observed.loaders if facts.observed is not None else ()),
        cost_seconds=seconds,
        lines=where(_loading_lines(facts), facts.lines_calling("DataLoader")),
        command=facts.tune,
    )


def _faster_loading(loaders: Sequence[LoaderSeen]) -> str:
    """What helps depends on the loader; without one nothing is known of it, as where the script has dropped it."""
    workers = max((one.workers for one in loaders), default=0)
    if not loaders:
        return "load in worker processes (num_workers of the loader) where cores are free, or do less for each sample"
    if workers:
        called = f"{workers} worker{'s' if workers > 1 else ''}"
        return f"the {called} cannot keep up: add more where cores are free, or do less for each sample"
    if any(one.fetch == "batched" for one in loaders):
        return "fetch whole batches (the lever batched fetch), or set num_workers=2 on the loader"
    return "set num_workers=2 on the loader, or do less for each sample"


@check(
    means="A loader makes each batch from single samples although its data set can give whole batches.",
    needs="a wait for data of at least a third of a step, no workers, and a data set whose samples one operation "
    "can fetch with the same result",
    if_wrong="none: the first batch of each shape is compared with the loader's own",
)
def per_sample_fetch(facts: Facts) -> Seen | None:
    share, seconds = facts.part_share("data"), facts.part_seconds("data")
    if facts.observed is None or share is None or seconds is None or share < DATA_SHARE_LIMIT:
        return None
    slow = [one for one in facts.observed.loaders if one.fetch == "batched" and not one.workers and one.batch_size != 1]
    if not slow:
        return None
    one = slow[0]
    return Seen(
        title=f"{one.dataset} is fetched sample by sample",
        evidence=f"each batch of {one.batch_size} is collated from single samples, in {format_seconds(seconds)} a "
        "step; one operation on the whole data set gives the same batch",
        remedy="index the tensors with the indices of a whole batch (sampler=BatchSampler(...), batch_size=None), "
        "or let a plan do it",
        cost_seconds=seconds,
        lines=where(facts.lines_calling("DataLoader"), _loading_lines(facts)),
        command=facts.tune,
        plan={"fetch": "batched"},
    )


@check(
    means="The script's own code makes the samples slowly, while the training loop waits.",
    needs="a wait for data of at least a third of a step, of which samples of the stack put half or more into lines "
    "of the script",
    if_wrong="a transform is rewritten that was not the slowest part",
)
def slow_transform(facts: Facts) -> Seen | None:
    share, own = facts.part_share("data"), [one for one in facts.seen.times if one.activity == "transform"]
    if not own or share is None or share < DATA_SHARE_LIMIT:
        return None
    rest = sum(one.seconds for one in facts.seen.times if one.activity == "loader")
    seconds = sum(one.seconds for one in own)
    if seconds < TRANSFORM_SHARE * (seconds + rest) or sum(one.low_share for one in own) < 0.02:
        return None
    cost = min(seconds, facts.part_seconds("data") or seconds)
    return Seen(
        title=f"making samples takes {format_seconds(cost)} a step",
        evidence=f"of the time in the loader, {seconds / (seconds + rest):.0%} was in the script's own lines: "
        + slowest_lines(own),
        remedy="do it once for all samples before training, on whole batches, or in loader workers (num_workers=2)",
        cost_seconds=cost,
        lines=where([one.line for one in own], facts.lines_calling("DataLoader")),
        command=facts.tune,
    )


@check(
    means="Worker processes of a loader are started again for every epoch.",
    needs="from asking for an iterator to the first batch at least 2 % of an epoch, as the median of epochs",
    if_wrong="workers stay alive between epochs, with their memory; random numbers drawn in them are not seeded again",
)
def worker_restart(facts: Facts) -> Seen | None:
    found = _restarts(facts)
    if found is None:
        return None
    workers, cost, epoch, what, lines = found
    if cost / epoch < EPOCH_START_LIMIT:
        return None
    step = facts.step_seconds
    return Seen(
        title=f"starting the loader's workers takes {cost / epoch:.0%} of an epoch",
        evidence=f"{format_seconds(cost)} of {format_seconds(epoch)}: medians, from asking for an iterator to {what}",
        cost_seconds=None if step is None else cost / epoch * step,
        cost_share=cost / epoch,
        unknown="" if step is not None else "steps were not timed",
        remedy=f"DataLoader(..., persistent_workers=True) keeps its {workers} worker{'s' if workers > 1 else ''} "
        "between epochs (random numbers drawn in workers then continue instead of being seeded again)",
        lines=lines,
        plan={"persistent_workers": True},
    )


def _restarts(facts: Facts) -> tuple[int, float, float, str, tuple[SourceLine, ...]] | None:
    """(workers, seconds a start, seconds an epoch, what ends such a start, lines)."""
    epochs = facts.run.epochs if facts.run is not None else None
    if epochs is not None and epochs.workers and epochs.epoch_seconds and epochs.cost_seconds is not None:
        what = "the end of its first step, less a step's usual time"
        return epochs.workers, epochs.cost_seconds, epochs.epoch_seconds, what, where(facts.lines_calling("DataLoader"))
    seen = facts.seen.workers
    if seen is None or seen.starts < 3 or not seen.workers or not seen.epoch_seconds:
        return None
    cost = max(0.0, seen.start_seconds - (facts.part_seconds("data") or 0.0))
    what = "the first call of the model, less a step's usual wait for data"
    return seen.workers, cost, seen.epoch_seconds, what, where(facts.lines_calling("DataLoader"), seen.line)


@check(
    means="Much of what the model computes is padding.",
    needs="at least 40 % of the positions in integer batches hold the padding value, and nothing packs the sequences",
    if_wrong="batches of equal lengths change the order of the samples",
)
def padding_waste(facts: Facts) -> Seen | None:
    padding = facts.seen.padding
    if padding is None or padding.share < PADDING_LIMIT or padding.positions < LEAST_POSITIONS:
        return None
    packs = {"pack_padded_sequence", "pack_sequence", "nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged"}
    if facts.source is not None and packs & {*facts.source.names}:
        return None
    passes = [facts.part_seconds(part) for part in ("forward", "backward")]
    known = None if None in passes else sum(one or 0.0 for one in passes)
    cost = None if known is None else padding.share * known
    how = "the layer's padding_idx" if padding.from_padding_idx else "what rows of different lengths end with"
    return Seen(
        title=f"{padding.share:.0%} of the tokens are padding",
        evidence=f"{padding.share:.0%} of {padding.positions:,} positions hold {padding.value}, {how}",
        remedy="sort or bucket samples by length, and pad each batch to its longest sample only",
        certain=padding.from_padding_idx,
        cost_seconds=cost,
        lines=where(
            facts.lines_calling("pad_sequence"), facts.lines_calling("pad"), facts.lines_calling("DataLoader"),
            facts.lines_calling("Embedding"),
        ),
        unknown="" if cost is not None else "the passes were not timed",
    )  # fmt: skip


@check(
    means="Batches are so small that a step consists of overhead.",
    needs="a loader with batches of at most 4 of at least 32 times as many samples, one backward pass a step, and "
    "operators that take 25 µs or less on average",
    if_wrong="a larger batch changes the training: learning rate and number of steps have to follow",
)
def tiny_batch(facts: Facts) -> Seen | None:
    seen, profile = facts.observed, facts.profile
    if seen is None or profile is None or not profile.operator_calls or facts.step_seconds is None:
        return None
    small = [
        one
        for one in seen.loaders
        if one.batch_size is not None and one.batch_size <= TINY_BATCH and _has_many(one, facts.seen.steps)
    ]
    if not small or (seen.backwards_per_step or 1.0) > 1.5:
        return None
    each = profile.operator_seconds / profile.operator_calls
    if each > BUSY_SECONDS_A_CALL:
        return None
    one = small[0]
    return Seen(
        title=f"batches of {one.batch_size}: a step is mostly overhead",
        evidence=f"{profile.operator_calls:,.0f} operators take {format_seconds(each)} each, about what it takes to "
        "call them",
        remedy="a larger batch_size computes more in the same number of calls; adapt the learning rate",
        lines=where(facts.lines_calling("DataLoader")),
        unknown="no larger batch was timed",
        fault=True,
    )


def _has_many(loader: LoaderSeen, steps: int) -> bool:
    """Does its data set make many batches? Where its length was not asked for, as many steps were seen."""
    if loader.samples is None or loader.batch_size is None:
        return steps >= LEAST_BATCHES
    return loader.samples >= LEAST_BATCHES * loader.batch_size


def _loading_lines(facts: Facts) -> list[SourceLine]:
    return [one.line for one in facts.seen.times if one.activity in ("transform", "loader")][:3]
