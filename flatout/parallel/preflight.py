"""Before a long job: what its ranks reach between them, and which of them, or which link, is slow.

The ranks are started as the job's own would be, and run flatout.parallel.measure_collectives in place of its command.

    found = preflight(Launch(command=("python", "train.py"), nproc_per_node=8))
    found.slow          what stands out; empty: nothing does
    found.fits          latency and bandwidth of each collective

A rank or a link is called slow only where that is clear: its median is at least 1.3 times that of the others (latency:
3 times), and three quarters of its samples are slower than three quarters of theirs.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Literal, TypeVar

from flatout.arguments import as_seconds
from flatout.decoding import decode
from flatout.errors import MachineError
from flatout.parallel.communication_costs import Link
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.events import Tell
from flatout.parallel.launching.launch import launch
from flatout.parallel.measure_collectives import COLLECTIVES, SECONDS
from flatout.parallel.rank_timings import Fit, PairTiming, Timings, fit
from flatout.statistics import median, quantile
from flatout.temporary_folders import temporary_folder

K = TypeVar("K", bound=Hashable)
Kind = Literal["rank", "machine", "link"]
What = Literal["compute", "bandwidth", "latency"]
LEAST_RATIOS: Mapping[What, float] = {"compute": 1.3, "bandwidth": 1.3, "latency": 3.0}
"""How many times as long it takes as the others do: short messages scatter more."""
FEWEST_PAIRS = 3
"""Among fewer, none can be told from the others."""
MODULE = "flatout.parallel.measure_collectives"
_SIGNALLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank, a machine or a link between two ranks that is clearly slower than the others."""

    kind: Kind
    numbers: tuple[int, ...]
    """Of the rank or the machine; of the two ranks of a link."""
    what: What
    """'bandwidth' and 'latency': of what it sends and receives."""
    seconds: float
    """Its median."""
    others_seconds: float
    """That of the others."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.others_seconds

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "numbers": list(self.numbers), "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the ranks measured, and what follows from it."""

    timings: Timings
    fits: Mapping[str, Fit | None]
    """By collective; None: fewer than three sizes were measured, or they do not grow with their bytes."""
    slow: tuple[Slow, ...]
    not_judged: tuple[str, ...]
    """What could not be compared, and why."""

    @property
    def within(self) -> Link | None:
        """The link between two ranks of a machine, for a plan; None: none was measured, or large messages hardly took
        longer than small ones."""
        return self._link(same_machine=True)

    @property
    def between(self) -> Link | None:
        """The link between ranks of different machines, of one rank; None: likewise."""
        return self._link(same_machine=False)

    def _link(self, *, same_machine: bool) -> Link | None:
        pairs = _pairs_of(self.timings, same_machine=same_machine)
        if not pairs:
            return None
        small, large = (
            median([median(seconds) for seconds in samples])
            for samples in ([one.small_seconds for one in pairs], [one.large_seconds for one in pairs])
        )
        if large < 2 * small:  # the difference is not much more than their scatter
            return None
        slope = (large - small) / (pairs[0].large_bytes - pairs[0].small_bytes)
        return Link(latency_seconds=max(small - slope * pairs[0].small_bytes, 0.0), bytes_per_second=1 / slope)

    def to_json(self) -> dict[str, object]:
        return {
            "timings": asdict(self.timings),
            "fits": {name: None if found is None else asdict(found) for name, found in self.fits.items()},
            "slow": [one.to_json() for one in self.slow],
            "not_judged": list(self.not_judged),
            "within": self.within and asdict(self.within),
            "between": self.between and asdict(self.between),
        }


def preflight(request: Launch, *, seconds: float = SECONDS, tell: Tell = lambda event: None) -> Preflight:
    """Start the ranks that `request` asks for, and have them measure for about so many seconds instead of running its
    command. On several machines each of them calls it, and each gets the same figures.

    tell: as that of `launch`, which says why a rank was killed or a machine was lost.

    Raises UsageError and MachineError as `launch` does, and MachineError where the ranks do not measure to the end.
    """
    as_seconds(seconds)
    with temporary_folder("preflight") as folder:
        out = folder / "timings.json"
        # -P: a json.py in the user's folder is not Python's.
        command = (sys.executable, "-P", "-m", MODULE, str(out), repr(float(seconds)))
        # Every machine is measured, once; none has a script to compare.
        ranks = replace(request, command=command, script=None, plan=None, min_nnodes=None, max_restarts=0)
        status = launch(ranks, tell=tell)
        if status in _SIGNALLED:
            raise MachineError("the preflight was interrupted", limit="its ranks measure to the end")
        if status != 0 or not out.exists():
            raise MachineError(
                f"the ranks of the preflight ended with exit code {status}",
                limit="they measure to the end, and say above why they did not",
                remedy="fix that first: the job would fail in the same way",
            )
        return judged(decode(Timings, json.loads(out.read_text(encoding="utf-8"))))


