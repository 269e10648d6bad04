"""What a watched run shows that its owner should know: each check takes the facts and returns a Finding or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.diagnose.finding import Finding
from flatout.levers.observed import Observed
from flatout.script.epochs import EpochStarts
from flatout.script.growth import Growth
from flatout.units import format_bytes, format_seconds

DATA_SHARE_LIMIT = 0.15
EVALUATION_SHARE_LIMIT = 0.3
OTHER_SHARE_LIMIT = 0.3
EPOCH_START_LIMIT = 0.02
GROWTH_LIMIT_BYTES_PER_HOUR = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The input of the checks."""

    observed: Observed | None
    steps: int
    planned: bool
    growth: Growth | None
    nearly_out: tuple[int, int, int] | None = None
    """(step, available bytes, total bytes) when hardly any of the host's memory was left."""
    command: str
    """The script and its arguments, as a shell would read them."""
    rolled_back: tuple[tuple[str, str], ...] = ()
    epochs: EpochStarts | None = None
    gpus: tuple[str, ...] = ()
    """Names of the GPUs of this machine that torch can use."""


def check_run(facts: RunFacts) -> list[Finding]:
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


def _no_step(facts: RunFacts) -> Finding | None:
    if facts.steps:
        return None
    return Finding(
        name="no-step",
        severity="note",
        title="no training step was found",
        evidence="no optimizer stepped and no backward pass was followed by a change of weights in this process",
        remedy="if training happens in processes that the script starts, run Flatout inside those",
    )


def _rolled_back(facts: RunFacts) -> Finding | None:
    if not facts.rolled_back:
        return None
    return Finding(
        name="rolled-back",
        severity="warning",
        title=f"rolled back during the run: {', '.join(label for label, _ in facts.rolled_back)}",
        evidence="; ".join(f"{label}: {reason}" for label, reason in facts.rolled_back),
        remedy="the run continued without it; tune again for a plan that works throughout",
        next_command=f"flatout tune {facts.command}",
    )


def _memory_nearly_out(facts: RunFacts) -> Finding | None:
    if facts.nearly_out is None:
        return None
    step, available, total = facts.nearly_out
    return Finding(
        name="memory-nearly-out",
        severity="warning",
        title=f"at step {step:,} hardly any memory was left",
        evidence=f"{format_bytes(available)} of {format_bytes(total)} that this process may use; when it runs out, "
        "the kernel kills the process without a message",
        remedy="see who holds it with flatout memory; fewer loader workers and a smaller batch take less",
        next_command=f"flatout memory {facts.command}",
    )


def _memory_growth(facts: RunFacts) -> Finding | None:
    growth = facts.growth
    if growth is None or growth.bytes_per_hour < GROWTH_LIMIT_BYTES_PER_HOUR:
        return None
    each = f", {format_bytes(growth.bytes_per_step)} a step" if growth.bytes_per_step is not None else ""
    return Finding(
        name="memory-growth",
        severity="warning",
        title=f"memory grows by {format_bytes(growth.bytes_per_hour)} an hour{each}",
        evidence=f"resident memory rose all through the last {format_seconds(growth.seconds)}, from "
        f"{format_bytes(growth.first_bytes)} to {format_bytes(growth.last_bytes)}",
        remedy="something is held from step to step: a list of losses with their graphs, a cache, a history",
    )


def _starved(facts: RunFacts) -> Finding | None:
    return _large_part(
        facts,
        "data",
        DATA_SHARE_LIMIT,
        "starved",
        "the model waits for data",
        "fetch whole batches (the lever batched fetch), or set num_workers=2 on the loader",
    )


def _epoch_starts(facts: RunFacts) -> Finding | None:
    epochs = facts.epochs
    if epochs is None or not epochs.workers or not epochs.epoch_seconds or epochs.cost_seconds is None:
        return None
    share = epochs.cost_seconds / epochs.epoch_seconds
    if share < EPOCH_START_LIMIT:
        return None
    return Finding(
        name="epoch-starts",
        severity="note",
        title=f"starting the loader's workers takes {share:.0%} of an epoch",
        evidence=f"{format_seconds(epochs.cost_seconds)} of {format_seconds(epochs.epoch_seconds)}: medians, from "
        "asking for an iterator to the end of its first step, less a step's usual time",
        cost_seconds=epochs.cost_seconds,
        cost_share=share,
        remedy=f"DataLoader(..., persistent_workers=True) keeps its {epochs.workers} "
        f"worker{'s' if epochs.workers > 1 else ''} between epochs "
        "(random numbers drawn in workers then continue instead of being seeded again)",
    )


def _idle_gpu(facts: RunFacts) -> Finding | None:
    seen = facts.observed
    if seen is None or seen.device != "cpu" or not facts.gpus or not seen.modules:
        return None
    return Finding(
        name="idle-gpu",
        severity="warning",
        title="the script trains on the CPU although there is a GPU",
        evidence=f"the weights are on the CPU; torch can use {', '.join(facts.gpus)}",
        remedy="model.to('cuda') before the optimizer is made, and for each batch "
        "flatout.to_device(batch, flatout.device()); or let a plan move it"
        + (", once the script no longer chooses its device itself" if seen.names_device else ""),
        next_command=None if facts.planned or seen.names_device else f"flatout tune {facts.command}",
    )


def _evaluation(facts: RunFacts) -> Finding | None:
    found = _large_part(
        facts, "evaluation", EVALUATION_SHARE_LIMIT, "evaluation", "evaluation takes much of the time",
        "evaluate less often, or on fewer samples",
    )  # fmt: skip
    return found


def _python(facts: RunFacts) -> Finding | None:
    return _large_part(
        facts, "other", OTHER_SHARE_LIMIT, "python",
        "much of a step is spent outside the model, data loading and optimizer",
        "look at what the loop itself does every step",
    )  # fmt: skip


def _large_part(facts: RunFacts, part: str, limit: float, name: str, title: str, remedy: str) -> Finding | None:
    seen = facts.observed
    share = seen.share(part) if seen is not None else None
    if seen is None or share is None or share < limit or seen.step_seconds is None:
        return None
    return Finding(
        name=name,
        severity="note",
        title=f"{title}: {share:.0%} of a step",
        evidence=f"{format_seconds(seen.breakdown_seconds[part])} of {format_seconds(seen.step_seconds)} a step",
        cost_seconds=seen.breakdown_seconds[part],
        cost_share=share,
        remedy=remedy,
        next_command=None if facts.planned else f"flatout tune {facts.command}",
    )


# What explains the others first: without a step nothing else can be said; a lever taken back and memory that leaks
# threaten the run itself; then where the time goes, largest wins first.
CHECKS: tuple[Callable[[RunFacts], Finding | None], ...] = (
    _no_step,
    _rolled_back,
    _memory_nearly_out,
    _memory_growth,
    _idle_gpu,
    _starved,
    _epoch_starts,
    _evaluation,
    _python,
)
