"""Seeds for trials: each generator gets one as soon as its library is there, and a script's own seeds come after."""

from __future__ import annotations

import random
from types import ModuleType

from flatout.script.describe import UNSEEDED
from flatout.script.patches import ImportWatch


def seed_in_trials(seed: int, on_torch: list[object]) -> ImportWatch:
    """Seed Python's generator now, numpy's and torch's when they are imported; then call each of `on_torch`."""
    random.seed(seed)

    def torch_imported(torch: ModuleType) -> None:
        torch.manual_seed(UNSEEDED + seed)
        for callback in on_torch:
            callback(torch)  # type: ignore[operator]

    return ImportWatch({"torch": torch_imported, "numpy": lambda numpy: numpy.random.seed((UNSEEDED + seed) % 2**32)})
