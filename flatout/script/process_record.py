"""What is recorded of one process that trains, and how the ranks of a run compare."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from flatout import environment
from flatout.decoding import decode
from flatout.machine.process_memory import peak_resident_bytes
from flatout.machine.processes import pid_namespace, process_started
from flatout.script.communication_calls import ranks_together
from flatout.script.describe import breakdown
from flatout.script.device_calls import device_name
from flatout.script.runner import Runner, on_monotonic
from flatout.script.spans import StepRow
from flatout.script.watch import Watch

WAITS = ("backward", "communication", "sync", "evaluation")
"""Parts of a step in which a rank may wait for others, and one that is not in it."""
NO_WORK = ("communication", "sync", "evaluation")
"""Parts in which a rank waits for others or for its device, and one that is not in a step."""
MOST_STEP_WAITS = 60
SURE = 1.96
"""Standard errors on each side of a mean, for a 95 % confidence interval."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of a process among those that train together."""

    rank: int | None = None
    ranks: int | None = None
    """How many there are; None: it trains alone, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process of a run that trained. Seconds are per step; `parts` add up to a typical step."""

    pid: int
    rank: int | None
    """In the process group, else RANK; None: it has neither, or is the script's own process."""
    started_by_script: bool = True
    started_at: float
    """When it was first watched, in seconds since 1970."""
    process_started: str | None = None
    """Distinguishes this process from a later one with the same number; None: unknown."""
    pid_namespace: str | None = None
    """Where `pid` counts: containers have their own numbers."""
    steps: int
    step_seconds: float | None
    """Median; None: too few steps were timed."""
    recent_seconds: float | None = None
    """Of recent steps."""
    last_step_clock: float | None = None
    """time.monotonic() at the end of the last step."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Data, forward, backward...; empty: no step was watched closely (they begin with step 10)."""
    ranks: int | None = None
    """How many processes train together with this one, itself included; None: it trains alone."""
    exposed_seconds: float | None = None
    """Of a step, in which it waited for other ranks and did nothing else; None: not known."""
    exposed_unknown_because: str = ""
    step_waits: tuple[tuple[int, float], ...] = ()
    """(number of the step, the same in it), of the last that were watched."""
    own_error_seconds: float | None = None
    """Half the width of the 95 % confidence interval of a step without such waits; None: too few were watched."""
    own_typical_seconds: float | None = None
    """The median of that: what disturbs a few steps does not move it."""
    busy_share: float | None = None
    """Of all cores of its machine, whoever used them meanwhile; None: not known."""
    device: str
    peak_resident_bytes: int
    peak_device_bytes: int | None = None
    """Allocated at most in the steps sampled; None: not on a GPU, or none was sampled."""
    ended: bool = False
    """Did it end by itself? False: it was killed, and these are its last figures."""
    fault: str | None = None
    """Why it could not be watched to the end."""
    applied: tuple[str, ...] = ()
    """Labels of the plan's choices that it trained by."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> ProcessRecord:
        return decode(cls, data)


@dataclass(frozen=True, kw_only=True)
class Others:
    """The processes that train beside the one in which the script began."""

    started: tuple[ProcessRecord, ...] = ()
    """By the script."""
    ranks: tuple[ProcessRecord, ...] = ()
    """That a launcher has started, as it has started this one; or of a run on several devices."""
    place: Place | None = None
    """Of this process among those; None: it is none of them."""
    devices: int | None = None
    """On so many devices Flatout runs a script for one; None: the script itself says on how many."""


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """The slowest and the fastest rank by one figure."""

    slowest: str
    slowest_seconds: float
    fastest: str
    fastest_seconds: float

    @property
    def share(self) -> float:
        """By how much the slowest exceeds the fastest."""
        return self.slowest_seconds / self.fastest_seconds - 1 if self.fastest_seconds else 0.0


def process_record(
    runner: Runner, *, place: Place, started_at: float, ended: bool, started_by_script: bool = True
) -> ProcessRecord:
    """Of this process, now. place: among its ranks."""
    record = runner.record
    on_device = [sample.peak_bytes for sample in record.memory if sample.reserved_bytes is not None]
    steps = record_of_steps(
        runner.watch,
        record.rows,
        place=place,
        started_at=started_at,
        busy_share=runner.busy_share(),
        peak_device_bytes=max(on_device, default=None),
    )
    return replace(
        steps,
        started_by_script=started_by_script,
        process_started=process_started(os.getpid()),
        pid_namespace=pid_namespace(),
        steps=record.steps,
        step_seconds=record.median_seconds,
        recent_seconds=record.recent_seconds,
        last_step_clock=on_monotonic(record.last_step_at),
        ended=ended,
        fault=runner.fault,
        applied=tuple(choice.label for choice in runner.applied.choices),
    )


def record_of_steps(
    watch: Watch,
    rows: Sequence[StepRow],
    *,
    place: Place,
    started_at: float,
    busy_share: float | None,
    peak_device_bytes: int | None,
) -> ProcessRecord:
    """Of this process, by steps of one window. peak_device_bytes: None on a CPU."""
    unknown, parts = watch.communication_unknown_because, breakdown(rows)
    seconds = statistics.median(row.seconds for row in rows) if rows else None
    return ProcessRecord(
        pid=os.getpid(),
        rank=place.rank,
        started_at=started_at,
        steps=len(rows),
        step_seconds=seconds,
        parts=parts,
        ranks=place.ranks,
        exposed_seconds=None if unknown or not parts else parts["communication"],
        exposed_unknown_because=unknown,
        step_waits=() if unknown else step_waits(rows),
        own_error_seconds=own_error_seconds(rows),
        own_typical_seconds=own_typical_seconds(rows),
        busy_share=busy_share,
        device=device_name(watch.subject),
        peak_resident_bytes=peak_resident_bytes(),
        peak_device_bytes=peak_device_bytes,
        ended=True,
    )


def place_now(last: Place) -> Place:
    """In the process group where there is one at the moment; else the last one known (a script destroys its group
    before it ends), else that of torchrun."""
    together = ranks_together()
    if together is not None:
        return Place(rank=together[0], ranks=together[1])
    return last if last.rank is not None else Place(rank=environment.rank())


def own_seconds(parts: Mapping[str, float]) -> float:
    """Of a step: without waiting for other ranks or for the device."""
    return sum(seconds for kind, seconds in parts.items() if kind not in NO_WORK)


def step_waits(rows: Sequence[StepRow]) -> tuple[tuple[int, float], ...]:
    """What the process waited for other ranks in each of the last steps that were watched."""
    known = [(row.step, row.parts.get("communication", 0.0)) for row in rows[-MOST_STEP_WAITS:] if row.step is not None]
    return tuple(known)


def own_error_seconds(rows: Sequence[StepRow]) -> float | None:
    """Half the width of the 95 % confidence interval of a rank's own work in a step; None: too few steps."""
    own = _own(rows)
    return SURE * statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 2 else None


