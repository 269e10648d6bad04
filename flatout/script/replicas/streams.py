"""Random numbers of a rank: common to all ranks, except in its model and where it fetches samples.

Every rank starts from the same seed and runs the same lines, so the script's own draws (the order of the data, initial
weights, a random split) are the same everywhere, and the same as on one device. Dropout must not be: with equal masks
ranks would not act as one batch. So the calls of a model that trains, and the fetching of a rank's samples (random
crops), draw from a stream of the rank's own, seeded by the script's seed and the rank. The common stream does not see
these draws: if it did, ranks with shares of different sizes would draw different orders of the data from then on.

    with streams.own():          # the model is called
        ...
        with streams.common():   # the next indices are drawn while samples are fetched
            ...

On a GPU dropout draws from the GPU's generator, from which no order of data is drawn: that one is seeded by rank once.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping

from flatout.generators import ReadStates, States, generator_states, set_generators, torch_generator_states

APART = 0x9E3779B97F4A7C15
"""An odd constant that keeps the seeds of neighbouring ranks apart."""


class RandomStreams:
    """The two streams of one rank. `drew`: has anything been drawn from its own, on the CPU?"""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: States = {}
        self._common: dict[str, object] | None = None
        """While its own is in use."""
        self._gpu_seed: int | None = None
        self.drew = False

    @contextlib.contextmanager
    def own(self, *, python: bool = False) -> Iterator[None]:
        """python: the generators of Python and numpy too, from which a dataset may draw."""
        if self._common is not None:
            yield
            return
        self._seed_gpu()
        common = host_states(python=python)
        if missing := [name for name in common if name not in self._own]:
            self._own.update(self._fresh(missing))
        before = {name: self._own[name] for name in common}
        self._common = common
        set_generators(before)
        try:
            yield
        finally:
            now = host_states(python=python)
            self.drew = self.drew or not before["torch"].equal(now["torch"])
            self._own.update({name: now[name] for name in common})
            after, self._common = self._common or common, None  # `common` below may have drawn
            set_generators(after)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        """Inside of `own`: the common stream for a while."""
        common, self._common = self._common, None
        if common is None:
            yield
            return
        own = host_states(python="python" in common)
        set_generators(common)
        try:
            yield
        finally:
            self._common = {**common, **host_states(python="python" in common)}
            set_generators({name: own[name] for name in own if name in common})

    def seed_of_workers(self, seed: int) -> int:
        """From the seed of a loader's workers, one that differs by rank: equal random crops would not be one batch."""
        return (seed + self._rank * APART) % (1 << 63)

    def _fresh(self, names: list[str]) -> dict[str, object]:
        """The first states of its own stream, of the libraries in `names`."""
        import torch

        seed = (torch.initial_seed() + (self._rank + 1) * APART) % (1 << 63)
        found: dict[str, object] = {"torch": torch.Generator().manual_seed(seed).get_state()}
        if "python" in names:
            found["python"] = random.Random(seed).getstate()
        if "numpy" in names:
            found["numpy"] = sys.modules["numpy"].random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        return {name: found[name] for name in names}

    def _seed_gpu(self) -> None:
        """Also after the script has seeded it again."""
        import torch

        if not self._rank or not torch.cuda.is_initialized():
            return
        if torch.cuda.initial_seed() != self._gpu_seed:
            self._gpu_seed = (torch.cuda.initial_seed() + self._rank * APART) % (1 << 63)
            torch.cuda.manual_seed(self._gpu_seed)


def host_states(*, python: bool = True) -> dict[str, object]:
    """Of the generators on the host: what the ranks compare, and take from the first one where they differ. python:
    those of Python and numpy too."""
    states = generator_states() if python else torch_generator_states()
    return {name: state for name, state in states.items() if name != "cuda"}


def digest(states: ReadStates) -> int:
    """Equal where the states are, in every process."""
    found = hashlib.blake2b(digest_size=7)
    for name in ("python", "torch", "numpy"):
        if name in states:
            state = states[name]
            found.update(state.numpy().tobytes() if name == "torch" else repr(_plain(state)).encode())
    return int.from_bytes(found.digest(), "big")


def _plain(state: object) -> object:
    """With bytes for arrays: the text of a long one leaves most of it out."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    tobytes = getattr(state, "tobytes", None)
    return tobytes() if tobytes is not None else state
