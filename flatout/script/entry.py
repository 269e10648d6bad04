"""Run a script as Python itself would: same `__main__`, argv, `sys.path[0]`, traceback, exit status.

The module object is put into `sys.modules['__main__']` with the script's own `__file__`, so workers started by spawn
find it and pickled classes resolve. Nothing is copied and nothing is rewritten.

    target = Target.from_command(["train.py", "--lr", "0.1"])
    status = execute(target)            # 0, the script's own exit code, or 1 after its own traceback
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from flatout.errors import ScriptError, UsageError
from flatout.script.tracebacks import own_frames_removed


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

    def check_exists(self) -> None:
        """Refuse what is not there; what Python itself would complain about is left to it."""
        if self.path is None:
            return
        path = Path(self.path)
        if not path.exists():
            raise UsageError(f"no such script: {self.path}", remedy=f"looked in {os.getcwd()}")
        if path.is_dir():
            raise UsageError(f"{self.path} is a folder", limit="a script is a file", remedy="run a package with -m")

    def check(self) -> None:
        """Refuse what Python could not start, before minutes are spent on it."""
        self.check_exists()
        if self.path is None:
            return
        path = Path(self.path)
        try:
            source = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            compile(source, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            where = f"{self.path}, line {error.lineno}"
            raise ScriptError(
                f"{where}: {type(error).__name__}: {error.msg}", limit="Python cannot run it either"
            ) from None
        except ValueError as error:
            raise ScriptError(f"{self.path} is not Python source: {error}") from None


def execute(target: Target) -> int:
    """Run `target` as `__main__` in this process. Returns the exit status that Python would have had.

    An uncaught exception goes to `sys.excepthook` with our own frames removed. `KeyboardInterrupt` is re-raised, so
    that the caller can die of the signal as Python does.
    """
    module, code_of = _main_module(target)
    try:
        code = code_of()
        _replaced.append(sys.modules["__main__"])  # its globals are still in use further up this very stack
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as stop:
        return _status_of(stop)
    except KeyboardInterrupt as interrupt:
        own_frames_removed(interrupt)
        raise
    except BaseException as error:
        own_frames_removed(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _status_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _main_module(target: Target) -> tuple[ModuleType, Any]:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    if target.path is not None:
        path = target.path
        sys.argv[:] = target.command
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        module.__file__ = path
        module.__dict__["__cached__"] = None
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        return module, lambda: _compile(path)
    sys.path[0] = os.getcwd()
    sys.argv[:] = ["-m", *target.arguments]
    spec = _find_module(str(target.module))
    sys.argv[0] = str(spec.origin)
    module.__file__ = str(spec.origin)
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__loader__ = spec.loader
    module.__dict__["__cached__"] = spec.cached
    return module, lambda: spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def _compile(path: str) -> CodeType:
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module named {error.name!r}", remedy=f"looked along sys.path from {os.getcwd()}") from None
    except (ImportError, ValueError) as error:
        raise UsageError(f"cannot find the module {name!r}: {error}") from None
    if spec is None:
        raise UsageError(f"no module named {name!r}", remedy=f"looked along sys.path from {os.getcwd()}")
    if spec.submodule_search_locations is not None:
        return _find_module(f"{name}.__main__")
    if spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise UsageError(f"{name} has no Python code to run")
    return spec
