"""`flatout.kernels.load`: a user's C++ and CUDA sources, built once and loaded.

ops = flatout.kernels.load("rms_norm.cpp")                       # what TORCH_LIBRARY or PYBIND11_MODULE defines
scale = flatout.kernels.load(SOURCE, functions=["scale"]).scale  # a text, of which functions are bound
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from flatout.errors import FlatoutError, UsageError
from flatout.kernels.custom import doctor
from flatout.kernels.custom.extension_build import Build, Unit, built, key_of, tell_watchers

CPP, CUDA = (".cpp", ".cc", ".cxx", ".c++"), (".cu",)


def load(
    *sources: str | os.PathLike[str],
    functions: Sequence[str] = (),
    name: str = "",
    cxx_flags: Sequence[str] = (),
    cuda_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
) -> ModuleType:
    """Build C++ or CUDA sources, or find their last build, and load them.

    sources: files (.cpp, .cu), or source text; a text with `__global__` in it is CUDA. functions: those of the last
    source to call from Python, where the source itself binds none. name: the extension's, by default that of its first
    file. Flags are added to Flatout's own (-O3 -march=native). Neither ninja nor setuptools is needed.

    Returns a module with the functions; where the sources register operators with TORCH_LIBRARY(name, ...), that is
    `torch.ops.name` (of the first name, if there are several). UsageError: the sources do not compile, with the
    compiler's first error and its likely cause. MachineError: this machine lacks something that building needs.
    """
    if not sources:
        raise UsageError("there are no sources", limit="kernels.load takes files or source text")
    units = tuple(_unit(one) for one in sources)
    build = Build(
        name=_name(name, units),
        units=units,
        functions=_strings(functions, "functions", limit="it is a list of names"),
        cxx_flags=_strings(cxx_flags, "cxx_flags"),
        cuda_flags=_strings(cuda_flags, "cuda_flags"),
        link_flags=_strings(link_flags, "link_flags"),
        include_dirs=tuple(str(Path(one).resolve()) for one in include_dirs),
    )
    try:
        key = key_of(build)
        if key not in _loaded:
            _loaded[key] = _imported(build, built(build, key))
            tell_watchers("loaded", build.name)
        return _loaded[key]
    except FlatoutError:
        tell_watchers("failed", build.name)
        raise


_loaded: dict[str, ModuleType] = {}


# what was asked for


def _unit(source: str | os.PathLike[str]) -> Unit:
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"a source is {source!r}"[:120], limit="it is a file's path or source text")
    text = os.fspath(source)
    if isinstance(source, str) and "\n" in source:
        return Unit(name="source", text=source, file=None, is_cuda="__global__" in source)
    file = Path(text)
    if file.suffix not in (*CPP, *CUDA):
        limit = f"a source is a file ({', '.join((*CPP, *CUDA))}) or a text of several lines"
        raise UsageError(f"a source is {text!r}"[:120], limit=limit)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        remedy = f"looked in {Path.cwd()}; name it from the file that loads it: Path(__file__).with_name({file.name!r})"
        raise UsageError(f"cannot read {text}: {said}", remedy=remedy) from error
    return Unit(name=file.stem, text=content, file=file.resolve(), is_cuda=file.suffix in CUDA)


def _name(name: str, units: Sequence[Unit]) -> str:
    files = [one.name for one in units if one.file is not None]
    found = name or re.sub(r"\W", "_", files[0] if files else "kernel")
    if not found.isidentifier():
        raise UsageError(f"name is {name!r}", limit="it is a Python identifier", remedy="name='my_kernel'")
    return found


def _strings(value: Sequence[str], name: str, *, limit: str = "it is a list of flags") -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{name} is {value!r}"[:120], limit=limit)
    return tuple(value)


# the library


def _imported(build: Build, library: Path) -> ModuleType:
    try:
        if build.is_python_module:
            loader = importlib.machinery.ExtensionFileLoader(build.name, str(library))
            spec = importlib.util.spec_from_loader(build.name, loader)
            assert spec, "a loader is given"
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            return module
        torch.ops.load_library(str(library))
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error.__cause__ or error)  # torch's own error hides what the system said
        cause = doctor.cause_of_import(said, torch.__version__)
        what = f"{build.name} was built, but cannot be loaded: {said.splitlines()[0]}"
        raise UsageError(what, limit=f"likely cause: {cause.what}", remedy=cause.remedy) from error
    if not build.namespaces:
        cause = doctor.cause_of_import("PyInit_", torch.__version__)
        raise UsageError(f"{build.name} was built, but {cause.what}", remedy=cause.remedy)
    namespace = getattr(torch.ops, build.namespaces[0])
    assert isinstance(namespace, ModuleType), "torch's namespaces are modules"
    return namespace
