"""Seeds for trials: a script that seeds nothing is made repeatable, in the same way on both sides of a comparison.

Each global generator is seeded as soon as its library is imported, before the script's own seeds. What draws a
seed from the system or from the clock gets one from a counter instead: `numpy.random.default_rng()`, `RandomState()`,
`random.Random()`, `random.seed()`, `torch.seed()`, `torch.manual_seed(int(time.time()))`. The hash seed is fixed by
the trial's environment. What remains is a script that depends on the order of threads or processes, or on time.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TypeVar

from flatout.script.patches import ImportWatch
from flatout.tracebacks import is_users_file

T = TypeVar("T")

OURS = str(Path(__file__).resolve().parents[1])
UNSEEDED = 20_261_121
"""The seed of trials, until a script sets its own."""
APART = 1_000_003
"""Between the seeds that runs with neighbouring values of `moved` take from the counter."""
CLOCK_UNITS = (1, 10**3, 10**6, 10**9)
"""Seconds, and the units in which scripts use them as a seed."""
CLOCK_TOLERANCE_SECONDS = 3600.0


class TrialSeeds:
    """Makes the process repeatable. `unseeded` names the places in the script without a fixed seed."""

    def __init__(self, on_torch: Sequence[Callable[[ModuleType], object]] = (), moved: int = 0) -> None:
        """moved: is added to every seed, the script's own too: a repetition of the run with other random numbers."""
        self._on_torch, self._moved = on_torch, moved
        self._first = UNSEEDED + moved
        self._counter = itertools.count(UNSEEDED + APART * moved)
        self.unseeded: list[str] = []

    def install(self) -> None:
        """Seed Python's generator now, numpy's and torch's when they are imported; then call `on_torch`."""
        self._python()
        ImportWatch({"torch": self._torch, "numpy": self._numpy}).install()

    def install_late(self) -> None:
        """The same in a process that has run for a while, except for torch's generator: that begins with a fixed seed,
        and the script may have given it another one."""
        self._python()
        ImportWatch({"numpy": self._numpy}).install()

    def replacement(self, value: T, what: str) -> T | int:
        """`value` as a seed, moved; one from the counter where it is None, the time or the process id."""
        if value is None or _from_clock(value):
            return self._counted(what)
        return value + self._moved if isinstance(value, int) else value

    def _counted(self, what: str) -> int:
        self._note(what)
        return next(self._counter)

    def _note(self, what: str) -> None:
        caller = _caller()
        if caller is not None and f"{what} at {caller}" not in self.unseeded:
            self.unseeded.append(f"{what} at {caller}")

    def _python(self) -> None:
        random.seed(self._moved)
        original, shared = random.Random.seed, random._inst

        def seed(generator: random.Random, a: float | str | bytes | bytearray | None = None, version: int = 2) -> None:
            original(generator, self.replacement(a, "random"), version)

        random.Random.seed = seed  # type: ignore[method-assign, assignment]
        random.seed = lambda a=None, version=2: seed(shared, a, version)

    def _numpy(self, numpy: ModuleType) -> None:
        numpy.random.seed(self._first % 2**32)
        numpy.random.bit_generator.randbits = lambda bits: next(self._counter) % 2**bits
        legacy, modern = numpy.random.seed, numpy.random.default_rng
        numpy.random.seed = lambda seed=None: legacy(_numpy_seed(self.replacement(seed, "numpy.random.seed")))
        numpy.random.default_rng = lambda seed=None: modern(self.replacement(seed, "numpy.random.default_rng"))

    def _torch(self, torch: ModuleType) -> None:
        torch.manual_seed(self._first)
        original = torch.manual_seed

        def manual_seed(seed: object) -> object:
            return original(self.replacement(seed, "torch.manual_seed"))

        def from_system() -> int:
            seed = self._counted("torch.seed")
            original(seed)
            return seed

        for module in (torch, torch.random):
            setattr(module, "manual_seed", manual_seed)  # noqa: B010
            setattr(module, "seed", from_system)  # noqa: B010
        for callback in self._on_torch:
            callback(torch)


def _from_clock(value: object) -> bool:
    """Is it the current time in some unit, or the process id?"""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if value == os.getpid() and value > 1000:
        return True
    now = time.time()
    return any(abs(value / unit - now) < CLOCK_TOLERANCE_SECONDS for unit in CLOCK_UNITS)


def _numpy_seed(value: T) -> T | int:
    return value % 2**32 if isinstance(value, int) and value > UNSEEDED else value


def _caller() -> str | None:
    """The calling line of the script, 'train.py:12'; None for a library: it may need a temporary name, or seed what it
    makes right afterwards."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    if frame is None or not is_users_file(frame.f_code.co_filename):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
