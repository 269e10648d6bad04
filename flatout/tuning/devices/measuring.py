"""What a prediction needs and a tune on one device has not measured: steps with fewer threads, and the exchange;
and the predictions that follow."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.errors import FlatoutError, TrialError
from flatout.levers.lever import Choice, split_by_switch
from flatout.levers.observed import Observed
from flatout.parallel.launching.local_ranks import threads_of_rank
from flatout.parallel.measure_collectives import COLLECTIVES
from flatout.parallel.rank_timings import fit
from flatout.script.trial.session import load_levers
from flatout.search.deadline import BudgetSpent
from flatout.statistics import median
from flatout.tuning.devices.basis import Basis
from flatout.tuning.devices.found import Exchange, Predicted
from flatout.tuning.devices.prediction import OneDevice, in_order_of_promise, predicted
from flatout.tuning.ranks.job import JobRequest

COLLECTIVES_SECONDS = 2.0
TURNS = 3
DTYPE_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float64": 8}


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
    request = JobRequest(
        kind="collectives",
        target=basis.setup.target,
        devices=ranks,
        allow_network=basis.setup.allow_network,
        seconds=COLLECTIVES_SECONDS,
    )
    try:
        found = basis.result_of(request)
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
