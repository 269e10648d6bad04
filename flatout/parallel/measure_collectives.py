"""What each rank of a preflight runs: `python -m flatout.parallel.measure_collectives OUT.json [SECONDS]`.

The ranks measure together, so whatever decides how often something is done is agreed on first: the largest value of
all ranks. The first rank of each machine writes the file.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import FlatoutError, describe_error
from flatout.machine.ranks import Ranks, ranks
from flatout.parallel.rank_timings import CollectiveTiming, PairTiming, RankTiming, SizeTiming, Timings
from flatout.units import format_bytes
from flatout.whole_files import written_whole

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 10.0
"""For all measurements together; what is under way then is finished."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = tuple(1024 * 4**power for power in range(9))
"""Bytes, from 1 KiB to 64 MiB."""
MOST_PAIRED_RANKS = 16
"""Every pair of more would take too long."""
SMALL_BYTES = 1024
LARGE_BYTES = (1 << 20, 256 << 10, 64 << 10)
"""Of a message between two ranks: the first one that all pairs can send in the time."""
ROUNDS = 3
"""Of products, and of pairs: something else that keeps a machine busy for a moment disturbs one round only."""
PAIR_SAMPLES, FEWEST_PAIR_SAMPLES, PRODUCT_SAMPLES = 5, 2, 5
"""In a round."""
MOST_SAMPLES, LEAST_SAMPLE_SECONDS = 15, 0.002
PAIRS_SHARE, PRODUCTS_SHARE = 0.3, 0.15
"""Of the time; the rest is for collectives."""
MOST_TIMES = 1.5
"""As long as was asked for: until then every pair is measured once."""
TIMEOUT_SECONDS = 120.0


def main(arguments: Sequence[str]) -> None:
    """Measure, and write what was found to the file that the first argument names."""
    out = Path(arguments[0])
    seconds = float(arguments[1]) if len(arguments) > 1 else SECONDS
    try:
        here = ranks(timeout_seconds=TIMEOUT_SECONDS)
        found = measure(here, seconds=seconds)
    except (FlatoutError, RuntimeError) as error:  # torch.distributed's errors are RuntimeErrors
        said = str(error) if isinstance(error, FlatoutError) else describe_error(error)
        raise SystemExit(f"preflight: {said}") from error
    if here.local_rank == 0:
        with written_whole(out) as temporary:
            temporary.write_text(json.dumps(asdict(found)), encoding="utf-8")


def measure(here: Ranks, *, seconds: float = SECONDS, sizes: Sequence[int] = SIZES) -> Timings:
    """On every rank: what all of them measured. A rank that is alone has nothing to send to."""
    timer = _Timer(here, seconds)
    products, threads = timer.products()
    collectives: tuple[CollectiveTiming, ...] = ()
    pairs: dict[tuple[int, int], PairTiming] = {}
    missing = "there is one rank"
    if here.count > 1:
        collectives = timer.collectives(sizes)
        products += timer.products()[0]
        pairs, missing = timer.pairs(collectives)
    products += timer.products()[0]
    own = RankTiming(
        rank=here.rank,
        machine=int(here.local_rank == 0),  # whether it is the first one there, until the machines are numbered
        host=socket.gethostname(),
        device=_device_name(here),
        threads=threads,
        product_seconds=tuple(products),
    )
    gathered = [(own, pairs)]
    if here.count > 1:
        from torch import distributed

        from flatout.parallel.tensor.parts import Across

        assert distributed.group.WORLD is not None, "there are several ranks"
        gathered = Across(distributed.group.WORLD).of_all((own, pairs))
    machines = accumulate(one.machine for one, _ in gathered)  # launchers number the ranks machine by machine
    both = {pair: timing for _, some in gathered for pair, timing in some.items()}
    numbered = [replace(one, machine=max(number - 1, 0)) for (one, _), number in zip(gathered, machines, strict=True)]
    return Timings(
        backend=_backend(here),
        ranks=tuple(numbered),
        collectives=collectives,
        pairs=tuple(both[pair] for pair in sorted(both)),
        pairs_missing=missing,
        seconds=timer.elapsed(),
    )


