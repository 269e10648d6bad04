"""Seeds an unseeded script: every generator it may draw from, at the moment its module has been imported.

Put this folder on PYTHONPATH. Two runs of a script that sets no seed can then be compared line by line. The modules
are not imported here: a script that never imports torch must not pay for it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

SEED = 20_240_501

SEEDERS: dict[str, Callable[[Any], object]] = {
    "numpy": lambda numpy: numpy.random.seed(SEED),
    "torch": lambda torch: torch.manual_seed(SEED),
}


class SeedingFinder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find the module, and adds the seeding to the end of its execution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in SEEDERS or name in self.in_progress:
            return None
        self.in_progress.add(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            SEEDERS[name](module)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec

    def __init__(self) -> None:
        self.in_progress: set[str] = set()


random.seed(SEED)
sys.meta_path.insert(0, SeedingFinder())
