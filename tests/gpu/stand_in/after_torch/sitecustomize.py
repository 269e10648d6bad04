"""Loads the host executor right after torch is imported, in every process of a command started by `./gpu`.

Fused attention has kernels of its own per architecture, which the executor does not know: they are switched off, so
that scaled_dot_product_attention takes its plain form. torch's profiler records operators and no kernels, as there is
no CUPTI, in whose absence it would end the process.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and adds a line after it."""

    searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self.searching:
            return None
        self.searching = True  # others may wait for torch too, as Flatout does in a script's ranks
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            ctypes.CDLL(os.environ["STAND_IN_EXECUTOR"], mode=ctypes.RTLD_GLOBAL)
            for kind in ("flash", "mem_efficient", "cudnn"):
                getattr(module.backends.cuda, f"enable_{kind}_sdp")(False)
            record_operators_alone(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def record_operators_alone(torch: ModuleType) -> None:
    profile = torch.autograd.profiler.profile
    original = profile.__init__

    def __init__(self: object, *args: object, **options: object) -> None:
        original(self, *args, **{**options, "use_device": None})

    profile.__init__ = __init__


if os.environ.get("STAND_IN_EXECUTOR"):
    sys.meta_path.insert(0, AfterTorch())
