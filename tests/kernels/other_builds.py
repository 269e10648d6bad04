"""The kernels as they are built for other processors."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import CDLL
from pathlib import Path
from types import ModuleType

import pytest

from flatout.environment import cpp_compiler
from flatout.kernels.native import SOURCES


@contextlib.contextmanager
def other_builds(
    names: Sequence[str], modules: Sequence[ModuleType], folder: Path, flags: Sequence[str] = ()
) -> Iterator[None]:
    """`modules` call builds of these libraries for the compiler's `flags` until the context ends: plain C++ by default,
    as for a processor without vectors of bf16."""

    def built(name: str) -> CDLL:
        made = folder / f"{name}.so"
        shared = ["-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared"]
        command = [*cpp_compiler().split(), *shared, *flags, str(SOURCES / f"{name}.cpp"), "-o", str(made)]
        subprocess.run(command, check=True, timeout=180)
        return CDLL(str(made))

    kept = {name: built(name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "library_or_error", kept.__getitem__)
        yield
