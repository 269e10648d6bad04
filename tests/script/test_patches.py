"""Patches come off without a trace; an import watch calls back once, after the package's own code."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flatout.script.patches import ImportWatch, Patches, around


class Base:
    def method(self, x: int) -> int:
        """Its doc."""
        return x


class Derived(Base):
    pass


class Other:
    def method(self, x: int) -> int:
        return x


class OtherDerived(Other):
    pass


def test_replace_and_undo() -> None:
    patches, before = Patches(), dict(vars(Base))
    owner = SimpleNamespace(f=len)
    patches.replace(Base, "method", lambda original: lambda self, x: original(self, x) + 1)
    patches.replace(OtherDerived, "method", lambda original: lambda self, x: -original(self, x))
    patches.replace(owner, "f", lambda original: lambda x: 7)
    assert (Derived().method(1), OtherDerived().method(1), owner.f([])) == (2, -1, 7)
    assert Base.method.__doc__ == "Its doc."
    assert list(inspect.signature(Base.method).parameters) == ["self", "x"]
    assert isinstance(pickle.loads(pickle.dumps(Derived())), Base)
    assert len(patches) == 3
    patches.undo()
    assert dict(vars(Base)) == before
    assert "method" not in vars(OtherDerived)
    assert owner.f is len


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "watched_package").mkdir()
    (tmp_path / "watched_package" / "__init__.py").write_text("ready = True\nfrom watched_package import inner\n")
    (tmp_path / "watched_package" / "inner.py").write_text("import watched_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched_package"  # type: ignore[misc]
    for name in ("watched_package", "watched_package.inner"):
        sys.modules.pop(name, None)


def test_an_import_is_seen_once_it_is_complete(package: str) -> None:
    seen: list[Any] = []

    def callback(module: ModuleType) -> None:
        seen.append((module.__name__, module.ready, "watched_package.inner" in sys.modules))

    watch = ImportWatch({package: callback, "never_imported": callback})
    watch.install()
    try:
        assert importlib.util.find_spec(package) is not None  # to look is not to load
        assert seen == []
        module = __import__(package)
        __import__(package)
        assert seen == [(package, True, True)]
        assert "exec_module" not in vars(module.__loader__)
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    finally:
        watch.remove()
    assert watch not in sys.meta_path
    late = ImportWatch({package: callback})
    late.install()
    late.remove()
    assert len(seen) == 2


def test_a_package_that_is_not_there_is_waited_for(package: str) -> None:
    watch = ImportWatch({"not_there_yet": lambda module: None})
    watch.install()
    try:
        for _ in range(2):
            with pytest.raises(ModuleNotFoundError):
                __import__("not_there_yet")
    finally:
        watch.remove()


def counting(calls: list[str], name: str) -> Any:
    def make(original: Any) -> Any:
        def wrapper(self: Any, x: int) -> int:
            calls.append(name)
            return original(self, x)

        return wrapper

    return make


def test_what_a_script_puts_over_ours_stays() -> None:
    class Owner:
        def method(self, x: int) -> int:
            return x

    calls: list[str] = []
    patches = Patches()
    patches.replace(Owner, "method", counting(calls, "ours"))
    ours = Owner.method
    theirs = counting(calls, "theirs")(ours)
    Owner.method = theirs  # type: ignore[method-assign]
    patches.undo()
    assert Owner.method is theirs
    assert patches.redo()
    assert Owner.method is theirs
    Owner().method(1)
    assert calls == ["theirs", "ours"]
    Owner.method = ours  # type: ignore[method-assign]
    patches.undo()
    assert Owner.method is ours  # the script holds it, and may compare it or put it back
    del theirs, ours
    patches.undo()
    assert Owner().method(2) == 2
    assert calls == ["theirs", "ours"]


def test_nothing_of_ours_is_put_over_what_a_script_put_there_or_keeps() -> None:
    class Owner:
        def method(self, x: int) -> int:
            return x

    calls: list[str] = []
    patches = Patches()
    patches.replace(Owner, "method", counting(calls, "ours"))
    patches.undo()
    kept = Owner.method
    assert not patches.redo()
    assert Owner.method is kept
    Owner.method = theirs = counting(calls, "theirs")(kept)  # type: ignore[method-assign]
    assert not patches.redo()
    assert Owner.method is theirs
    Owner.method = kept  # type: ignore[method-assign]
    del kept, theirs
    assert patches.redo()
    Owner().method(1)
    assert calls == ["ours"]
    patches.undo()


def test_errors_have_no_frame_of_ours_whether_the_call_is_left_alone_or_not() -> None:
    class Owner:
        def method(self, x: int) -> int:
            raise ValueError(x)

    ended: list[Any] = []
    patches = Patches()
    patches.replace(Owner, "method", around(lambda self, x: x or None, lambda begun, result: ended.append(begun)))
    for x in (0, 1):
        with pytest.raises(ValueError, match=str(x)) as found:
            Owner().method(x)
        assert [one.name for one in traceback.extract_tb(found.value.__traceback__)][1:] == ["method"]
    assert ended == [1]
