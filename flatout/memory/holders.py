"""Who holds a tensor: from the tensor upward, by the garbage collector's references, to something that has a name.

    search = HolderSearch(is_users_file, frames=[...], ignore=[...])
    found = search.common([tensor_of_step_3, tensor_of_step_4, tensor_of_step_5])
    found.name, found.kind, found.container        # 'history', 'global', [...]

What grows is what tensors of *different* steps have in common: the list, not the record in it. From there the nearest
name is looked for: a variable of the script, an attribute of its object, a closure, a cached function.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Literal

HolderKind = Literal["global", "local", "attribute", "closure", "cached function"]

DEEPEST = 16
WIDEST = 400
"""Objects followed at once: a tensor that hundreds of objects hold has no holder to name."""

MOST_TRIES = 8
"""How many common holders are searched for a name."""

_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))
_OUR_PACKAGES = ("flatout.memory.", "flatout.script.")
_PLAIN = (list, tuple, set, frozenset, collections.deque, CellType, FunctionType, FrameType)
_UNFOLLOWED = (ModuleType, type)
_MODULE_SLOTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What holds, and its name. `links` are the names to look for in the source, the nearest first."""

    name: str
    kind: HolderKind
    container: object = field(repr=False)
    file: str = ""
    first_line: int = 0
    """Where the code of the function begins whose local it is; 0: anywhere in the file."""
    links: tuple[str, ...] = ()
    owner: object = field(default=None, repr=False)
    """The object at the end of the way: an optimizer, a meter."""

    @property
    def type_name(self) -> str:
        return type(self.container).__name__

    @property
    def entries(self) -> int | None:
        if isinstance(self.container, _CACHED_FUNCTION):
            return int(self.container.cache_info().currsize)
        return len(self.container) if isinstance(self.container, (list, dict, set, collections.deque)) else None

    @property
    def bound(self) -> str:
        """Why it cannot grow without limit; '' where nothing says so."""
        one = self.container
        if isinstance(one, collections.deque) and one.maxlen is not None:
            return f"a deque of at most {one.maxlen}"
        if isinstance(one, _CACHED_FUNCTION) and one.cache_info().maxsize is not None:
            return f"a cache of at most {one.cache_info().maxsize}"
        defaults = getattr(self.owner, "defaults", None)
        if isinstance(defaults, dict) and defaults.get("history_size") is not None:
            return f"a history of at most {defaults['history_size']}"
        if (samples := _samples(self.owner)) is not None and _is_by_sample(one, samples):
            return f"at most one entry for each of the {samples:,} samples of {type(self.owner).__name__}"
        size = getattr(one, "maxsize", None)
        return f"a {type(one).__name__} of at most {size}" if isinstance(size, int) and size > 0 else ""


def _samples(owner: object) -> int | None:
    """Of a data set that is read by index."""
    from torch.utils.data import Dataset

    if not isinstance(owner, Dataset) or not hasattr(owner, "__len__"):
        return None
    try:
        return len(owner)
    except Exception:  # the script's own may raise anything
        return None


def _is_by_sample(container: object, samples: int) -> bool:
    """A cache of samples, filled as they are read for the first time."""
    if isinstance(container, dict):
        return all(isinstance(key, int) and -samples <= key < samples for key in container)
    return isinstance(container, list) and len(container) == samples


