"""Time a callable correctly, on any device.

Three things make a naive timing wrong. An accelerator runs behind the program: without waiting for it one times the
launch, not the work; so pass `synchronize` (every device has one). The first calls allocate, compile and fill caches:
they are run and kept apart as warm-up. And the machine's speed drifts: to compare two things, alternate between them
(`interleave`), never time one after the other. A measurement keeps its raw samples and warnings; the most serious is
that other processes competed for the processor: where two threads wait for each other at the end of every operation
and one has no core, every step takes 40 times as long, and no statistic of the samples shows it.

>>> measure(lambda: sum(range(1000)), max_seconds=0.05).median_seconds < 0.001
True
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields

import psutil

from flatout.decoding import decode
from flatout.descendants import descendants
from flatout.errors import UsageError
from flatout.notebook_tables import table_html
from flatout.statistics import iqr, median, median_interval
from flatout.units import format_seconds

Clock = Callable[[], float]

_FEWEST_SAMPLES = 6  # below this no rank test can reach 95 % confidence
_LARGEST_SPREAD = 0.10  # IQR / median above which a result is called unstable
_OUTLIER = 3.0  # times the median
_LEAST_OTHERS_CORES = 0.25  # below this others do not matter
_FULL_SHARE = 0.9  # of all cores busy: above this no process gets a core at once
_SHORTEST_WATCH_SECONDS = 0.1  # the kernel counts processor time in ticks of 10 ms
_TICKS_PER_SAMPLE = 200  # a sample this many timer ticks long is read to 0.5 %
_SHORTEST_SAMPLE_SECONDS = 50e-6  # shorter calls are grouped, so that the loop and the clock do not count


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds per call with the evidence: every sample, the warm-up, the machine, and what makes it doubtful."""

    name: str
    samples_seconds: tuple[float, ...] = field(repr=False)  # there may be a thousand
    warmup_seconds: tuple[float, ...] = field(default=(), repr=False)
    calls_per_sample: int = 1  # a sample is the mean of that many calls
    machine_fingerprint: str | None = None
    contended: bool | None = None  # whether others competed for the processor; None: it was not watched
    warnings: tuple[str, ...] = field(default=())

    @property
    def median_seconds(self) -> float:
        return median(self.samples_seconds)

    @property
    def iqr_seconds(self) -> float:
        return iqr(self.samples_seconds)

    @property
    def spread(self) -> str:
        """'middle half within 3 us, n = 40'."""
        return f"middle half within {format_seconds(self.iqr_seconds)}, n = {len(self.samples_seconds)}"

    def __str__(self) -> str:
        """What `print` shows: the same as in a notebook."""
        interval = self.interval_seconds
        known = "" if interval is None else f" (95 % interval {' to '.join(map(format_seconds, interval))})"
        return "\n".join([f"{self.name}: {format_seconds(self.median_seconds)}{known}, {self.spread}", *self.warnings])

    def _repr_html_(self) -> str:
        """In a notebook: the median, the spread, and what makes it doubtful."""
        rows = [
            ("median", format_seconds(self.median_seconds)),
            ("middle half within", format_seconds(self.iqr_seconds)),
            ("samples", str(len(self.samples_seconds))),
        ]
        return table_html(self.name, [*rows, *(("caution", warning) for warning in self.warnings)])

    @property
    def interval_seconds(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the median; None: fewer than 6 samples."""
        return median_interval(self.samples_seconds)

    def to_json(self) -> dict[str, object]:
        listed = {"samples_seconds", "warmup_seconds", "warnings"}
        return {key: list(value) if key in listed else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Measurement:
        known = {one.name: data[one.name] for one in fields(cls) if one.name in data}  # another version wrote others
        return decode(cls, known)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Cores kept busy, on average, over a period, of those that this process may run on."""

    own_cores: float  # by this process and its children
    others_cores: float  # by all other processes, and what the hypervisor took away
    logical_cores: int

    @property
    def contended(self) -> bool:
        """Other processes were busy, and no core was idle."""
        full = self.own_cores + self.others_cores >= _FULL_SHARE * self.logical_cores
        return full and self.others_cores >= _LEAST_OTHERS_CORES


class LoadWatch:
    """Measures who used the processor since it was created. A reading visits all processes: not for inner loops."""

    def __init__(self) -> None:
        self._start_seconds = time.perf_counter()
        self._all_start, self._own_start = _busy_seconds_by_core(), _busy_seconds_of_own()
        self._allowed = _allowed_cores(len(self._all_start))

    def busy_share(self) -> float | None:
        """Of all cores, whoever used them until now; None if the period is too short. Visits no processes."""
        elapsed = time.perf_counter() - self._start_seconds
        if elapsed < _SHORTEST_WATCH_SECONDS:
            return None
        return (sum(_busy_seconds_by_core()) - sum(self._all_start)) / elapsed / max(1, len(self._all_start))

    def read(self) -> Load | None:
        """The load until now; None if the period is too short to measure."""
        elapsed = time.perf_counter() - self._start_seconds
        if elapsed < _SHORTEST_WATCH_SECONDS:
            return None
        own = max(0.0, _busy_seconds_of_own() - self._own_start) / elapsed
        busy = _busy_seconds_by_core()
        everybody = sum(busy[core] - self._all_start[core] for core in self._allowed if core < len(busy)) / elapsed
        return Load(own_cores=own, others_cores=max(0.0, everybody - own), logical_cores=len(self._allowed))


def _busy_seconds_by_core() -> list[float]:
    # Linux counts the time of guests twice: in user or nice, and on its own.
    idle_or_double = ("idle", "iowait", "guest", "guest_nice")
    return [
        float(sum(value for name, value in times._asdict().items() if name not in idle_or_double))
        for times in psutil.cpu_times(percpu=True)
    ]


def _allowed_cores(count: int) -> list[int]:
    """By affinity; macOS and Windows do not report it."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    return sorted(core for core in allowed if core < count) or list(range(count))


def _busy_seconds_of_own() -> float:
    total = 0.0
    for process in (psutil.Process(), *descendants()):
        try:
            times = process.cpu_times()
        except psutil.Error:  # a child that has just ended
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def measurement(
    name: str,
    samples_seconds: list[float],
    *,
    warmup_seconds: list[float] | None = None,
    calls_per_sample: int = 1,
    machine_fingerprint: str | None = None,
    tick_seconds: float = 0.0,
    load: Load | None = None,
) -> Measurement:
    """A Measurement of samples taken elsewhere, with its warnings."""
    if not samples_seconds:
        raise UsageError(f"no samples of {name!r}", limit="a measurement needs at least one")
    return Measurement(
        name=name,
        samples_seconds=tuple(samples_seconds),
        warmup_seconds=tuple(warmup_seconds or ()),
        calls_per_sample=calls_per_sample,
        machine_fingerprint=machine_fingerprint,
        contended=None if load is None else load.contended,
        warnings=doubts(samples_seconds, _TICKS_PER_SAMPLE * tick_seconds / calls_per_sample, load),
    )


def doubts(
    samples_seconds: list[float], shortest_readable_seconds: float = 0.0, load: Load | None = None
) -> tuple[str, ...]:
    """What to know before trusting the samples."""
    middle, spread = median(samples_seconds), iqr(samples_seconds)
    slow = sum(sample > _OUTLIER * middle for sample in samples_seconds)
    found = []
    if len(samples_seconds) < _FEWEST_SAMPLES:
        found.append(f"too few samples: {len(samples_seconds)}, at least {_FEWEST_SAMPLES} are needed to be sure")
    if spread > _LARGEST_SPREAD * middle:
        found.append(f"unstable: the middle half spreads over {spread / middle:.0%} of the median")
    if slow:
        found.append(f"outliers: {slow} of {len(samples_seconds)} samples took over {_OUTLIER:.0f}x the median")
    if middle < shortest_readable_seconds:
        found.append(f"below the timer's resolution: {format_seconds(middle)} a call")
    return (*found, *filter(None, [contention(load)]))


def contention(load: Load | None) -> str | None:
    """The warning that other processes were busy; None where they were not, or it was not watched."""
    if load is None or not load.contended:
        return None
    return f"contended: others kept {load.others_cores:.1f} of {load.logical_cores} cores busy, none was idle"


def measure(
    function: Callable[[], object],
    *,
    name: str = "",
    synchronize: Callable[[], object] | None = None,
    warmup: int = 3,
    min_samples: int = 10,
    max_samples: int = 1000,
    min_seconds: float = 0.2,
    max_seconds: float = 10.0,
    machine_fingerprint: str | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Call the function until it has `min_samples` and has run for `min_seconds`, or until `max_seconds` have passed.

    `max_seconds` limits warm-up and samples together; the call under way then is finished. One sample is always taken.
    """
    end = clock() + max_seconds
    warm: list[float] = []
    while len(warm) < warmup and (not warm or clock() < end):
        warm.append(_sample(function, 1, synchronize, clock))
    calls = _calls_per_sample(warm)
    samples: list[float] = []
    watch = LoadWatch()
    start = clock()
    while len(samples) < max_samples:
        samples.append(_sample(function, calls, synchronize, clock))
        now = clock()
        if now >= end or (len(samples) >= min_samples and now - start >= min_seconds):
            break
    return measurement(
        name or getattr(function, "__name__", "call"),
        samples,
        warmup_seconds=warm,
        calls_per_sample=calls,
        machine_fingerprint=machine_fingerprint,
        load=watch.read(),
        tick_seconds=timer_tick_seconds(clock),
    )


def interleave(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 20,
    *,
    synchronize: Callable[[], object] | None = None,
    warmup: int = 2,
    max_seconds: float | None = None,
    machine_fingerprint: str | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Measurement]:
    """Time the functions in turns; the i-th samples of all belong together (compare them with `compare_paired`).

    The order is reversed every round, so that the same function does not always come second (warm caches, a throttled
    core). `max_seconds` takes effect after a whole round; at least one round is run.
    """
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", limit="at least 1 is needed", remedy="6 or more allow a verdict")
    end = None if max_seconds is None else clock() + max_seconds
    warm = {
        name: [_sample(function, 1, synchronize, clock) for _ in range(warmup)] for name, function in functions.items()
    }
    calls = {name: _calls_per_sample(warm[name]) for name in functions}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    watch = LoadWatch()
    for _ in range(rounds):
        for name in order:
            samples[name].append(_sample(functions[name], calls[name], synchronize, clock))
        order.reverse()
        if end is not None and clock() >= end:
            break
    load, tick = watch.read(), timer_tick_seconds(clock)
    return {
        name: measurement(
            name,
            samples[name],
            warmup_seconds=warm[name],
            calls_per_sample=calls[name],
            machine_fingerprint=machine_fingerprint,
            load=load,
            tick_seconds=tick,
        )
        for name in functions
    }


def timer_tick_seconds(clock: Clock = time.perf_counter) -> float:
    """The smallest step of the clock that was observed: the cost of one reading."""
    steps = []
    for _ in range(20):
        before = clock()
        steps.append(clock() - before)
    return min((step for step in steps if step > 0), default=0.0)


def _sample(
    function: Callable[[], object], calls: int, synchronize: Callable[[], object] | None, clock: Clock
) -> float:
    if synchronize is not None:
        synchronize()  # work queued before must not count towards this sample
    start = clock()
    for _ in range(calls):
        function()
    if synchronize is not None:
        synchronize()
    return (clock() - start) / calls


def _calls_per_sample(warm: list[float]) -> int:
    """Enough calls for the timer to resolve a sample; one, if the function is slow or was not warmed up."""
    if not warm or min(warm) >= _SHORTEST_SAMPLE_SECONDS:
        return 1
    return min(1000, max(1, round(_SHORTEST_SAMPLE_SECONDS / max(min(warm), 1e-9))))
