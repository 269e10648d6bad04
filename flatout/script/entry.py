"""Run a script as Python itself would: same `__main__`, argv, `sys.path[0]`, traceback, exit status.

The module object is put into `sys.modules['__main__']` with the script's own `__file__`, so workers started by spawn
find it and pickled classes resolve. Nothing is copied and nothing is rewritten.

    target = Target.from_command(["train.py", "--lr", "0.1"])
    status = execute(target)            # 0, the script's own exit code, or 1 after its own traceback
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flatout.errors import ScriptError, UsageError
from flatout.script.own_modules import set_aside
from flatout.tracebacks import own_frames_removed

RUNPY_AND_ITS_OWN = ("runpy", "types", "contextlib", "warnings", "importlib.machinery")
"""What Python has imported before `python -m` runs a module's first line."""

LOOKED_AT_BYTES = 4096
"""Of a script's start: enough for the first line of a zip application, which names its interpreter, and a header."""

LARGEST_IN_C = 1 << 63
"""The numbers that C can hold, from its negative on, are exit codes by their last eight bits."""
STDERR = 2
"""The descriptor."""
WRONG_ARGUMENTS_IN = ("argparse", "click.exceptions")
"""Modules of exceptions for wrong arguments: what was printed of one says more than where it was raised."""

_replaced: list[ModuleType] = []