class HolderSearch:
    """One search at one moment. `frames` are the running ones, whose locals the garbage collector does not show."""

    def __init__(
        self, is_users_file: Callable[[str], bool], frames: Sequence[FrameType] = (), ignore: Iterable[object] = ()
    ) -> None:
        self._is_users = is_users_file
        self._ignored: dict[int, object] = {}
        """With the objects themselves, so that no id is reused."""
        for one in (*ignore, ignore, frames, self._ignored, vars(self)):
            self.ignore(one)
        self._frames = {id(frame) for frame in frames}
        self._variables: dict[int, tuple[HolderKind, str, str, int]] = {}
        """Of an object: kind, name, file, first line of the function."""
        self._globals: dict[int, str] = {}
        """Of a dict that is the globals of the user's module: its file."""
        self._library_globals = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
        for frame in frames:
            self._learn_locals(frame)
        for module in list(sys.modules.values()):
            self._learn_globals(module)

    def common(self, objects: Sequence[object]) -> Found | None:
        """The nearest thing that holds them all, by name; None where no name was found."""
        walk = _Walk(self, objects)
        named: list[Found] = []
        self.ignore(named)
        tries = iter(range(MOST_TRIES))

        def holds_all_and_has_a_name(one: object) -> bool:
            if walk.holds_all(one) and next(tries, None) is not None and (found := self._named(one)) is not None:
                named.append(found)
            return bool(named)

        walk.up_to(holds_all_and_has_a_name)
        return named[0] if named else None

    # what is known beforehand

    def _learn_locals(self, frame: FrameType) -> None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED or not self._is_users(code.co_filename):
            return
        values = frame.f_locals
        for name, value in values.items():
            self._variables[id(value)] = ("local", name, code.co_filename, code.co_firstlineno)
        if type(values) is dict:
            values.clear()  # until 3.12 a copy that the frame keeps: it would hold what the script releases

    def _learn_globals(self, module: object) -> None:
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not isinstance(file, str) or not self._is_users(file):
            return
        self._globals[id(vars(module))] = file
        for name, value in list(vars(module).items()):
            self._variables[id(value)] = ("global", name, file, 0)

    # referrers

    def referrers(self, objects: Sequence[object]) -> list[object]:
        given = tuple(objects)  # which Python 3.13 counts among those that refer to them
        return [one for one in gc.get_referrers(*given) if one is not given and self._counts(one)]

    def ignore(self, container: object) -> None:
        self._ignored[id(container)] = container

    def _counts(self, one: object) -> bool:
        if id(one) in self._ignored or isinstance(one, _UNFOLLOWED):
            return False
        if id(one) in self._globals:
            return True
        if isinstance(one, FrameType):
            return id(one) not in self._frames and not one.f_code.co_filename.startswith("<")
        return id(one) not in self._library_globals and not f"{type(one).__module__}.".startswith(_OUR_PACKAGES)

    # names

    def _named(self, container: object) -> Found | None:
        if id(container) in self._globals:
            file = self._globals[id(container)]
            return Found(name="the module's variables", kind="global", container=container, file=file)
        walk = _Walk(self, [container])
        named: list[Found] = []

        def has_name(one: object) -> bool:
            found = self._name_of(one, walk.path(one), container)
            if found is not None:
                named.append(found)
            return found is not None

        walk.up_to(has_name)
        return named[0] if named else None

    def _name_of(self, one: object, path: list[object], container: object) -> Found | None:
        """`path` leads from the container up to `one`."""
        attributes = _attribute_names(path)
        if isinstance(one, _CACHED_FUNCTION):
            code: CodeType = getattr(one, "__wrapped__", None).__code__  # type: ignore[union-attr]
            return _of_code(code, one.__name__, "cached function", one)
        if isinstance(one, FunctionType) and self._is_users(one.__code__.co_filename):
            closure = self._closure(one, path, container)
            if closure is not None:
                return closure
        if id(one) in self._variables:
            kind, name, file, line = self._variables[id(one)]
            if container is getattr(one, "state", None) and hasattr(one, "param_groups"):
                # an optimizer's state follows its parameters
                container, attributes = one.param_groups, ["param_groups"]
            full = ".".join([name, *reversed(attributes)])
            links = (*attributes, name)
            return Found(name=full, kind=kind, container=container, file=file, first_line=line, links=links, owner=one)
        if isinstance(one, (FrameType, GeneratorType)) and len(path) > 1:
            return self._frozen_local(one, path[-2], container)
        if attributes and self._is_users(_file_of(type(one))):
            name = f"{type(one).__name__}.{attributes[-1]}"
            full = ".".join([name, *reversed(attributes[:-1])])
            file = _file_of(type(one))
            links = tuple(attributes)
            return Found(name=full, kind="attribute", container=container, file=file, links=links, owner=one)
        return None

    def _closure(self, function: FunctionType, path: list[object], container: object) -> Found | None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if any(cell is one for one in path):
                return Found(
                    name=f"{variable} (closure of {function.__qualname__})",
                    kind="closure",
                    container=container,
                    file=function.__code__.co_filename,
                    links=(variable,),
                )
        return None

    def _frozen_local(
        self, one: FrameType | GeneratorType[object, object, object], child: object, container: object
    ) -> Found | None:
        """A local of a suspended generator, or of a function that failed and whose traceback is kept."""
        frame = one if isinstance(one, FrameType) else one.gi_frame
        if frame is None or not self._is_users(frame.f_code.co_filename):
            return None
        names = [name for name, value in frame.f_locals.items() if value is child]
        if not names:
            return None
        return _of_code(frame.f_code, names[0], "local", container)