class _Timer:
    """Measures with the other ranks."""

    def __init__(self, here: Ranks, seconds: float) -> None:
        self._here, self._seconds = here, seconds
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        """Since the beginning, the same on all ranks."""
        return self._agreed(time.perf_counter() - self._start)

    def products(self) -> tuple[list[float], int]:
        """(samples of a matrix product that all ranks compute at the same time, threads)."""
        import torch

        device = self._here.device
        threads = round(-self._agreed(-torch.get_num_threads()))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            on_gpu = device.type == "cuda"
            size, calls = (4096, 4) if on_gpu else (512, 1)
            a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
            for _ in range(3):
                once = self._agreed(self._timed(lambda: a @ a, calls))
            count = _between(self._seconds * PRODUCTS_SHARE / ROUNDS / (once * calls), 3, PRODUCT_SAMPLES)
            samples = []
            for _ in range(count):
                self._agreed(0.0)  # together
                samples.append(self._timed(lambda: a @ a, calls))
        finally:
            torch.set_num_threads(before)
        return samples, threads

    def collectives(self, sizes: Sequence[int]) -> tuple[CollectiveTiming, ...]:
        """The small sizes of all of them first, so that a slow network leaves out the largest."""
        deadline = self._seconds * (1 - PAIRS_SHARE)
        cells = [(size, name) for size in sorted(sizes) for name in COLLECTIVES]
        found: dict[str, list[SizeTiming]] = {name: [] for name in COLLECTIVES}
        missing = dict.fromkeys(COLLECTIVES, "")
        for number, (size, name) in enumerate(cells):
            left = deadline - self.elapsed()
            last = found[name][-1] if found[name] else None
            expected = 0.0 if last is None else 2 * last.median_seconds * size / last.size_bytes
            if missing[name] or (last is not None and expected > left):
                missing[name] = (
                    missing[name] or f"{format_bytes(size)} and more would take longer than the time that is left"
                )
                continue
            # Half of an equal share: the larger sizes that follow need more.
            found[name].append(self._cell(name, size, max(left, 0.0) / (len(cells) - number) / 2))
        return tuple(
            CollectiveTiming(name=name, sizes=tuple(timings), missing=missing[name]) for name, timings in found.items()
        )

    def _cell(self, name: str, size: int, budget_seconds: float) -> SizeTiming:
        import torch
        from torch import distributed

        call, size_bytes = _collective(name, size, self._here)
        call()  # connections are made by the first one
        once = max(self._agreed(self._timed(call, 1)), 1e-7)
        calls = _between(LEAST_SAMPLE_SECONDS / once, 1, 50)
        count = _between(budget_seconds / (once * calls), 3 if once < budget_seconds else 1, MOST_SAMPLES)
        samples = torch.zeros(count, dtype=torch.float64, device=self._here.device)
        for number in range(count):
            self._agreed(0.0)
            samples[number] = self._timed(call, calls)
        distributed.all_reduce(samples, distributed.ReduceOp.MAX)
        return SizeTiming(size_bytes=size_bytes, samples_seconds=tuple(samples.tolist()))

    def pairs(self, collectives: Sequence[CollectiveTiming]) -> tuple[dict[tuple[int, int], PairTiming], str]:
        """(those of which this rank is the first, why others are missing): one pair after the other."""
        count = self._here.count
        if count > MOST_PAIRED_RANKS:
            return {}, f"{count} ranks are {count * (count - 1) // 2} pairs; up to {MOST_PAIRED_RANKS} ranks are paired"
        every = list(combinations(range(count), 2))
        each_seconds = self._seconds * PAIRS_SHARE / len(every) / ROUNDS
        large = _large_bytes(collectives, each_seconds)
        samples: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        measured = 0
        for pair in every * ROUNDS:
            first_round = measured < len(every)
            until = self._seconds * (MOST_TIMES if first_round else 1)
            if measured and self.elapsed() > until:
                break
            if self._here.rank in pair:
                small_seconds, large_seconds = samples.setdefault(pair, ([], []))
                small_seconds += self._there_and_back(pair, SMALL_BYTES, 5, each_seconds)
                large_seconds += self._there_and_back(pair, large, 1, each_seconds)
            measured += 1
            self._agreed(0.0)  # the others wait, so that nothing else is sent
        found = {
            pair: PairTiming(
                ranks=pair,
                small_bytes=SMALL_BYTES,
                small_seconds=tuple(small_seconds),
                large_bytes=large,
                large_seconds=tuple(large_seconds),
            )
            for pair, (small_seconds, large_seconds) in samples.items()
            if pair[0] == self._here.rank
        }
        if measured < len(every):
            return found, f"{measured} of {len(every)} pairs were measured when the time was up"
        return found, ""

    def _there_and_back(self, pair: tuple[int, int], size: int, calls: int, budget_seconds: float) -> list[float]:
        import torch

        first = self._here.rank == pair[0]
        other = pair[1] if first else pair[0]
        tensor = torch.zeros(size, dtype=torch.uint8, device=self._here.device)

        def there_and_back() -> None:
            _pass_on(tensor, other, sends=first)
            _pass_on(tensor, other, sends=not first)

        there_and_back()
        once = max(self._timed(there_and_back, calls) * calls, 1e-7)
        count = torch.tensor(_between(budget_seconds / once, FEWEST_PAIR_SAMPLES, PAIR_SAMPLES))
        count = count.to(self._here.device)
        _pass_on(count, other, sends=first)  # as many on both ranks
        return [self._timed(there_and_back, calls) / 2 for _ in range(int(count))]

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one call."""
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self._here.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._here.device)

    def _agreed(self, value: float) -> float:
        """The largest of all ranks' values, when all ranks are there."""
        if self._here.count == 1:
            return value
        import torch
        from torch import distributed

        tensor = torch.tensor(value, dtype=torch.float64, device=self._here.device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return float(tensor)


def _large_bytes(collectives: Sequence[CollectiveTiming], each_seconds: float) -> int:
    """How large a message a pair can send often enough in about so many seconds, judged by a broadcast, which takes
    at least as long as a message over the slowest link."""
    sizes = {
        size.size_bytes: size.median_seconds for one in collectives if one.name == "broadcast" for size in one.sizes
    }
    if not sizes:
        return LARGE_BYTES[-1]
    for large in LARGE_BYTES:
        near = min(sizes, key=lambda size: abs(math.log(size / large)))
        # Twice the time: most links are faster than the slowest.
        if 2 * (FEWEST_PAIR_SAMPLES + 2) * sizes[near] * large / near <= 2 * each_seconds:
            return large
    return LARGE_BYTES[-1]


def _collective(name: str, size: int, here: Ranks) -> tuple[Callable[[], object], int]:
    """(a call of it on a tensor of about `size` bytes, its exact bytes): every rank has an equal part."""
    import torch
    from torch import distributed

    from flatout.parallel.tensor.parts import all_gather

    part = -(-size // 4 // here.count)
    whole: Tensor = torch.zeros(part * here.count, device=here.device)
    own = torch.zeros(part, device=here.device)
    # Renamed in torch 2.13; getattr, because the types of older versions lack the new name.
    scatter: Callable[[Tensor, Tensor], object] = (
        getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    )
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, own),
        "reduce_scatter": lambda: scatter(own, whole),
        "broadcast": lambda: distributed.broadcast(whole, 0),
    }
    return calls[name], whole.nbytes


def _pass_on(tensor: Tensor, other: int, *, sends: bool) -> None:
    """As a batch of one: NCCL would else open a communicator for each pair."""
    from torch import distributed

    operation = distributed.P2POp(distributed.isend if sends else distributed.irecv, tensor, other)
    for work in distributed.batch_isend_irecv([operation]):
        work.wait()


def _device_name(here: Ranks) -> str:
    import torch

    return torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else "cpu"


def _backend(here: Ranks) -> str:
    if here.count == 1:
        return "none"
    return "nccl" if here.device.type == "cuda" else "gloo"


def _between(value: float, low: int, high: int) -> int:
    return min(max(int(value), low), high)


if __name__ == "__main__":
    main(sys.argv[1:])
