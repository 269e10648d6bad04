"""Modules that a process loaded before it was forked, hidden from the script until it imports them.

A trial that is forked from a process with torch in memory starts in a fraction of the time. The script does not notice:
a module appears in `sys.modules` when the script imports it, and import hooks for torch run then.

    groups = load(("numpy", "torch"))             # in the process that is going to be forked
    Preloaded(groups).hide(folder, refuse)        # in each fork

`refuse(reason)` is called where the script needs a new process: where it changes the environment before it imports
torch, whose libraries read variables when they load, and where its path leads to another torch, or to a module of its
own with the name of one that torch imports.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

from flatout.environment import variables
from flatout.script.own_modules import LoadedBefore

Groups = Mapping[str, Sequence[str]]
"""Imported module -> all modules that its import loaded, itself included, in order."""
MAIN_OF_WORKERS = "__mp_main__"
"""multiprocessing's second name for the main module, set when it is imported."""


def load(names: Sequence[str]) -> Groups:
    """Import these in order; each may import those before it."""
    groups = {}
    for name in names:
        before = set(sys.modules)
        importlib.import_module(name)
        groups[name] = [module for module in sys.modules if module not in before]
    return groups


class Preloaded:
    """A finder that restores hidden modules, those of one import together."""

    def __init__(self, groups: Groups) -> None:
        self._groups = {name: list(modules) for name, modules in groups.items() if name in modules}
        self._hidden: dict[str, ModuleType] = {}
        self._variables: Mapping[str, str] = {}
        self._refuse: Callable[[str], NoReturn]

    def hide(self, folder: str, refuse: Callable[[str], NoReturn]) -> None:
        """Remove all but the standard library's from `sys.modules`. folder: the script's. refuse: must not return."""
        names = [name for modules in self._groups.values() for name in modules]
        for package in {_package(name) for name in names}:
            if PathFinder.find_spec(package, [folder]) is not None:
                refuse(f"the script's folder has a module {package!r}, which torch imports too")
        others = [name for name in names if _package(name) not in sys.stdlib_module_names]
        self._hidden = {name: sys.modules.pop(name) for name in others if name in sys.modules}
        self._variables, self._refuse = variables(), refuse
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._hidden:
            return None
        found, module = PathFinder.find_spec(name, path), self._hidden[name]
        ours = module.__spec__
        if found is not None and ours is not None and found.origin != ours.origin:
            self._refuse(f"its path leads to {found.origin} instead of {ours.origin}")
        if name in self._groups and variables() != self._variables:
            self._refuse(f"it changes the environment before it imports {name}")
        loader = LoadedBefore(module, lambda module: self._restore(module.__name__))
        return ModuleSpec(name, loader, origin=None if ours is None else ours.origin)  # type: ignore[arg-type]

    def _restore(self, name: str) -> None:
        """Restore everything that an import of `name` loads: its group, or else its package."""
        heads = list(self._groups)
        for earlier in heads[: heads.index(name)] if name in heads else ():
            importlib.import_module(earlier)
        names = self._groups.get(name) or [one for one in self._hidden if _package(one) == _package(name)]
        for one in names:
            if one in self._hidden:
                sys.modules[one] = self._hidden.pop(one)
        if MAIN_OF_WORKERS in names:
            sys.modules[MAIN_OF_WORKERS] = sys.modules["__main__"]


def _package(name: str) -> str:
    return name.partition(".")[0]
