"""AddressSanitizer: how to build and run an extension under it, and how to read what it says.

It knows the bounds of every piece of memory, torch's tensors among them, and stops at the first access outside of them,
whether it reads or writes. Only code that is built with it is watched: the user's, not torch's.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.kernels.native import cpp_command
from flatout.tracebacks import is_users_file

ELF = b"\x7fELF"
_REGION = re.compile(
    r"is located (?P<far>\d+) bytes (?P<side>to the right of|to the left of|after|before) (?P<size>\d+)-byte region"
)
_FRAME = re.compile(r"^\s*#\d+ 0x\w+ in (?P<function>.+?) (?P<file>/\S+?):(?P<line>\d+)", re.MULTILINE)


def build_flags() -> tuple[str, ...]:
    shared = ("-shared-libasan",) if _is_clang() else ()
    return ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address", *shared)


def link_flags() -> tuple[str, ...]:
    return ("-fsanitize=address", "-shared-libasan") if _is_clang() else ("-fsanitize=address",)


def runtime() -> tuple[str | None, str]:
    """(the library that a process has to be started with, why there is none)."""
    if sys.platform != "linux":
        return None, "AddressSanitizer is used on Linux only"
    try:
        command = cpp_command()
    except FlatoutError as error:
        return None, error.what
    names = (
        [f"libclang_rt.asan-{platform.machine()}.so"] if _is_clang() else ["libasan.so", "libasan.so.8", "libasan.so.6"]
    )
    for name in names:
        found = Path(_said_by([*command, f"-print-file-name={name}"]).strip())
        if found.is_absolute() and found.is_file() and found.read_bytes().startswith(ELF):  # else it is a linker script
            return str(found.resolve()), ""
    return None, f"{command[0]} comes without AddressSanitizer's library ({names[0]}): install libasan"


@functools.cache
def _is_clang() -> bool:
    return "clang" in _said_by([*cpp_command(), "--version"]).lower()


def _said_by(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def read_report(errors: str) -> str | None:
    """In one sentence: what, where in the source, how far outside. None: it did not stop the process."""
    head = re.search(r"ERROR: AddressSanitizer:? (?P<what>[\w-]+)", errors)
    if head is None:
        return None
    access = re.search(r"^(READ|WRITE) of size (\d+)", errors, re.MULTILINE)
    does = "fails"
    if access is not None:
        does = f"{'reads' if access[1] == 'READ' else 'writes'} {access[2]} bytes outside of its memory"
    line, where = _source_line(errors), ""
    if region := _REGION.search(errors):
        side = "before" if region["side"] in ("to the left of", "before") else "after"
        far = "right" if region["far"] == "0" else f"{region['far']} bytes"
        where = f", {far} {side} a block of {region['size']} bytes"
    return f"{does}{f' at {line}' if line else ''}{where} (AddressSanitizer: {head['what']})"


def _source_line(errors: str) -> str | None:
    """The first frame in a source file that is neither torch's nor the system's: 'scale.cpp:12, in scale'."""
    for match in _FRAME.finditer(errors):
        if is_users_file(match["file"]) and not match["file"].startswith("/usr/"):
            function = re.split(r"[(<]", match["function"])[0]
            return f"{Path(match['file']).name}:{match['line']}, in {function}"
    return None
