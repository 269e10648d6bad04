"""Stop a trial before its first write, where the kernel offers no copy-on-write.

Python announces what it is about to do to audit hooks (PEP 578): opening a file, removing, renaming, starting another
program. A hook that does not return, or raises, prevents it. C++ code announces nothing: `guard_torch` wraps torch's
own writers, and Landlock, where the kernel has it, makes all other writes fail.

A hook cannot be removed again; it lives as long as the trial's process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flatout.errors import MachineError
from flatout.replaced import replaced

from .landlock import restrict_writes
from .scratch import TEMPORARY
from .writes import Arguments, Check, Stop, WriteRules, program_rules, stream_check

_active: WriteRules | None = None  # what guard_torch asks; None before enter_guard and in overlay mode
_checks = contextlib.ExitStack()  # of torch's writers; held here, as nobody need keep what takes them away


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
    for owner, name, position in (
        (torch, "save", 1),
        (torch.serialization, "save", 1),
        (torch.jit, "save", 1),
        (torch.jit.ScriptModule, "save", 1),
        (getattr(torch, "export", None), "save", 1),
    ):
        if getattr(owner, name, None) is not None:
            _checks.enter_context(
                replaced(owner, name, functools.partial(stream_check, position=position, rules=rules))
            )
