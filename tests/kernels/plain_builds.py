"""The kernels in plain C++, as for a processor without vectors of bf16."""

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
def plain_builds(names: Sequence[str], modules: Sequence[ModuleType], folder: Path) -> Iterator[None]:
    """`modules` call such builds of these libraries until the context ends."""

    def built(name: str) -> CDLL:
        made = folder / f"{name}.so"
        flags = ["-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared"]
        command = [*cpp_compiler().split(), *flags, str(SOURCES / f"{name}.cpp"), "-o", str(made)]
        subprocess.run(command, check=True, timeout=180)
        return CDLL(str(made))

    kept = {name: built(name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "library_or_error", kept.__getitem__)
        yield
