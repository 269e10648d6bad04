"""The C++ kernels: built on first use, kept for the next process, and replaced by torch's own where they cannot be.

The sources include nothing of torch's, so a build takes some seconds and fits every torch; they are reached through
their C functions. What is built is for this very processor, so its name holds the processor's instructions, the
compiler's version and the sources: a home directory shared by unlike machines keeps one for each.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flatout.environment import cache_dir, cpp_compiler

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
    """The library of this name; built if no build of these very sources for this processor is there."""
    compiler = cpp_compiler()
    found = shutil.which(compiler)
    if found is None:
        return Native(library=None, reason=f"there is no C++ compiler {compiler!r}")
    try:
        built = _built(name, found)
        return Native(library=ctypes.CDLL(str(built)), reason=str(built))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(library=None, reason=f"{compiler} did not build it: {_last_line(error)}")


def _built(name: str, compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    text = "".join(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h"))
    machine = _tuning()
    key = hashlib.sha256("\0".join([text, version, _processor(), *_FLAGS, *machine]).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"{name}-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole: another process may build the same, or load it right now.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made = Path(folder, target.name)
        command = [compiler, *_FLAGS, *machine, str(SOURCES / f"{name}.cpp"), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
        os.replace(made, target)
    return target


def _tuning() -> list[str]:
    """How the compiler is told to use all that this processor has."""
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def _processor() -> str:
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
    told = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(told).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [type(error).__name__])[0].strip()
