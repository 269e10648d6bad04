"""Memory that grows, that is taken and returned in every step, or that nobody uses."""

from __future__ import annotations

import itertools

from flatout.diagnose.check import Seen, check, where
from flatout.diagnose.facts import CHANGING_SHAPES, Facts
from flatout.script.behaviour_seen import SourceLine
from flatout.units import format_bytes, format_seconds

GROWTH_LIMIT_BYTES_PER_HOUR = 1 << 30
LEAST_RISES = 6
ALIKE = 0.25
"""Rises of a leak differ by no more than this share of their middle."""
LEAST_BYTES_PER_STEP = 64 << 10
FAULT_SHARE, FAULTS_AVOIDED = 0.2, 0.7
RESERVED_SHARE, LEAST_RESERVED = 0.4, 1 << 30
RECOMPUTED_SHARE = 0.05
ROOMY = 8
"""So many times the peak is free: then recomputation saves memory that nobody needs."""
LEAST_KEPT = 5


@check(
    means="Hardly any of the host's memory was left.",
    needs="less than 3 % of what this process may use was available at the end of a step",
    if_wrong="a smaller batch than would have fitted",
)
def memory_nearly_out(facts: Facts) -> Seen | None:
    if facts.run is None or facts.run.nearly_out is None:
        return None
    step, available, total = facts.run.nearly_out
    return Seen(
        title=f"at step {step:,} hardly any memory was left",
        evidence=f"{format_bytes(available)} of {format_bytes(total)} that this process may use; when it runs out, "
        "the kernel kills the process without a message",
        remedy="see who holds it with flatout memory; fewer loader workers and a smaller batch take less",
        fault=True,
        command=f"flatout memory {facts.command}",
    )


@check(
    means="The process needs more memory with every step.",
    needs="after a run: resident memory rose through all six parts of the last two thirds, by 1 GiB an hour or "
    "more; after a profile: all tensors together grew by the same amount in at least 6 steps in a row, and the list "
    "that they go to is never cut",
    if_wrong="a history or a buffer that was meant to grow is cut",
)
def memory_leak(facts: Facts) -> Seen | None:
    growth = facts.run.growth if facts.run is not None else None
    if growth is None:
        return _growing_tensors(facts)
    if growth.bytes_per_hour < GROWTH_LIMIT_BYTES_PER_HOUR:
        return None
    each = f", {format_bytes(growth.bytes_per_step)} a step" if growth.bytes_per_step is not None else ""
    return Seen(
        title=f"memory grows by {format_bytes(growth.bytes_per_hour)} an hour{each}",
        evidence=f"resident memory rose all through the last {format_seconds(growth.seconds)}, from "
        f"{format_bytes(growth.first_bytes)} to {format_bytes(growth.last_bytes)}",
        remedy="something is held from step to step: a list of losses with their graphs, a cache, a history; "
        "flatout memory names the line",
        fault=True,
        certain=False,
        cost_bytes=int(growth.bytes_per_step) if growth.bytes_per_step is not None else None,
        lines=_kept_lines(facts),
        command=f"flatout memory {facts.command}" if facts.command else None,
    )


