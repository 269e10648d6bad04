"""What is recorded of one process that trains, and how the ranks of a run compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flatout import environment
from flatout.decoding import decode
from flatout.machine.process_memory import peak_resident_bytes
from flatout.script.describe import breakdown
from flatout.script.device_calls import device_name
from flatout.script.runner import Runner

WAITS = ("backward", "sync", "evaluation")
"""Parts of a step in which a rank may wait for others, and one that is not in it."""


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process of a run that trained. Seconds are per step; `parts` add up to a typical step."""

    pid: int
    rank: int | None
    """In the process group, else RANK; None: it has neither, or is the script's own process."""
    started_by_script: bool = True
    started_at: float
    """When it was first watched, in seconds since 1970."""
    steps: int
    step_seconds: float | None
    """Median; None: too few steps were timed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Data, forward, backward...; empty: no step was watched closely (they begin with step 10)."""
    device: str
    peak_resident_bytes: int
    peak_device_bytes: int | None = None
    """Allocated at most in the steps sampled; None: not on a GPU, or none was sampled."""
    ended: bool = False
    """Did it end by itself? False: it was killed, and these are its last figures."""
    fault: str | None = None
    """Why it could not be watched to the end."""

    @property
    def data_seconds(self) -> float | None:
        return self.parts.get("data") if self.parts else None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> ProcessRecord:
        return decode(cls, data)


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
    runner: Runner, *, rank: int | None, started_at: float, ended: bool, started_by_script: bool = True
) -> ProcessRecord:
    """Of this process, now."""
    record = runner.record
    on_device = [sample.peak_bytes for sample in record.memory if sample.reserved_bytes is not None]
    return ProcessRecord(
        pid=os.getpid(),
        rank=rank,
        started_by_script=started_by_script,
        started_at=started_at,
        steps=record.steps,
        step_seconds=record.median_seconds,
        parts=breakdown(record.rows),
        device=device_name(runner.watch.subject),
        peak_resident_bytes=peak_resident_bytes(),
        peak_device_bytes=max(on_device, default=None),
        ended=ended,
        fault=runner.fault,
    )


def rank_now() -> int | None:
    """In the process group where there is one at the moment, else that of torchrun."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return environment.rank()


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