@dataclass(frozen=True, kw_only=True)
class Target:
    """A script path or a module name, with its arguments."""

    path: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()

    @classmethod
    def from_command(cls, command: Sequence[str]) -> Target:
        """`['train.py', ...]` or `['-m', 'package.module', ...]`."""
        if not command:
            raise UsageError("no script was given", remedy="for example: flatout run train.py --its-own-options")
        if command[0] == "-m":
            if len(command) < 2:
                raise UsageError("-m needs the name of a module", remedy="for example: -m package.train")
            return cls(module=command[1], arguments=tuple(command[2:]))
        return cls(path=command[0], arguments=tuple(command[1:]))

    @property
    def name(self) -> str:
        return self.path if self.path is not None else f"-m {self.module}"

    @property
    def command(self) -> list[str]:
        head = [self.path] if self.path is not None else ["-m", str(self.module)]
        return [*head, *self.arguments]

    @functools.cached_property
    def folder(self) -> str:
        """Where the script's own modules are looked for first. `execute` asks for it before the script can change the
        working directory, that paths are relative to."""
        return os.path.dirname(os.path.realpath(self.path)) if self.path is not None else os.getcwd()

    def check_exists(self) -> None:
        """Refuse a script that does not exist, or that Python runs although it is no source; other errors are left to
        Python."""
        if self.path is None:
            return
        if not self.path:  # as of a variable of a shell that is not set
            raise UsageError("the script is ''", limit="a script is a file", remedy="name it, or a module with -m")
        path = Path(self.path)
        try:
            exists = path.exists()
        except OSError as error:  # below a folder that may not be searched
            raise UsageError(f"cannot look for {self.path}: {error.strerror}") from None
        if not exists:
            raise UsageError(f"no such script: {self.path}", remedy=f"looked in {os.getcwd()}")
        if path.is_dir():
            raise UsageError(f"{self.path} is a folder", limit="a script is a file", remedy="run a package with -m")
        if path.suffix == ".ipynb" and path.is_file():
            raise UsageError(
                f"{self.path} is a notebook",
                limit="a script is Python source",
                remedy="make one by jupyter nbconvert --to script, or use flatout.tune(step, batches) in the notebook",
            )
        try:
            kind = _other_than_source(path)
        except OSError as error:
            raise self._unreadable(error) from error
        if kind is not None:
            raise UsageError(
                f"{self.path} is {kind}", limit="a script is Python source", remedy="name the source it was made from"
            )

    def check(self) -> None:
        """Refuse what Python could not start, before minutes are spent on it."""
        self.check_exists()
        if self.path is None:
            return
        path = Path(self.path)
        try:
            source = path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            compile(source, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            where = self.path if error.lineno is None else f"{self.path}, line {error.lineno}"
            raise ScriptError(
                f"{where}: {type(error).__name__}: {error.msg}", limit="Python cannot run it either"
            ) from None
        except ValueError as error:
            raise ScriptError(f"{self.path} is not Python source: {error}") from None

    def _unreadable(self, error: OSError) -> UsageError:
        return UsageError(f"cannot read {self.path}: {error.strerror}", remedy="name a script that you may read")


def _other_than_source(path: Path) -> str | None:
    """What it is of that which Python runs although it is no source; None: nothing of these. Raises OSError where it
    cannot be read."""
    if not path.is_file():  # a pipe can be read only once
        return None
    with path.open("rb") as file:
        start = file.read(LOOKED_AT_BYTES)
    if b"\0" not in start:
        return None
    if start[2:4] == b"\r\n":  # behind the number of the version
        return "a compiled file"
    return "a zip application" if b"PK\x03\x04" in start else None


def execute(target: Target, failed: Callable[[BaseException], object] = lambda error: None) -> int:
    """Run `target` as `__main__` in this process. Returns the exit status that Python would have had.

    failed: called with the exception that ends it, whatever hook the script shows it by: one that nobody caught, or one
    in whose handler it exits with a status other than 0 (unless it does so `from None`: a rank that ends because
    another has failed is not the one to blame).

    An uncaught exception goes to `sys.excepthook` with our own frames removed. `KeyboardInterrupt` is re-raised, so
    that the caller can die of the signal as Python does. A module that is not there raises UsageError.
    """
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    _replaced.append(sys.modules["__main__"])  # its globals are still in use further up this very stack
    sys.modules["__main__"] = module
    sys.orig_argv[1:] = target.command
    set_aside(target.folder)
    try:
        if target.path is not None:
            _run_path(target, module)
        else:
            _run_module(str(target.module), target.arguments)
    except SystemExit as stop:
        status, cause = _status_of(stop), None if stop.__suppress_context__ else stop.__context__
        if status != 0 and cause is not None and type(cause).__module__ not in WRONG_ARGUMENTS_IN:
            failed(own_frames_removed(cause))
        return status
    except _NotThere:
        raise
    except BaseException as error:
        if type(error) is KeyboardInterrupt:  # of a class derived from it Python does not die
            raise
        uncaught = error
    else:
        return 0
    failed(own_frames_removed(uncaught))
    return show_uncaught(uncaught)  # out here: what a hook may raise has no context, as in Python


def show_uncaught(error: BaseException) -> int:
    """What Python does with an uncaught exception; returns the exit status."""
    own_frames_removed(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if not hasattr(sys, "excepthook"):
        _write_error("sys.excepthook is missing\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
        return 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        return _status_of(stop)
    except BaseException as failure:
        _write_error("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), own_frames_removed(failure), failure.__traceback__)
        _write_error("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _status_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF if -LARGEST_IN_C <= stop.code < LARGEST_IN_C else 0xFF
    with contextlib.suppress(Exception):  # as Python does: it may be closed, or the value have no text
        write = _write_error if sys.stderr is None else sys.stderr.write
        write(str(stop.code))
    _write_error("\n")
    return 1


def _write_error(text: str) -> None:
    """As Python does: past `sys.stderr` where that cannot be written to."""
    try:
        sys.stderr.write(text)
    except Exception:
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode("utf-8", "backslashreplace"))


def _run_path(target: Target, module: ModuleType) -> None:
    """As `python path` does: an absolute `__file__`, not tidied; the folder of the file that a link leads to."""
    path = str(target.path)
    sys.argv[:] = [path, *target.arguments]
    _set_first_path(target.folder)
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    vars(module).update(__file__=absolute, __cached__=None, __loader__=loader)
    exec(compile(Path(absolute).read_bytes(), absolute, "exec", dont_inherit=True), vars(module))


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """As `python -m name` does, with the same function, so that the traceback is the same too."""
    sys.argv[:] = ["-m", *arguments]
    _set_first_path(os.getcwd())
    for there in RUNPY_AND_ITS_OWN:
        importlib.import_module(there)
    try:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    except SystemExit as stop:
        if isinstance(stop.__context__, runpy._Error):  # type: ignore[attr-defined]
            raise _NotThere(str(stop.__context__), remedy=f"looked along sys.path from {os.getcwd()}") from None
        raise


class _NotThere(UsageError):
    """The module to run was not found: none of the script has run."""


def _set_first_path(folder: str) -> None:
    """Set `sys.path[0]` to the script's folder, unless Python runs in safe-path mode (-P, PYTHONSAFEPATH)."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
