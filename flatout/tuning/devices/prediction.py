"""What a step would take on several devices, from the parts of one on one device and the exchange between ranks.

    a rank's share       loading, copies, forward and backward passes of 1/n of the batch; what an operation takes
                         however small its batch is stays
    done by every rank   the optimizer's update, evaluations, the script's own Python
    the exchange         ranks compare where they are, and average the gradients: nothing of it overlaps with compute

On a CPU the ranks share its cores: each has 1/n of the threads, and a step of one process with so many threads was
timed. An interval says how wrong that may be: ranks that compute at once slow each other down (memory bandwidth, units
that two threads of a core share), and how far operations shrink with the batch is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.levers.observed import Observed
from flatout.tuning.devices.found import Exchange, Predicted
from flatout.units import format_bytes, format_seconds

SHARED = ("data", "transfer", "forward", "backward")
OPERATION_SECONDS = (0.0, 4e-6, 12e-6)
"""Of a CPU operation that does not get shorter with its batch: at least, as a rule, at most; dispatch and autograd."""
SLOWED = {"cpu": (1.0, 1.1, 1.5), "cuda": (1.0, 1.02, 1.15)}
"""By how much ranks that compute at the same time slow each other down."""
COPIES = 4
"""How often the bytes of the gradients are read or written beside the exchange: into one buffer, and back."""


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
    return Predicted(
        devices=devices,
        least=least,
        expected=expected,
        most=most,
        step_seconds=times[1],
        reason=_reason(one, (shared, alone, share, slower, sent), threads, exchange),
    )


def _reason(
    one: OneDevice, parts: tuple[float, float, float, float, float], threads: int | None, exchange: Exchange
) -> str:
    shared, alone, share, slower, sent = parts
    said = [
        f"{share:.0%} of the {format_seconds(shared)} that a batch takes",
        f"{format_seconds(alone)} that every rank does",
        f"{format_seconds(sent)} to exchange {format_bytes(exchange.size_bytes)} of gradients",
    ]
    if threads is not None and threads in one.fewer_threads:
        each = "1 thread" if threads == 1 else f"{threads} threads"
        said.append(f"x{slower:.2f} as long with {each} a rank")
    return ", ".join(said)


def in_order_of_promise(found: Sequence[Predicted]) -> list[Predicted]:
    """The fastest first; of equals the one with fewer devices."""
    return sorted(found, key=lambda one: (-one.expected, one.devices))
