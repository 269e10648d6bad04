"""What a step would take on several devices, from the parts of one on one device and the exchange between ranks.

    a rank's share       loading, copies, forward and backward passes of 1/n of the batch; what an operation takes
                         however small its batch is stays
    done by every rank   the optimizer's update, evaluations, the script's own Python
    the exchange         ranks compare where they are, and average the gradients: nothing of it overlaps with compute

On a CPU the ranks share its cores: each has 1/n of the threads, and steps of one process with so many threads are
timed, as is the exchange. An interval says how wrong a prediction may be: ranks that compute at once slow each other
down (memory bandwidth, units that two threads of a core share), and how far operations shrink with the batch is not
known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.errors import FlatoutError, TrialError
from flatout.levers.lever import Choice, split_by_switch
from flatout.levers.observed import Observed
from flatout.parallel.launching.local_ranks import threads_of_rank
from flatout.parallel.measure_collectives import COLLECTIVES
from flatout.parallel.rank_timings import fit
from flatout.script.trial.session import load_levers
from flatout.search.deadline import BudgetSpent
from flatout.statistics import median
from flatout.tuning.devices.found import Exchange, Predicted
from flatout.tuning.devices.ranks_trial import Basis
from flatout.units import counted, format_bytes, format_seconds

SHARED = ("data", "transfer", "forward", "backward")
OPERATION_SECONDS = (0.0, 4e-6, 12e-6)
"""Of a CPU operation that does not get shorter with its batch: at least, as a rule, at most; dispatch and autograd."""
SLOWED = {"cpu": (1.0, 1.1, 1.5), "cuda": (1.0, 1.02, 1.15)}
"""By how much ranks that compute at the same time slow each other down."""
COPIES = 4
"""How often the bytes of the gradients are read or written beside the exchange: into one buffer, and back."""
TURNS = 3
DTYPE_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float64": 8}


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """A step on one device, under its best plan."""

    observed: Observed
    step_seconds: float
    """As timed last, of which the parts in `observed` are shares."""
    batch_size: int | None
    """None: unknown, as of batches that are drawn by hand."""
    fewer_threads: dict[int, float]
    """Threads -> how many times as long a step takes with so many; without those that were not timed."""
    copy_bytes_per_second: float | None
    """Of the device's memory; None: not measured."""

    @property
    def kind(self) -> str:
        return self.observed.device.partition(":")[0]


