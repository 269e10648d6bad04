"""Builds an extension by calling the compilers directly, and keeps what was built in Flatout's cache.

A build is found again by its sources (with the headers that they include), flags, and the versions of torch and Python.
Processes that want the same build wait for the first one; a lock ends with its process, so none is ever left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from flatout import environment
from flatout.errors import MachineError, UsageError
from flatout.file_locks import lock_now
from flatout.kernels.custom import doctor, sanitizer
from flatout.kernels.native import cpp_command, processor, processor_flags
from flatout.kernels.own_folder import Refused, checksum, keep_library, kept_library, own_folder

FOLDER = "extensions"
BUILD_SECONDS = 1800
_LIBRARY = re.compile(r"^\s*(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT)?\s*\(\s*(\w+)", re.MULTILINE)

Stage = Literal["building", "built", "loaded", "failed"]
_watchers: list[Callable[[Stage, str], None]] = []


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One source: a file, or a text."""

    name: str
    text: str
    file: Path | None
    is_cuda: bool

    @property
    def own_code(self) -> str:
        """For the compiler: a file is included, so that its messages name it and its own includes are found."""
        return self.text if self.file is None else f'#include "{self.file}"\n'


@dataclass(frozen=True, kw_only=True)
class Build:
    """All that decides what is made."""

    name: str
    units: tuple[Unit, ...]
    functions: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    include_dirs: tuple[str, ...]

    @property
    def uses_cuda(self) -> bool:
        return any(one.is_cuda for one in self.units)

    @property
    def namespaces(self) -> list[str]:
        """Of the operators that the sources register."""
        return list(dict.fromkeys(name for one in self.units for name in _LIBRARY.findall(one.text)))

    @property
    def is_python_module(self) -> bool:
        return bool(self.functions) or any("PYBIND11_MODULE" in one.text or "PyInit_" in one.text for one in self.units)


