"""Stop a trial before its first write, where the kernel offers no copy-on-write.

Python announces what it is about to do to audit hooks (PEP 578): opening a file, removing, renaming, starting another
program. A hook that does not return, or raises, prevents it. C++ code announces nothing: `guard_torch` wraps torch's
own writers, and Landlock, where the kernel has it, makes all other writes fail, also those of other programs. It needs
no rights, but answers with EACCES instead of calling us, and knows nothing of chmod, chown, times and extended
attributes.

Neither can be taken back; both live as long as the trial's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flatout.errors import MachineError
from flatout.replaced import replaced

from . import kernel
from .scratch import TEMPORARY
from .writes import Arguments, Check, Stop, WriteRules, program_rules, save_check

_active: WriteRules | None = None  # what guard_torch asks; None before enter_guard and in overlay mode
_checks = contextlib.ExitStack()  # of torch's writers; held here, as nobody need keep what takes them away

# Landlock
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_ASK_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE = 1 << 1
_REMOVE = 1 << 4 | 1 << 5  # a directory, a file
_MAKE = sum(1 << bit for bit in range(6, 13))  # device, directory, file, socket, pipe, block device, link
_REFER = 1 << 13  # move or link to another directory; since version 2
_TRUNCATE = 1 << 14  # since version 3
_SCOPES = 1 | 2  # abstract sockets of other programs, signals to them; since version 6


def enter_guard(
    scratch: Path, shared: Sequence[Path], on_first_write: Callable[[str], NoReturn] | None
) -> tuple[str, ...]:
    """Stop writes outside `scratch` and `shared` from now on; returns what is special here."""
    global _active
    temporary = str(scratch / TEMPORARY)
    redirect_temporary_files(temporary)
    sys.dont_write_bytecode = True
    writable = [str(scratch), *(str(path) for path in shared)]
    try:
        # Shared memory is created by C++, which cannot be intercepted; what Python opens there is still stopped.
        kernel_trees = [tree for tree in ("/dev", "/proc") if os.path.isdir(tree)]
        details = [restrict_writes([*writable, *kernel_trees]), "mode, owner and times changed from C++ are not seen"]
        programs_allowed = True
    except MachineError as error:
        details = [f"{error}: a write from C++ (other than torch.save) is not seen, other programs are not started"]
        programs_allowed = False
    rules = WriteRules(tuple(writable), _stopper(on_first_write))
    if not programs_allowed:
        _check_workers(rules.stop)
    _hook(rules.events() | ({} if programs_allowed else program_rules(rules.stop)))
    _active = rules
    return tuple(details)


def note_writes(writable: Sequence[Path], note: Callable[[str], object]) -> None:
    """From now on, call `note` with a description before each write elsewhere than in `writable`, as far as Python
    announces it or torch makes it."""
    rules = WriteRules(tuple(str(path) for path in writable), note)
    _hook(rules.events() | program_rules(note))
    _check_torch(sys.modules["torch"], rules)


def _hook(checks: Mapping[str, Check]) -> None:
    def hook(event: str, arguments: Arguments) -> None:
        check = checks.get(event)
        if check is not None:
            check(arguments)

    sys.addaudithook(hook)


def _stopper(on_first_write: Callable[[str], NoReturn] | None) -> Stop:
    def stop(description: str) -> NoReturn:
        if on_first_write is not None:
            on_first_write(description)
        raise PermissionError(errno.EACCES, f"stopped before a write in a trial: {description}")

    return stop


def redirect_temporary_files(directory: str) -> None:
    """What is made with `tempfile` from now on, and what other code makes in TMPDIR, is made there."""
    import tempfile  # not at the top: this file is imported by processes that are never guarded

    tempfile.tempdir = directory
    os.putenv("TMPDIR", directory)  # for C++ and started programs; os.environ stays as the script expects it


def _check_workers(stop: Stop) -> None:
    """multiprocessing starts its helpers below Python's audit events; the module attribute is where it looks."""
    import _posixsubprocess

    start: Callable[..., int] = _posixsubprocess.fork_exec
    check = program_rules(stop)["subprocess.Popen"]

    @functools.wraps(start)
    def checked(arguments: object, *others: object) -> int:
        check(("", arguments))
        return start(arguments, *others)

    _posixsubprocess.fork_exec = checked


def guard_torch(torch: ModuleType) -> Callable[[], None]:
    """Put the same check before torch's writers, which write from C++; returns what takes it away again.

    Does nothing in overlay mode, so that it can be called after importing torch in either.
    """
    if _active is not None:
        _check_torch(torch, _active)
    return _checks.close


def _check_torch(torch: ModuleType, rules: WriteRules) -> None:
    for owner in (torch, torch.serialization, torch.jit, torch.jit.ScriptModule, getattr(torch, "export", None)):
        if getattr(owner, "save", None) is not None:
            _checks.enter_context(replaced(owner, "save", functools.partial(save_check, rules=rules)))


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
