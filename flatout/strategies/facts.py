"""What one process finds out before any ranks are started: sizes, times of a step, forecasts of memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from flatout.data.nested import countable_samples
from flatout.errors import FlatoutError
from flatout.levers.compile import repeated_blocks
from flatout.parallel.launching.local_ranks import threads_of_rank
from flatout.plan import Plan
from flatout.sizing.exchanges import all_reduced_bytes
from flatout.sizing.forecasting import forecast
from flatout.statistics import median
from flatout.strategies.made import endless, training_of
from flatout.torch_private.modules import BatchNorm
from flatout.train.step import TrainStep

FSDP_TENSOR = "fsdp+tensor"
"""parallel = 'fsdp' with tensor_ranks."""
SHARED_LAYERS = ("tensor", FSDP_TENSOR)
STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", FSDP_TENSOR, "pipeline")
"""Values of a plan's `parallel`, and what consists of two, the simplest first."""
MICRO_BATCHES_A_RANK = (4, 2, 1)
"""Of a pipeline, whose stages wait the less the more there are."""
WARM_STEPS, MOST_STEPS, STEPS_SECONDS = 2, 10, 3.0
ALONE = "one process"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one rank, forecast."""

    bytes: int | None
    """None: unknown, for `reason`."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Of the step that the user's function makes."""

    model: str
    parameters: int
    parameter_bytes: int
    """Of all of them."""
    blocks: int
    """Repeated ones, which fsdp shards and a pipeline distributes."""
    block_parameters: int
    """Of all blocks together."""
    samples: int | None
    """In a batch; None: they cannot be counted."""
    device: str
    batch_norms: int
    """That train."""
    memory: Mapping[str, Memory]
    """By strategy, and of one process."""
    all_reduced_bytes: Mapping[str, tuple[int, ...]]
    """By strategy under which ranks share layers: of each all_reduce of a step, counted."""
    step_seconds: float | None = None
    """Of one process; None: it does not fit."""
    rank_step_seconds: float | None = None
    """The same with the threads that each rank would have on a CPU."""
    threads: int | None = None
    """Of one process; None: its model is not on the CPU."""
    rank_threads: int | None = None

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def strategies_of(ranks: int) -> tuple[str, ...]:
    """Those that so many ranks can use."""
    return tuple(name for name in STRATEGIES if name != FSDP_TENSOR or tensor_ranks_of(ranks) is not None)


def tensor_ranks_of(ranks: int) -> int | None:
    """As few as possible, since they exchange in every layer; None: the ranks cannot be divided in both ways."""
    return next((count for count in range(2, ranks // 2 + 1) if ranks % count == 0), None)


def strategy_of(plan: Plan) -> str:
    """'one process' where the plan has none."""
    return FSDP_TENSOR if plan.tensor_ranks is not None else plan.parallel or ALONE


def plan_of(strategy: str, ranks: int, plan: Plan | None = None) -> Plan:
    """The plan with the choices that the strategy, one of `strategies_of`, stands for."""
    plan, tensor_ranks = plan or Plan(), tensor_ranks_of(ranks)
    if strategy != FSDP_TENSOR:
        return plan.with_choice("parallel", strategy, "")
    assert tensor_ranks is not None, "strategies_of has it only where there are"
    return plan.with_choice("parallel", "fsdp", "").with_choice("tensor_ranks", tensor_ranks, "")


def planned_for(plan: Plan, strategy: str, ranks: int, samples: int | None, rank_threads: int | None = None) -> Plan:
    """The plan with this strategy, and with what it needs. PlanError where they do not go together.

    rank_threads: the most that a rank may have; those of one process would be too many.
    """
    if rank_threads is not None and (plan.threads or 0) > rank_threads:
        plan = plan.without("threads")
    plan = plan_of(strategy, ranks, plan)
    if strategy == "pipeline" and (plan.micro_batches or 1) < ranks:
        parts = [ranks * each for each in MICRO_BATCHES_A_RANK]
        count = next((count for count in parts if samples is None or count <= samples), parts[-1])
        plan = plan.with_choice("micro_batches", count, "")
    return plan


def facts_of(spec: str, plan: Plan, ranks: int, limit_bytes: int | None) -> TrainingFacts:
    """limit_bytes: what one process may take; no step is timed where the forecast is above it."""
    step, batches = training_of(spec, plan)
    batch = next(endless(batches, spec))
    samples = countable_samples(batch)
    memory, sent = {ALONE: _forecast(step, batch)}, dict[str, tuple[int, ...]]()
    for name in strategies_of(ranks):
        step, memory[name] = _of_rank(step, batch, plan, name, ranks, samples)
        if name in SHARED_LAYERS and memory[name].bytes is not None:
            sent[name] = tuple(all_reduced_bytes(step, batch, ranks))
    step = step.with_plan(plan)
    model, blocks = step.model, repeated_blocks(step.model)
    found = TrainingFacts(
        model=type(model).__name__,
        parameters=_count(model.parameters()),
        parameter_bytes=sum(one.nbytes for one in model.parameters()),
        blocks=len(blocks),
        block_parameters=_count(one for block in blocks for one in block.parameters()),
        samples=samples,
        device=step.device.type,
        batch_norms=sum(isinstance(one, BatchNorm) and one.training for one in model.modules()),
        memory=memory,
        all_reduced_bytes=sent,
    )
    alone = memory[ALONE].bytes
    if limit_bytes is not None and alone is not None and alone > limit_bytes:
        return found
    usual, of_a_rank = (torch.get_num_threads(), threads_of_rank(ranks)) if found.on_cpu else (None, None)
    own, of_rank = _timed(step, batches, spec, of_a_rank)
    return replace(found, step_seconds=own, rank_step_seconds=of_rank, threads=usual, rank_threads=of_a_rank)


def _of_rank(
    step: TrainStep, batch: object, plan: Plan, strategy: str, ranks: int, samples: int | None
) -> tuple[TrainStep, Memory]:
    """(the step to go on with, the forecast of one rank). What the user's function made is made once."""
    try:
        step = step.with_plan(planned_for(plan, strategy, ranks, samples))
    except FlatoutError as error:
        return step, Memory(bytes=None, reason=error.what)
    return step, _forecast(step, batch, ranks)


def _forecast(step: TrainStep, batch: object, ranks: int | None = None) -> Memory:
    try:
        return Memory(bytes=forecast(step, batch, ranks=ranks).peak_bytes)
    except FlatoutError as error:
        return Memory(bytes=None, reason=error.what)


def _timed(step: TrainStep, batches: Iterable[object], spec: str, threads: int | None) -> tuple[float, float]:
    """(seconds of a step, and with so many threads)"""
    stream = endless(batches, spec)
    usual = torch.get_num_threads()
    seconds = _median_seconds(step, stream)
    if threads is None or threads == usual:
        return seconds, seconds
    torch.set_num_threads(threads)
    try:
        return seconds, _median_seconds(step, stream)
    finally:
        torch.set_num_threads(usual)


def _median_seconds(step: TrainStep, stream: Iterator[object]) -> float:
    """Of several steps, or of the only one that there is time for."""
    taken: list[float] = []
    began = time.perf_counter()
    for number in itertools.count():
        batch, start = next(stream), time.perf_counter()
        float(step(batch))  # waits for the device
        taken.append(time.perf_counter() - start)
        late = time.perf_counter() - began > STEPS_SECONDS
        if number >= WARM_STEPS + MOST_STEPS or (late and len(taken) > WARM_STEPS):
            break
    return median(taken[WARM_STEPS:])


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum({id(one): one.numel() for one in parameters}.values())