@contextlib.contextmanager
def watched_builds(watcher: Callable[[Stage, str], None]) -> Iterator[None]:
    """Call `watcher(stage, name)` for every build meanwhile."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell_watchers(stage: Stage, name: str) -> None:
    for one in _watchers:
        one(stage, name)


def key_of(build: Build) -> str:
    parts = [repr(build), torch.__version__, sys.version, platform.machine(), environment.cpp_compiler()]
    parts += [str(environment.sanitizes_extensions()), environment.cuda_architectures(), *processor_flags()]
    parts.append(processor())  # the cache may be in a home directory that several machines share
    if build.uses_cuda:
        parts += [repr(torch.cuda.get_device_capability(number)) for number in range(torch.cuda.device_count())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def built(build: Build, key: str) -> Path:
    """The library; from the cache where it is there, whole, and nothing that went into it has changed."""
    try:
        folder = own_folder(FOLDER)
        record = folder / f"{build.name}-{key}"
        with _locked(folder / f".lock-{key[0]}"):  # 16 files in all, and two builds seldom share one
            return _kept(record) or _made(build, folder, record)
    except Refused as error:
        raise MachineError(str(error)) from error
    except OSError as error:
        remedy = "name another folder in FLATOUT_CACHE_DIR"
        what = f"cannot write to {environment.cache_dir() / FOLDER}: {error.strerror or error}"
        raise MachineError(what, remedy=remedy) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for whoever builds the same; the system frees the lock of a process that dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: at worst both build it
            end = time.monotonic() + BUILD_SECONDS
            while not lock_now(descriptor) and time.monotonic() < end:
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _kept(record: Path) -> Path | None:
    found = kept_library(record)
    if found is None:
        return None
    library, noted = found
    try:
        same = all(checksum(Path(file)) == before for file, before in noted["included"].items())
    except OSError:
        return None
    return library if same else None


def _made(build: Build, folder: Path, record: Path) -> Path:
    tell_watchers("building", build.name)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as place:
        made = _compiled(build, Path(place))
        included = {str(one): checksum(one) for one in _included(Path(place))}
        library = keep_library(made, record, included=included)
    tell_watchers("built", build.name)
    return library


def _included(place: Path) -> list[Path]:
    """The user's headers: the compiler's list leaves out those of torch and of the system."""
    words = " ".join(file.read_text().replace("\\\n", " ") for file in place.glob("*.d")).split()
    files = [Path(word) for word in words if not word.endswith(":")]
    return sorted({file for file in files if file.is_file() and place not in file.parents})


# the compiler


def _compiled(build: Build, place: Path) -> Path:
    """The shared library, made in the folder `place`."""
    cxx = cpp_command()
    nvcc = doctor.nvcc_command(torch.version.cuda) if build.uses_cuda else []
    commands = []
    for number, unit in enumerate(build.units):
        source = place / f"{unit.name}{number or ''}{'.cu' if unit.is_cuda else '.cpp'}"
        source.write_text(_code(build, unit, last=number == len(build.units) - 1), encoding="utf-8")
        flags = _cuda_flags(build) if unit.is_cuda else _cxx_flags(build)
        made = source.with_suffix(source.suffix + ".o")
        commands.append([*(nvcc if unit.is_cuda else cxx), *flags, "-c", str(source), "-o", str(made)])
    with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda command: _run(build, command, place), commands):
            pass
    library = place / "made.so"
    objects = [command[-1] for command in commands]
    _run(build, [*cxx, "-shared", *objects, "-o", str(library), *_link_flags(build)], place)
    return library


def _code(build: Build, unit: Unit, *, last: bool) -> str:
    if not (last and build.functions):
        return unit.own_code
    bound = "\n".join(f'  m.def("{one}", &{one});' for one in build.functions)
    return f"#include <torch/extension.h>\n{unit.own_code}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{bound}\n}}\n"


def _run(build: Build, command: list[str], place: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False, cwd=place)
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"{build.name} was not built after {BUILD_SECONDS} s", remedy="see what holds it up"
        ) from error
    if done.returncode == 0:
        return
    output = (done.stderr + done.stdout).replace(f"{place}/", "")
    cause = doctor.cause_of_build(output, torch.__version__)
    if done.returncode < 0 and cause is None:
        cause = doctor.Cause(what=f"the compiler was killed (signal {-done.returncode})", remedy="free up memory")
    whole = shlex.join(command) if cause is None else ""
    raise UsageError(
        f"{build.name} does not build: {doctor.first_error(output)}",
        limit=f"likely cause: {cause.what}" if cause else "the cause is unknown",
        remedy=cause.remedy if cause else f"run it by hand: {whole}",
    )


def _include_flags(build: Build) -> list[str]:
    """Headers of torch as those of the system: they are neither warned about nor watched for changes."""
    from torch.utils import cpp_extension

    system = [*cpp_extension.include_paths("cuda" if build.uses_cuda else "cpp"), sysconfig.get_paths()["include"]]
    own = [str(one.file.parent) for one in build.units if one.file is not None]
    flags = [word for folder in dict.fromkeys([*build.include_dirs, *own]) for word in ("-I", folder)]
    return flags + [word for folder in dict.fromkeys(system) for word in ("-isystem", folder)]


def _cxx_flags(build: Build) -> list[str]:
    own = ["-std=c++20", "-fPIC", "-w", "-MMD", f"-DTORCH_EXTENSION_NAME={build.name}"]
    speed = sanitizer.build_flags() if environment.sanitizes_extensions() else ("-O3", *processor_flags())
    return [*own, *speed, *_include_flags(build), *build.cxx_flags]


def _cuda_flags(build: Build) -> list[str]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = [torch.cuda.get_device_capability(one) for one in devices]
    own = ["-std=c++20", "-O3", "-w", "--expt-relaxed-constexpr", "-MMD", "-Xcompiler", "-fPIC"]
    named = [f"-DTORCH_EXTENSION_NAME={build.name}", "-DUSE_CUDA", "-ccbin", cpp_command()[0]]
    architectures = doctor.architecture_flags(environment.cuda_architectures(), capabilities)
    return [*own, *named, *architectures, *_include_flags(build), *build.cuda_flags]


def _link_flags(build: Build) -> list[str]:
    from torch.utils import cpp_extension

    folders = [f"-L{folder}" for folder in cpp_extension.library_paths("cuda" if build.uses_cuda else "cpp")]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
    libraries += ["-ltorch_python"] if build.is_python_module else []
    libraries += ["-lc10_cuda", "-ltorch_cuda", "-lcudart"] if build.uses_cuda else []
    sanitized = sanitizer.link_flags() if environment.sanitizes_extensions() else ()
    openmp = [flag for flag in build.cxx_flags if flag == "-fopenmp"]
    return [*folders, *libraries, *sanitized, *openmp, *build.link_flags]
