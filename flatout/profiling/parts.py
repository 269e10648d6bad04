"""The parts of a step, from the spans of unprofiled steps and, on a GPU, from the kernels of profiled ones.

On a CPU a span is time in which the main thread worked. A GPU's span is time between two points of its queue, at which
it may be busy or idle: how long it was busy is what the kernels took, which the profiler hardly changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.profiling.attribution import Attributed
from flatout.profiling.profile import IdleCause, OperatorRow, StepParts
from flatout.units import format_seconds

_BUSY = ("copies", "forward", "backward", "optimizer", "communication")


def parts_on_cpu(spans: Mapping[str, float], communication: float = 0.0) -> StepParts:
    """spans: seconds by kind, that add up to the step. communication: of it, spent in collectives inside the backward
    pass, where the spans do not say how long the process waited for other ranks."""
    waited = spans.get("communication", 0.0)
    inside = 0.0 if waited else min(communication, spans.get("backward", 0.0))
    return StepParts(
        data=spans.get("data", 0.0),
        copies=spans.get("transfer", 0.0),
        forward=spans.get("forward", 0.0),
        backward=spans.get("backward", 0.0) - inside,
        optimizer=spans.get("optimizer", 0.0),
        communication=waited + inside,
        evaluation=spans.get("evaluation", 0.0),
        idle=0.0,
        other=spans.get("other", 0.0) + spans.get("sync", 0.0),
    )


def parts_on_gpu(spans: Mapping[str, float], busy: Mapping[str, float], step_seconds: float) -> StepParts:
    """busy: seconds by phase at which kernels of it ran. What they do not fill is idle, or waits for the loader."""
    working = {phase: busy.get(phase, 0.0) for phase in _BUSY}
    other = sum(seconds for phase, seconds in busy.items() if phase not in _BUSY)
    total = sum(working.values()) + other
    scale = min(1.0, step_seconds / total) if total else 1.0  # kernels of two streams overlap; clocks differ a little
    left = max(0.0, step_seconds - scale * total)
    data = min(left, spans.get("data", 0.0))
    named = {phase: scale * seconds for phase, seconds in working.items()}
    return StepParts(**named, data=data, idle=left - data, other=scale * other)


def parts_by_operators(operators: Sequence[OperatorRow], step_seconds: float) -> StepParts:
    """For a callable, whose calls nothing times: operators by phase; the rest is Python, and what it waits for."""
    spent: dict[str, float] = {}
    for row in operators:
        spent[row.phase] = spent.get(row.phase, 0.0) + row.seconds
    total = sum(spent.values())
    scale = min(1.0, step_seconds / total) if total else 1.0
    named = {phase: scale * spent.get(phase, 0.0) for phase in (*_BUSY, "data")}
    named["forward"] += scale * spent.get("evaluation", 0.0)
    return StepParts(**named, idle=0.0, other=max(0.0, step_seconds - sum(named.values())))


def idle_causes(parts: StepParts, attributed: Attributed) -> tuple[IdleCause, ...]:
    """Of a GPU, longest first."""
    found = []
    if parts.data > 0:
        found.append(
            IdleCause(cause="loader", seconds=parts.data, evidence="the GPU had no work while the loader was awaited")
        )
    left = parts.idle
    copies = min(left, attributed.copying_cost_seconds)
    sync = min(left - copies, attributed.waiting_cost_seconds)
    if copies > 0:
        evidence = "after copies from pageable memory, for which the host waits"
        found.append(IdleCause(cause="copies", seconds=copies, evidence=evidence))
    if sync > 0:
        calls, seconds = (sum(getattr(one, name) for one in attributed.waits) for name in ("calls", "seconds"))
        evidence = f"after the host had waited for the GPU {calls:.3g} times a step, {format_seconds(seconds)} in all"
        found.append(IdleCause(cause="sync", seconds=sync, evidence=evidence))
    if (late := left - copies - sync) > 0:
        evidence = f"the host did not queue the {attributed.launches:,.0f} kernels and copies of a step fast enough"
        found.append(IdleCause(cause="host late", seconds=late, evidence=evidence))
    return tuple(sorted(found, key=lambda one: -one.seconds))