def _growing_tensors(facts: Facts) -> Seen | None:
    source, step, sizes = facts.source, facts.step_seconds, facts.seen.live_bytes[1:]  # the first step fills caches
    rises = [after - before for before, after in itertools.pairwise(sizes)]
    if source is None or step is None or len(rises) < LEAST_RISES:
        return None
    middle = sorted(rises)[len(rises) // 2]
    steady = all(abs(rise - middle) <= ALIKE * middle for rise in rises)
    if not steady or middle < LEAST_BYTES_PER_STEP or middle / step * 3600 < GROWTH_LIMIT_BYTES_PER_HOUR:
        return None
    unbounded = [one for one in source.kept if not one.bounded and not one.is_sum]
    if not unbounded:
        return None
    return Seen(
        title=f"tensors grow by {format_bytes(middle)} a step",
        evidence=f"the bytes of all tensors rose by that in each of {len(rises)} steps in a row; "
        f"{unbounded[0].container} is never cut or cleared",
        remedy="keep numbers instead of tensors (.item()), or only the last ones; flatout memory names who holds them",
        fault=True,
        certain=False,
        cost_bytes=middle,
        lines=_kept_lines(facts),
        command=f"flatout memory {facts.command}" if facts.command else None,
    )


def _kept_lines(facts: Facts, *, with_graph: bool = False) -> tuple[SourceLine, ...]:
    kept = [one for one in (facts.source.kept if facts.source is not None else ()) if not (with_graph and one.detached)]
    return where([one.line for one in kept if not one.bounded], [one.line for one in kept if one.is_sum])


@check(
    means="A loss or an output is kept with its graph where a number was meant.",
    needs="at the end of a step, graphs of at least 5 earlier steps are alive, one more with each step",
    if_wrong="a later backward pass through the kept value raises an error at once",
)
def graph_kept_by_logging(facts: Facts) -> Seen | None:
    seen = facts.seen
    if seen.kept_steps < LEAST_KEPT:
        return None
    size = seen.kept_bytes_per_step
    return Seen(
        title="graphs of earlier steps are kept",
        evidence=f"graphs of {seen.kept_steps} earlier steps were alive at once"
        + (f"; tensors grew by {format_bytes(size)} a step" if size else ""),
        remedy="add up or append loss.item(), or loss.detach().clone()",
        fault=True,
        cost_bytes=int(size) if size else None,
        lines=_kept_lines(facts, with_graph=True),
        unknown="" if size else "the nodes of a graph are not counted in bytes",
        command=f"flatout memory {facts.command}" if facts.command else None,
    )


@check(
    means="Memory is returned to the system and faulted in again in every step, or requested from the GPU's driver.",
    needs="the page faults of a step, at the time of one that was measured here, and not more than it spent in the "
    "kernel, take at least 20 % of it; or the GPU's allocator asked the driver for memory in steady steps",
    if_wrong="the process keeps memory that others could use",
)
def allocator_churn(facts: Facts) -> Seen | None:
    seen, behaviour, step = facts.observed, facts.seen, facts.step_seconds
    if step is None:
        return None
    if facts.on_gpu:
        asked = behaviour.device_allocations
        if asked is None or asked < behaviour.steps:
            return None
        return Seen(
            title=f"the allocator takes memory from the driver {asked / behaviour.steps:.3g} times a step",
            evidence=f"{asked} calls in {behaviour.steps} steps: sizes change, or memory is short and is returned",
            remedy="PYTORCH_ALLOC_CONF=expandable_segments:True, and no torch.cuda.empty_cache() in the loop",
            fault=True,
            lines=where(facts.lines_calling("empty_cache")),
            unknown="the calls were not timed",
        )
    faults = seen.page_faults_per_step if seen is not None else None
    if faults is None or behaviour.page_fault_seconds is None or behaviour.system_seconds is None:
        return None
    cost = FAULTS_AVOIDED * min(faults * behaviour.page_fault_seconds, behaviour.system_seconds)
    if cost / step < FAULT_SHARE:
        return None
    return Seen(
        title=f"page faults take about {cost / step:.0%} of a step",
        evidence=f"{faults:,.0f} page faults a step of {format_seconds(behaviour.page_fault_seconds)}, measured "
        f"here, and {format_seconds(behaviour.system_seconds)} a step in the kernel, of which an allocator that "
        f"keeps its memory avoids about {FAULTS_AVOIDED:.0%}",
        remedy="an allocator that keeps memory: let a plan set it, or preload jemalloc or tcmalloc; reuse buffers",
        certain=False,
        cost_seconds=cost,
        command=facts.tune,
        plan={"allocator": "retain"},
    )


@check(
    means="Activation checkpointing recomputes forwards although memory is plentiful.",
    needs="recomputation takes at least 5 % of a step, and 8 times the peak of the process was available",
    if_wrong="training runs out of memory at once",
)
def costly_checkpointing(facts: Facts) -> Seen | None:
    profile, machine, cost = facts.profile, facts.machine, facts.seen.recomputed_seconds
    share = facts.share(cost)
    if share is None or share < RECOMPUTED_SHARE or machine is None:
        return None
    peak = (
        facts.seen.allocated_bytes if facts.on_gpu else (profile.peak_resident_bytes if profile is not None else None)
    )
    gpu = machine.gpu(facts.device) if facts.on_gpu else None
    total = (gpu.memory_total_bytes if gpu is not None else None) if facts.on_gpu else machine.memory_total_bytes
    if peak is None or total is None or ROOMY * peak > total:
        return None
    return Seen(
        title=f"activation checkpointing costs {share:.0%} of a step",
        evidence=f"forwards are recomputed for {format_seconds(cost or 0.0)} a step; the peak is "
        f"{format_bytes(peak)} of {format_bytes(total)}",
        remedy="leave it out, or checkpoint fewer blocks: flatout.forecast says what fits",
        cost_seconds=cost,
        lines=where(facts.lines_calling("checkpoint", "checkpoint_sequential", "gradient_checkpointing_enable")),
    )


@check(
    means="The GPU's allocator has reserved memory that no tensor uses.",
    needs="at least 40 % of what is reserved, and 1 GiB, above the peak of a window whose inputs have few shapes",
    if_wrong="empty_cache() makes the next steps ask the driver again, which takes about a millisecond each time",
    always_note=True,
)
def reserved_unused(facts: Facts) -> Seen | None:
    seen = facts.seen
    if not seen.reserved_bytes or seen.allocated_bytes is None or seen.batch_shapes >= CHANGING_SHAPES:
        return None  # with shapes that change, a larger input may need it again
    unused = seen.reserved_bytes - seen.allocated_bytes
    if unused < LEAST_RESERVED or unused < RESERVED_SHARE * seen.reserved_bytes:
        return None
    return Seen(
        title=f"{format_bytes(unused)} of GPU memory are reserved and not used",
        evidence=f"{format_bytes(seen.reserved_bytes)} reserved, at most {format_bytes(seen.allocated_bytes)} in "
        "tensors",
        remedy="torch.cuda.empty_cache() once, after the phase that needed it, returns it to other processes",
        cost_bytes=unused,
    )
