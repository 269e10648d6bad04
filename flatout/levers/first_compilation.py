"""A first compilation by torch.compile on a CPU: how long it takes, which of its steps can be skipped or overlapped,
and atomic writes of what it builds.

with in_our_cache(), headers_precompiled_meanwhile() as begin:
    begin()
    ...                         # whatever compiles for the CPU
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

from flatout.environment import compiled_headers, cpp_compiler, headers_are_compiled
from flatout.levers.kernels_together import compiled_together
from flatout.levers.lever import Value
from flatout.levers.observed import Observed
from flatout.replaced import replaced, settings_changed
from flatout.torch_private.compiler import (
    HEADER_FOLDER,
    HEADER_LOCKS,
    codecache,
    cpp_builder,
    inductor_settings,
    instruction_sets,
    precompile_headers,
)

COMPILE_SECONDS, COMPILE_SECONDS_AN_OPERATION, HEADERS_SECONDS = 6.0, 0.0055, 1.0
"""What a first compilation usually takes on two cores, and how much longer where its headers were never compiled on
this machine: most of that passes while the model is traced (`python -m benchmarks.search.compiling`). What it really
took is measured."""
EVALUATED_TOO = 0.5
"""How much longer where the loop also evaluates: that is another graph, without gradients."""
AGAIN_SECONDS, AGAIN_SHARE = 1.0, 0.06
"""In a later process, which finds the kernels in the cache: to load the compiler, and a share of the first compilation.
That benchmark measured 0.9 to 1.7 s, where this gives 1.4 to 2.1."""
USUAL_OPERATIONS = 500
"""Of a step, where they were not counted."""


@contextlib.contextmanager
def in_our_cache() -> Iterator[None]:
    """Build kernels together, and skip what a first compilation on a CPU need not do, or not twice; each of that takes
    as long as several kernels.

    Before its first kernel, inductor builds and loads libraries for the instruction sets of the processor (several on
    one with AMX), to see whether compiler and torch support them. It asks the processor in any case, and current torch
    supports them all; whether the compiler does is seen from its flags alone. And its precompiled headers are in the
    temporary directory, where a trial leaves nothing behind.

    Inductor assumes that an existing file is complete. A process killed while its compiler writes would leave a partial
    file to every later run, so files are renamed into place once they are complete.
    """
    folder, cpp = str(compiled_headers()), inductor_settings().cpp
    known = cpp.vec_isa_ok is None and platform.machine() in ("x86_64", "AMD64")
    with (
        settings_changed(cpp, vec_isa_ok=True if known else cpp.vec_isa_ok),
        settings_changed(codecache(), **{HEADER_FOLDER: folder, HEADER_LOCKS: os.path.join(folder, "locks")}),
        replaced(cpp_builder(), "run_compile_cmd", _named_when_whole),
        replaced(instruction_sets(), "check_build", _by_flags) if known else contextlib.nullcontext(),
        compiled_together(),
    ):
        yield


class _InstructionSet(Protocol):
    def build_arch_flags(self) -> str: ...


def _by_flags(check_build: Callable[[_InstructionSet, str], bool]) -> Callable[[_InstructionSet, str], bool]:
    def by_flags(instruction_set: _InstructionSet, code: str) -> bool:
        return _compiler_takes(instruction_set.build_arch_flags()) or check_build(instruction_set, code)

    return by_flags


@cache
def _compiler_takes(flags: str) -> bool:
    """A compiler that knows the flag of an instruction set also has its functions."""
    compiler = str(cpp_builder().get_cpp_compiler())
    command = [compiler, *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


@contextlib.contextmanager
def headers_precompiled_meanwhile() -> Iterator[Callable[[], None]]:
    """Yields a function that starts to precompile the headers of CPU kernels, if they never were: while the model is
    traced, because the first kernel would wait for them. Within `in_our_cache`."""
    threads: list[threading.Thread] = []

    def begin() -> None:
        if threads or headers_are_compiled() or not compiler_is_there():
            return
        threads.append(threading.Thread(target=_ignoring_errors, name="flatout-headers", daemon=True))
        threads[0].start()

    try:
        yield begin
    finally:
        for thread in threads:
            thread.join()  # their folder is about to change back


def _ignoring_errors() -> None:
    """What fails here fails again where a kernel needs it, and is reported there."""
    with contextlib.suppress(Exception):
        precompile_headers()


def _named_when_whole(run: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Inductor holds a lock for each product, so one name for an unfinished product is enough."""

    def run_compile_cmd(cmd_line: str, cwd: str) -> None:
        words = shlex.split(cmd_line)
        if "-o" not in words[:-1]:
            run(cmd_line, cwd)
            return
        place = words.index("-o") + 1
        whole = os.path.join(cwd, words[place])
        words[place] = partial = f"{whole}.partial"
        run(shlex.join(words), cwd)
        os.replace(partial, whole)

    return run_compile_cmd


def compiler_is_there() -> bool:
    """Is there a C++ compiler, without which torch.compile on the CPU does not work?"""
    return any(shutil.which(name) for name in (cpp_compiler(), "g++", "clang++", "c++"))


def seconds_to_compile_again(first_seconds: float) -> float:
    """In a later process, after a first compilation of that length; 0 where there was none."""
    return AGAIN_SECONDS + AGAIN_SHARE * first_seconds if first_seconds else 0.0


def usual_compile_seconds(observed: Observed, value: Value = "default") -> float:
    """Expected for a first compilation of the whole model or ('regional') of its repeated blocks, those of the same
    shapes once."""
    operations = USUAL_OPERATIONS if observed.operations_per_step is None else observed.operations_per_step
    if value == "regional":
        blocks = max(observed.modules, key=lambda module: module.repeated_blocks, default=None)
        if blocks is not None and blocks.repeated_blocks:
            operations = operations * blocks.block_shapes // blocks.repeated_blocks
    seconds = COMPILE_SECONDS + COMPILE_SECONDS_AN_OPERATION * operations
    if observed.breakdown_seconds.get("evaluation"):
        seconds *= 1 + EVALUATED_TOO
    on_cpu = not observed.device.startswith("cuda")
    return seconds + HEADERS_SECONDS * (on_cpu and not headers_are_compiled())
