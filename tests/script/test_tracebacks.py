"""No frame of ours in what a reader sees."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flatout
from flatout.memory.tracking import Tracker
from flatout.script.patches import ImportWatch
from flatout.tracebacks import installed_package, is_users_file, own_frames_removed

HERE = str(Path(flatout.__file__).parent)


def ours(source: str, **names: object) -> ModuleType:
    """Code that Python takes for a file of this package."""
    module = ModuleType("ours")
    vars(module).update(names)
    exec(compile(source, f"{HERE}/script/made_up.py", "exec"), vars(module))
    return module


def theirs() -> None:
    raise ValueError("theirs")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(own_frames_removed(error)))


def test_frames_go_from_causes_contexts_and_groups() -> None:
    module = ours(
        """
def call(f): f()
def chained(f):
    try: f()
    except ValueError as error: raise TypeError('from') from error
def grouped(f):
    try: chained(f)
    except TypeError as error: raise ExceptionGroup('both', [error, KeyError(1)])
""",
    )
    for wrapper in (module.call, module.chained, module.grouped):
        with pytest.raises((ValueError, TypeError, ExceptionGroup)) as caught:
            wrapper(theirs)
        assert "made_up.py" in "".join(traceback.format_exception(caught.value))
        text = shown(caught.value)
        assert "made_up.py" not in text
        assert "in theirs" in text


def test_a_circle_of_exceptions_ends() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert own_frames_removed(first) is first


def test_a_watched_import_that_fails_shows_no_machinery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_as_it_loads.py").write_text("raise OSError('no library')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fail() -> str:
        with pytest.raises(OSError, match="no library") as caught:
            __import__("fails_as_it_loads")
        return shown(caught.value)

    plain = fail()
    watch = ImportWatch({"fails_as_it_loads": lambda module: None})
    watch.install()
    try:
        watched = fail()
    finally:
        watch.remove()
    assert watched == plain
    assert "fails_as_it_loads.py" in plain
    assert "fails_as_it_loads" not in sys.modules


def test_the_frames_that_following_operations_adds_go_too() -> None:
    tracker = Tracker(attributed=False)
    error: BaseException | None = None
    try:
        with tracker:
            torch.empty(1 << 60)
    except RuntimeError as caught:
        error = caught
    assert error is not None
    assert "/torch/" not in shown(error)


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/venv/lib/python3.11/site-packages/click/core.py", "click"),
        ("/usr/lib/python3/dist-packages/six.py", "six.py"),
        ("/work/ml-packages/train.py", None),
        ("/home/site-packages-of-mine/net.py", None),
    ],
)
def test_a_file_of_a_library_is_below_its_folder(file: str, package: str | None) -> None:
    assert installed_package(file) == package
    assert is_users_file(file) == (package is None)