def predicted(one: OneDevice, devices: int, exchange: Exchange, threads: int | None) -> Predicted:
    """threads: of each rank on a CPU; None: each has a GPU."""
    parts = one.observed.breakdown_seconds
    whole = sum(parts.values()) or one.step_seconds
    shared = sum(parts.get(name, 0.0) for name in SHARED) / whole * one.step_seconds
    alone = one.step_seconds - shared
    share = 1 / devices if not one.batch_size else -(-one.batch_size // devices) / one.batch_size
    slower = 1.0 if threads is None else one.fewer_threads.get(threads, 1.0)
    operations = one.observed.operations_per_step or 0
    moved = COPIES * exchange.size_bytes / one.copy_bytes_per_second if one.copy_bytes_per_second else 0.0
    sent = exchange.small_seconds + exchange.all_reduce_seconds + moved
    times = []
    for slowed, each in zip(SLOWED[one.kind], OPERATION_SECONDS, strict=True):
        stays = min(shared, operations * each) if one.kind == "cpu" else 0.0
        computed = stays + (shared - stays) * share
        times.append(slowed * slower * (computed + alone) + sent)
    most, expected, least = (one.step_seconds / seconds for seconds in times)
    spent = [
        f"{share:.0%} of the {format_seconds(shared)} that a batch takes",
        f"{format_seconds(alone)} that every rank does",
        f"{format_seconds(sent)} to exchange {format_bytes(exchange.size_bytes)} of gradients",
    ]
    if threads is not None and threads in one.fewer_threads:
        spent.append(f"x{slower:.2f} as long with {counted(threads, 'thread')} a rank")
    return Predicted(
        devices=devices, least=least, expected=expected, most=most, step_seconds=times[1], reason=", ".join(spent)
    )


def in_order_of_promise(found: Sequence[Predicted]) -> list[Predicted]:
    """The fastest first; of equals the one with fewer devices."""
    return sorted(found, key=lambda one: (-one.expected, one.devices))


# what a tune on one device has not measured


def gradient_bytes(observed: Observed) -> int:
    """Of all parameters of the models that train."""
    return sum(
        one.parameters * max((DTYPE_BYTES.get(dtype, 4) for dtype in one.dtypes), default=4) for one in observed.modules
    )


def predictions(basis: Basis, candidates: Sequence[int]) -> tuple[Exchange | None, list[Predicted]]:
    """(the exchange between the most ranks, what follows for each number, the fastest first; none where it could not be
    measured)."""
    if not candidates or not basis.has_time_for(2 * basis.start_seconds):
        return None, []
    basis.progress("measuring what ranks exchange")
    exchange = exchange_between(basis, candidates[-1])
    if exchange is None or not exchange.size_bytes:
        return exchange, []
    threads = {devices: threads_of_rank(devices) for devices in candidates} if basis.on_cpu else {}
    ceilings = basis.machine.ceilings
    copy = None if ceilings is None else ceilings.memory_copy_bytes_per_second
    one = OneDevice(
        observed=basis.state.observed,
        step_seconds=basis.step_seconds,
        batch_size=basis.batch_size,
        fewer_threads=with_fewer_threads(basis, sorted({*threads.values()})),
        copy_bytes_per_second=None if copy is None else copy.value,
    )
    found = [predicted(one, devices, exchange.for_ranks(devices), threads.get(devices)) for devices in candidates]
    return exchange, in_order_of_promise(found)


def with_fewer_threads(basis: Basis, wanted: Sequence[int]) -> dict[int, float]:
    """Threads -> how many times as long a step takes with so many; without the number that it has, and empty where that
    cannot be timed."""
    seen, setup = basis.state.observed, basis.setup
    own = next((choice.value for choice in basis.kept if choice.field == "threads"), seen.threads)
    threads = [count for count in wanted if count != own]
    lever = next((one for one in load_levers(setup.levers) if one.plan_field == "threads"), None)
    if lever is None or not threads or seen.threads_set_by_script or basis.state.few_steps is not None:
        return {}
    basis.progress("timing steps with fewer threads")
    from_start, live = split_by_switch(basis.kept)
    others = [choice for choice in live if choice.field != "threads"]
    pace = basis.pace(0.0)
    try:
        with setup.trial(from_start, label="threads") as trial:
            trial.expected_step_seconds = basis.step_seconds
            trial.start()
            trial.window(live, settle=pace.warm_steps, steps=pace.first_window)
            found: dict[int, list[float]] = {count: [] for count in threads}
            for _ in range(TURNS):
                usual = median(trial.window(live, settle=pace.settle, steps=pace.steps).seconds)
                for count in threads:
                    changed = [*others, Choice(lever, count)]
                    window = trial.window(changed, settle=max(1, pace.settle), steps=pace.steps)
                    found[count].append(median(window.seconds) / usual)
    except BudgetSpent:
        raise
    except TrialError:  # it ends too soon, as scripts of few steps do
        return {}
    return {count: median(ratios) for count, ratios in found.items()}


def exchange_between(basis: Basis, ranks: int) -> Exchange | None:
    """Measured between so many ranks; None: they could not measure it."""
    size_bytes = gradient_bytes(basis.state.first_observed)
    try:
        found = basis.result_of("collectives", ranks)
    except BudgetSpent:
        raise
    except FlatoutError:
        return None
    points = {name: [(size, seconds) for size, seconds in found.get(name, ())] for name in COLLECTIVES}
    line = fit(points["all_reduce"])
    if line is None or not points["all_gather"]:
        return None
    return Exchange(
        ranks=ranks,
        size_bytes=size_bytes,
        all_reduce_seconds=line.latency_seconds + size_bytes / line.bytes_per_second,
        small_seconds=points["all_gather"][0][1],
    )
