"""The C++ kernels: built on first use, cached on disk, and replaced by torch's own where they cannot be built.

The sources include nothing of torch's, so a build takes some seconds and fits every torch; they are reached through
their C functions. A build is for one kind of processor, so its name includes a hash of the processor's instructions and
the sources: a home directory shared by different machines holds one for each.

A library that is loaded runs with all rights of this process. So it is loaded only from a folder that no one else can
write, and only if it has the checksum that was recorded when it was built: a truncated library would end the process
with SIGBUS. One that fails the checksum is built again; a folder that others can write is refused, with the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flatout.environment import cpp_compiler
from flatout.errors import MachineError
from flatout.kernels.own_folder import Refused, check_ours, own_folder

SOURCES = Path(__file__).parent / "native_sources"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
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
        folder = own_folder("native")
        kept = _kept(folder, name)
        if kept is not None:
            return Native(library=ctypes.CDLL(str(kept)), reason=str(kept))
    except Refused as error:
        return Native(library=None, reason=str(error))
    except OSError:  # whole, but the system cannot load it (another C library, say): build it again
        pass
    return _fresh(name)


def library_or_error(name: str = "decoder") -> ctypes.CDLL:
    """The native library; MachineError with the reason where there is none."""
    found = native(name)
    if found.library is None:
        remedy = "install a C++ compiler (g++, or set CXX)"
        raise MachineError(f"the native kernels are not available: {found.reason}", remedy=remedy)
    return found.library


def _fresh(name: str) -> Native:
    """Built now, whatever is kept."""
    command = cpp_compiler()
    try:
        compiler = shlex.split(command)  # CXX="g++ -m64" and CXX="ccache g++" are commands with arguments
    except ValueError as error:
        return Native(library=None, reason=f"CXX is {command!r}: {error}")
    if not compiler or shutil.which(compiler[0]) is None:
        return Native(library=None, reason=f"there is no C++ compiler {command!r}")
    try:
        built = _built(own_folder("native"), name, compiler)
        return Native(library=ctypes.CDLL(str(built)), reason=str(built))
    except Refused as error:
        return Native(library=None, reason=str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(library=None, reason=f"{command} did not build it: {_last_line(error)}")


def _kept(folder: Path, name: str) -> Path | None:
    """A whole build of these sources for this processor; None: there is none. No compiler is needed for it.

    A record, named by what was built, holds the checksum, which is also in the library's name: whoever builds the same
    meanwhile, to other bytes, never overwrites what this record speaks of.
    """
    record = folder / f"{name}-{_key(name)}"
    try:
        check_ours(record)
        checksum = record.read_text().strip()
        library = folder / f"{record.name}-{checksum[:16]}.so"
        check_ours(library)
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == checksum
    except Refused:
        raise
    except (OSError, UnicodeDecodeError):
        return None
    return library if whole else None


def _built(folder: Path, name: str, compiler: list[str]) -> Path:
    record = folder / f"{name}-{_key(name)}"
    # Built beside its place and moved there whole: another process may build the same, or load it right now.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as place:
        made = Path(place, "made.so")
        command = [*compiler, *_FLAGS, *_tuning(), str(SOURCES / f"{name}.cpp"), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
        checksum = hashlib.sha256(made.read_bytes()).hexdigest()
        note = Path(place, "record")
        note.write_text(checksum)
        made.chmod(0o500)
        note.chmod(0o400)
        library = folder / f"{record.name}-{checksum[:16]}.so"
        os.replace(made, library)
        os.replace(note, record)  # after the library: a record always speaks of a whole one
    return library


def _key(name: str) -> str:
    """Of the sources, the flags and the processor. Not of the compiler: what another one built is as good."""
    text = "".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h"))
    parts = [name, text, processor(), *_FLAGS, *_tuning()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _tuning() -> list[str]:
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