def own_typical_seconds(rows: Sequence[StepRow]) -> float | None:
    own = _own(rows)
    return statistics.median(own) if own else None


def _own(rows: Sequence[StepRow]) -> list[float]:
    return [own_seconds(row.parts) for row in rows if not row.parts.get("evaluation")]


def in_order(records: Sequence[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """The script's own process first, then by rank, then by start."""

    def place(one: ProcessRecord) -> tuple[bool, bool, int, float]:
        return one.started_by_script, one.rank is None, one.rank or 0, one.started_at

    return tuple(sorted(records, key=place))


def process_names(records: Sequence[ProcessRecord]) -> list[str]:
    """'rank 0' where every process has a rank of its own; else 'process 4242'."""
    ranks = [one.rank for one in records]
    named = None not in ranks and len(set(ranks)) == len(ranks)
    return [f"rank {one.rank}" if named else _process_name(one) for one in records]


def _process_name(one: ProcessRecord) -> str:
    if not one.started_by_script:
        return "the script"
    return f"process {one.pid}" if one.rank is None else f"rank {one.rank} ({one.pid})"


def step_spread(records: Sequence[ProcessRecord]) -> RankSpread | None:
    """By the median step; None: fewer than two are known."""
    return _spread(records, [one.step_seconds for one in records])


def own_spread(records: Sequence[ProcessRecord]) -> RankSpread | None:
    """By the part of a step outside the backward pass, where DDP waits for the slowest rank, and without waits for a
    GPU: ranks whose steps are equally long still differ in it. None: fewer than two are known."""
    return _spread(
        records,
        [
            sum(seconds for kind, seconds in one.parts.items() if kind not in WAITS) if one.parts else None
            for one in records
        ],
    )


def _spread(records: Sequence[ProcessRecord], seconds: Sequence[float | None]) -> RankSpread | None:
    known = [(took, name) for took, name in zip(seconds, process_names(records), strict=True) if took is not None]
    if len(known) < 2:
        return None
    (least, fastest), (most, slowest) = min(known), max(known)
    return RankSpread(slowest=slowest, slowest_seconds=most, fastest=fastest, fastest_seconds=least)