def _of_code(code: CodeType, name: str, kind: HolderKind, container: object) -> Found:
    """Of a function's own code."""
    file, first_line = code.co_filename, code.co_firstlineno
    return Found(name=name, kind=kind, container=container, file=file, first_line=first_line, links=(name,))


class _Walk:
    """Breadth first, upward; of each object is known from which of the start objects it can be reached."""

    def __init__(self, search: HolderSearch, objects: Sequence[object]) -> None:
        self._search = search
        self._all = frozenset(range(len(objects)))
        self._level: list[object] = []
        self._reached: dict[int, set[int]] = {}
        self._child: dict[int, object] = {}
        self._kept: list[object] = []
        """So that no id is reused during the walk."""
        for container in (objects, self._reached, self._child, vars(self)):
            search.ignore(container)
        for number, one in enumerate(objects):
            if id(one) not in self._reached:
                self._level.append(one)
            self._reached.setdefault(id(one), set()).add(number)
        self._kept.extend(self._level)

    def holds_all(self, one: object) -> bool:
        return self._reached[id(one)] == self._all

    def up_to(self, wanted: Callable[[object], bool]) -> object:
        """The first object, going up level by level, that is wanted; None if there is none."""
        for _ in range(DEEPEST):
            for one in self._level:
                if wanted(one):
                    return one
            if not self._level or len(self._level) > WIDEST:
                return None
            self._rise()
        return None

    def path(self, one: object) -> list[object]:
        """From a start object up to this one."""
        path = [one]
        while id(path[-1]) in self._child and len(path) <= DEEPEST:
            path.append(self._child[id(path[-1])])
        return path[::-1]

    def _rise(self) -> None:
        level = self._level
        below = {id(one) for one in level}
        for container in (level, self._kept):
            self._search.ignore(container)
        following: dict[int, object] = {}
        self._search.ignore(following)
        for parent in self._search.referrers(level):
            reached = self._reached.setdefault(id(parent), set())
            before = len(reached)
            for child in gc.get_referents(parent):
                if id(child) in below and child is not parent:
                    reached |= self._reached[id(child)]
                    if before == 0:
                        self._child.setdefault(id(parent), child)
            if len(reached) > before:
                following[id(parent)] = parent
        self._level = list(following.values())
        self._kept.extend(self._level)


def _attribute_names(path: Sequence[object]) -> list[str]:
    """The attributes along a way upward, the nearest first; keys of plain dicts and places in lists are none."""
    names: list[str] = []
    key = ""
    for child, parent in itertools.pairwise(path):
        if isinstance(parent, dict):
            below, key = key, next((name for name, value in parent.items() if value is child and type(name) is str), "")
            if key in _MODULE_SLOTS and below:
                key = below  # `_buffers["mean"]` is known as `mean`
            continue
        if isinstance(parent, _PLAIN):
            key = ""
            continue
        name = key if getattr(parent, "__dict__", None) is child else _attribute(child, parent)
        name = key if name in _MODULE_SLOTS else name
        key = ""
        if name:
            names.append(name)
    return names


def _attribute(child: object, parent: object) -> str:
    return next((name for name, value in _attributes(parent) if value is child), "")


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    own = getattr(one, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(one, name, None)
            if value is not None:
                yield name, value


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ""
