"""Hide what Flatout imported from the script, and keep it for Flatout.

A script's folder comes first on `sys.path`, so under Python alone its `statistics.py` or `csv.py` wins over the library
module of that name. A module already in `sys.modules` would win instead. So everything imported since Python started is
removed from `sys.modules` before the script's first line. When the script imports such a name, the search follows its
own path; where that leads to the same file that we have loaded, the script gets the same module (two copies of a class
would not be compatible), otherwise its own.

    set_aside()                     # right before the script
    with own_imports():             # later: our imports find what they would have found before the script
        from flatout.report.run_text import run_text
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

STAY = ("flatout", "torch", "numpy")
"""Packages that are left alone: one copy of each, shared with the script."""
PYTHONS_OWN = ("importlib", "importlib._bootstrap", "importlib._bootstrap_external")
"""Created by Python itself; a search would find other copies."""

LAST_AT_STARTUP = "site"
"""A module moves to the end of `sys.modules` when its import completes; those after this one came later."""

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


class _OwnModules:
    """The modules that were set aside, and the finder that restores them for a script that imports them."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.hidden: set[str] = set()
        """Those of `modules` that the script has not imported yet."""
        self.path: list[str] | None = None
        """`sys.path` before the script's folder was added; None: nothing was set aside."""

    def hide(self, names: list[str]) -> None:
        for name in names:
            self.modules[name] = sys.modules.pop(name)
            self.hidden.add(name)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hidden:
            return None
        found = self._search(name, path, target)
        ours = self.modules[name]
        if found is not None and ours.__spec__ is not None and found.origin == ours.__spec__.origin:
            self.hidden.discard(name)
            found.loader = LoadedBefore(ours, self._imported)  # type: ignore[assignment]
        return found

    def _imported(self, module: ModuleType) -> None:
        for name in _imported_by(module) & self.hidden:  # as if its import statements had run now
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def _search(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        after = finders.index(self) + 1 if self in finders else 0  # those before us were searched already
        for finder in finders[after:]:
            if (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return None


class LoadedBefore:
    """Loads a module by returning the existing one, and calls `imported` with it."""

    def __init__(self, module: ModuleType, imported: Callable[[ModuleType], None]) -> None:
        self._module, self._spec, self._imported = module, module.__spec__, imported

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put its new one there
        self._imported(module)


_own = _OwnModules()


def set_aside(folder: str) -> None:
    """Remove what was imported since Python started from `sys.modules`. folder: the script's, not yet on `sys.path`.

    Third-party modules are removed only where the script's folder has the same name: psutil looks itself up in
    `sys.modules` while it is used.
    """
    if _own.path is None:
        _own.path = list(sys.path if sys.flags.safe_path else sys.path[1:])
        sys.meta_path.insert(0, _own)
    names = list(sys.modules)
    started = names.index(LAST_AT_STARTUP) + 1 if LAST_AT_STARTUP in names else len(names)
    names = [name for name in names[started:] if _can_be_set_aside(name)]
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    shadowed = {name for name in packages if PathFinder.find_spec(name, [folder]) is not None}
    _own.hide([name for name in names if name.partition(".")[0] in sys.stdlib_module_names | shadowed])


def adopt(path: Sequence[str]) -> None:
    """For a process that runs without `set_aside`: our imports follow this path from now on, and stay unseen."""
    if _own.path is None:
        _own.path = list(path)
        sys.meta_path.insert(0, _own)


@contextlib.contextmanager
def own_imports() -> Iterator[None]:
    """Within, imports find what they would have found before the script, even if it has modules of the same names."""
    if _own.path is None:
        yield
        return
    path = list(sys.path)
    before = set(sys.modules)
    replaced = {name: module for name, module in list(sys.modules.items()) if _is_the_scripts(name, module)}
    for name in replaced:
        del sys.modules[name]
    added = {name: module for name, module in _own.modules.items() if sys.modules.get(name) is not module}
    replaced |= {name: sys.modules[name] for name in added if name in sys.modules}
    sys.modules.update(added)
    sys.path[:] = _own.path
    try:
        yield
    finally:
        sys.path[:] = path
        packages = {name.partition(".")[0] for name in before}
        for name in added:
            sys.modules.pop(name, None)
        new = [name for name in sys.modules if name not in before and name.partition(".")[0] not in packages]
        _own.hide([name for name in new if _can_be_set_aside(name)])
        for name in replaced:
            if name in sys.modules:
                _own.modules[name] = sys.modules[name]
        sys.modules.update(replaced)


def _can_be_set_aside(name: str) -> bool:
    """False for a module without a spec of its own name, such as collections.abc: it could not be found again."""
    if name.partition(".")[0] in STAY or name in PYTHONS_OWN:
        return False
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.name == name


def _is_the_scripts(name: str, module: object) -> bool:
    """Is this another module under a name of the standard library?"""
    if name.partition(".")[0] not in sys.stdlib_module_names or name == "__main__":
        return False
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return isinstance(origin, str) and os.path.isabs(origin) and not origin.startswith(_STANDARD_LIBRARY)


def _imported_by(module: ModuleType) -> set[str]:
    """Names of the modules that this one's globals are or come from."""
    names = set()
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name != module.__name__:
            names.add(name)
    return names
