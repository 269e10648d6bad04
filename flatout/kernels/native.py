"""The C++ kernels: built on first use, cached on disk, and replaced by torch's own where they cannot be built.

The sources include nothing of torch's, so a build takes some seconds and fits every torch; they are reached through
their C functions. A build is for one kind of processor, so its name includes a hash of the processor's instructions and
the sources: a home directory shared by different machines holds one for each.

A library that is loaded runs with all rights of this process. So it is loaded only from a folder that no one else can
write, and only if it has the checksum that was recorded when it was built: a truncated library would end the process
with SIGBUS. One that fails the checksum is built again; a folder that others can write is refused, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flatout.environment import cpp_compiler
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.kernels.own_folder import keep_library, kept_library, own_folder

SOURCES = Path(__file__).parent / "native_sources"
_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w"),
)
_BUILD_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class Native:
    """The loaded library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """Where it was built, or why it was not."""


@functools.cache
def native(name: str = "decoder") -> Native:
    """The library of this name; built if there is no build of these sources for this processor."""
    try:
        record = own_folder("native") / f"{name}-{_key(name)}"
        kept = kept_library(record)
    except OSError as error:
        return Native(library=None, reason=str(error))
    if kept is not None:
        with contextlib.suppress(OSError):  # the system cannot load it (another C library, say): build it again
            return Native(library=ctypes.CDLL(str(kept[0])), reason=str(kept[0]))
    return _fresh(name, record)


def library_or_error(name: str = "decoder") -> ctypes.CDLL:
    """The native library; MachineError with the reason where there is none."""
    found = native(name)
    if found.library is None:
        remedy = "install a C++ compiler (g++, or set CXX)"
        raise MachineError(f"the native kernels are not available: {found.reason}", remedy=remedy)
    return found.library


def _fresh(name: str, record: Path) -> Native:
    """Built now, whatever is kept."""
    try:
        command = cpp_command()
    except FlatoutError as error:
        return Native(library=None, reason=error.what)
    try:
        with tempfile.TemporaryDirectory(dir=record.parent, prefix=".build-") as place:
            made = Path(place, "made.so")
            command += [*_FLAGS, *processor_flags(), str(SOURCES / f"{name}.cpp"), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
            built = keep_library(made, record)
        return Native(library=ctypes.CDLL(str(built)), reason=str(built))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(library=None, reason=f"{cpp_compiler()} did not build it: {_last_line(error)}")


def cpp_command() -> list[str]:
    """The C++ compiler's command, with its arguments. MachineError: there is none."""
    command = cpp_compiler()
    try:
        words = shlex.split(command)  # CXX="g++ -m64" and CXX="ccache g++" are commands with arguments
    except ValueError as error:
        raise UsageError(f"CXX is {command!r}: {error}", limit="it is a command") from error
    if not words or shutil.which(words[0]) is None:
        limit = "kernels are built with g++ or clang++"
        remedy = "apt install g++ (or the package of your system), or name a compiler in CXX"
        raise MachineError(f"there is no C++ compiler {command!r}", limit=limit, remedy=remedy)
    return words


def _key(name: str) -> str:
    """Of the sources, the flags and the processor. Not of the compiler: what another one built is as good."""
    text = "".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h"))
    parts = [name, text, processor(), *_FLAGS, *processor_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor_flags() -> list[str]:
    """Flags for all instructions of this processor."""
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def processor() -> str:
    """What code for this processor depends on: its kind and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{sys.platform} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "cpu family", "model")
    firsts = {line.partition(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(firsts.get(name, "") for name in wanted)


def _last_line(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {_BUILD_SECONDS} s"
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(text).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [type(error).__name__])[0].strip()
