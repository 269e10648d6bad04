"""The random generators of this process: torch's for the CPU, Python's and, where it is loaded, numpy's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def random_states_kept() -> Iterator[Callable[[], bool]]:
    """Put the generators back to where they were; yields a test for their having moved."""
    import torch

    saved = _states()
    try:
        yield lambda: not _same(saved, _states())
    finally:
        torch_state, python_state, numpy_state = saved
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)


def seed_all(seed: int) -> None:
    """Seed all of them; `seed` is below 2^63."""
    import torch

    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _states() -> tuple[Any, Any, Any]:
    import torch

    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None


def _same(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> bool:
    import torch

    if not torch.equal(a[0], b[0]) or a[1] != b[1]:
        return False
    if a[2] is None or b[2] is None:  # numpy was loaded meanwhile: nobody drew from it before
        return True
    return all(
        bool((one == other).all() if hasattr(one == other, "all") else one == other)
        for one, other in zip(a[2], b[2], strict=True)
    )
