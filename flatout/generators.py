"""The states of all random number generators: Python's, numpy's, torch's on the CPU and on every CUDA device.

A library that was not imported and a device that was not initialised have drawn no numbers: they are left alone.

    states = generator_states()
    ...
    set_generators(states)             # the same numbers come again
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from flatout.errors import UsageError

States: TypeAlias = dict[str, Any]  # by library, each of its own kind
ReadStates: TypeAlias = Mapping[str, Any]  # as above


def generator_states() -> States:
    """What to pass to `set_generators` to draw the same numbers again. Takes about 30 µs."""
    return {**torch_generator_states(), **other_generator_states()}


def other_generator_states() -> dict[str, object]:
    """All but torch's: what `torch.utils.checkpoint` does not put back by itself."""
    states: dict[str, object] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return states


def torch_generator_states() -> dict[str, object]:
    """Only torch's, which models draw from: 1 µs on the CPU, cheap enough for every step."""
    import torch

    states: dict[str, object] = {"torch": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_generators(states: ReadStates) -> None:
    """Raise UsageError if `set_generators` would fail; tried on new generators."""
    import torch

    try:
        random.Random().setstate(states["python"])
        torch.Generator().set_state(states["torch"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        what = f"the states of the random number generators do not fit: {error}"
        raise UsageError(what, remedy="pass generators=False to leave the generators as they are") from error


def set_generators(states: ReadStates) -> None:
    """Set every generator in `states` to its state there. CUDA devices that this machine lacks are skipped."""
    import torch

    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        for index, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)


def seed_generators(seed: int) -> None:
    """Seed all of them; `seed` is below 2^63."""
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


@contextlib.contextmanager
def generators_kept() -> Iterator[Callable[[], bool]]:
    """Put their states back at the end; yields a function that says whether any number was drawn."""
    before = generator_states()
    try:
        yield lambda: drawn_since(before)
    finally:
        set_generators(before)


@contextlib.contextmanager
def undrawn_on_failure() -> Iterator[ReadStates]:
    """If the block raises, put the states back, as if nothing had been drawn. Yields the states before."""
    before = generator_states()
    try:
        yield before
    except BaseException:
        set_generators(before)
        raise


def drawn_since(states: ReadStates) -> bool:
    """Was any number drawn since the generators were in these states?"""
    return not _same(states, generator_states())


def _same(a: object, b: object) -> bool:
    """Keys that only `b` has (numpy was imported in between) are ignored."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return all(_same(one, other) for one, other in zip(a, b, strict=True))
    equal: object = a == b
    over_all = getattr(equal, "all", None)  # of arrays and tensors
    return bool(equal if over_all is None else over_all())
