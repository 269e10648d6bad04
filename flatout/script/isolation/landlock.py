"""Landlock: the kernel refuses this process, and all that it starts, to write outside given directories.

It needs no rights and cannot be lifted again. It sees every write, also one from C++ or from another program, but
answers with EACCES instead of calling us, and it knows nothing of chmod, chown, times and extended attributes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from flatout.errors import MachineError

from . import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_ASK_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE = 1 << 1
_REMOVE = 1 << 4 | 1 << 5  # a directory, a file
_MAKE = sum(1 << bit for bit in range(6, 13))  # device, directory, file, socket, pipe, block device, link
_REFER = 1 << 13  # move or link to another directory; since version 2
_TRUNCATE = 1 << 14  # since version 3
_SCOPES = 1 | 2  # abstract sockets of other programs, signals to them; since version 6


def restrict_writes(writable: Sequence[str]) -> str:
    """Refuse every write outside `writable`, and signals to other programs, from now on.

    Returns what to say; MachineError without Landlock.
    """
    try:
        version = kernel.system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
        handled = _WRITE_FILE | _REMOVE | _MAKE
        handled |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
        rules = struct.pack("=QQQ", handled, 0, _SCOPES) if version >= 6 else struct.pack("=Q", handled)
        ruleset = kernel.system_call(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
        try:
            for path in writable:
                _allow(ruleset, path, handled)
            kernel.refuse_new_privileges()
            kernel.system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
        finally:
            os.close(ruleset)
    except OSError as error:
        raise MachineError(f"no Landlock here ({error})") from error
    truncation = "" if version >= 3 else "; truncating by path is not covered by it"
    return f"Landlock (version {version}) is active: writes from C++ or other programs fail with EACCES{truncation}"


def _allow(ruleset: int, path: str, access: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        rule = struct.pack("=Qi", access, directory)
        kernel.system_call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(directory)