def judged(timings: Timings) -> Preflight:
    """What follows from the ranks' timings."""
    slow, not_judged = list(_slow_computing(timings)), []
    if len(timings.ranks) == 1:
        not_judged.append("ranks and links: there is one rank")
    elif timings.pairs_missing:
        not_judged.append(f"links: {timings.pairs_missing}")
    for same_machine in (True, False):
        pairs = _pairs_of(timings, same_machine=same_machine)
        if 0 < len(pairs) < FEWEST_PAIRS:
            where = "within a machine" if same_machine else "between machines"
            not_judged.append(f"links {where}: {len(pairs)}, and one stands out among {FEWEST_PAIRS} or more")
        elif pairs:
            slow += _slow_links(timings, pairs)
    return Preflight(
        timings=timings,
        fits={
            one.name: fit([(size.size_bytes, size.median_seconds) for size in one.sizes])
            for one in timings.collectives
            if one.name in COLLECTIVES
        },
        slow=tuple(slow),
        not_judged=tuple(not_judged),
    )


def _slow_computing(timings: Timings) -> list[Slow]:
    samples = {one.rank: one.product_seconds for one in timings.ranks}
    return [
        Slow(kind="rank", numbers=(rank,), what="compute", seconds=own, others_seconds=others)
        for rank, own, others in _standing_out(samples, LEAST_RATIOS["compute"])
    ]


def _slow_links(timings: Timings, pairs: Sequence[PairTiming]) -> list[Slow]:
    """Machines all of whose links are slow, then ranks likewise, then links: each is named once, by the largest."""
    machines = {one.rank: one.machine for one in timings.ranks}
    measures: tuple[tuple[What, Callable[[PairTiming], tuple[float, ...]]], ...] = (
        ("bandwidth", lambda pair: pair.large_seconds),
        ("latency", lambda pair: pair.small_seconds),
    )
    found: list[Slow] = []
    explained: set[tuple[int, int]] = set()
    for what, samples_of in measures:
        samples = {pair.ranks: samples_of(pair) for pair in pairs}
        members: list[tuple[Kind, Mapping[tuple[int, int], tuple[int, ...]]]] = [
            ("machine", {ranks: (machines[ranks[0]], machines[ranks[1]]) for ranks in samples}),
            ("rank", {ranks: ranks for ranks in samples}),
        ]
        for kind, of in members:
            for number in sorted(set(chain.from_iterable(of.values()))):
                own = {ranks: some for ranks, some in samples.items() if number in of[ranks]}
                rest = [some for ranks, some in samples.items() if number not in of[ranks]]
                if set(own) <= explained or not rest:
                    continue
                others = [*chain.from_iterable(rest)]
                if all(_stands_out(some, others, LEAST_RATIOS[what]) for some in own.values()):
                    middle = median([*chain.from_iterable(own.values())])
                    found.append(
                        Slow(kind=kind, numbers=(number,), what=what, seconds=middle, others_seconds=median(others))
                    )
                    explained |= set(own)
        left = {ranks: some for ranks, some in samples.items() if ranks not in explained}
        for ranks, seconds, others_seconds in _standing_out(left, LEAST_RATIOS[what]):
            found.append(Slow(kind="link", numbers=ranks, what=what, seconds=seconds, others_seconds=others_seconds))
            explained.add(ranks)
    return found


def _standing_out(samples: Mapping[K, Sequence[float]], least: float) -> list[tuple[K, float, float]]:
    """(key, its median, the others' median) of those that are clearly slower than all others together."""
    found = []
    for key, own in samples.items():
        others = [*chain.from_iterable(some for other, some in samples.items() if other != key)]
        if others and _stands_out(own, others, least):
            found.append((key, median(own), median(others)))
    return found


def _stands_out(own: Sequence[float], others: Sequence[float], least: float) -> bool:
    return median(own) >= least * median(others) and quantile(own, 0.25) > quantile(others, 0.75)


def _pairs_of(timings: Timings, *, same_machine: bool) -> list[PairTiming]:
    machines = {one.rank: one.machine for one in timings.ranks}
    return [
        pair
        for pair in timings.pairs
        if (machines[pair.ranks[0]] == machines[pair.ranks[1]]) is same_machine and pair.small_seconds
    ]
