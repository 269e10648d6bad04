"""Operations that torch lacks, one file an operation; and tools for a user's own kernels.

flatout.kernels.load("rms_norm.cpp")       builds C++ and CUDA sources, and loads them
flatout.kernels.check("rms_norm.py")       checks a kernel against its reference, and times it
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.kernels.custom.extension import load
    from flatout.kernels.custom.parent import check
    from flatout.kernels.custom.result import KernelCheck, KernelFailure, KernelProperty, KernelSpeed

__all__ = ["KernelCheck", "KernelFailure", "KernelProperty", "KernelSpeed", "check", "load"]

_HOMES = {
    "KernelCheck": "flatout.kernels.custom.result",
    "KernelFailure": "flatout.kernels.custom.result",
    "KernelProperty": "flatout.kernels.custom.result",
    "KernelSpeed": "flatout.kernels.custom.result",
    "check": "flatout.kernels.custom.parent",
    "load": "flatout.kernels.custom.extension",
}


if not TYPE_CHECKING:  # type checkers have the imports above, and are to report any other name

    def __getattr__(name: str) -> object:
        """Load a public name's module when the name is first used: the operations need none of them."""
        if name not in _HOMES:
            raise AttributeError(f"module 'flatout.kernels' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
