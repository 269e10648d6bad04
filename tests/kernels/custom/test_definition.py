"""A user's file is read, and every mistake in it has a sentence of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.kernels.custom.definition import read_definition
from tests.kernels.custom.definitions import written

GOOD = """
def kernel(x, w): return x * w
def reference(x, w): return x * w
inputs = ("float[rows, width]", "float[width]")
"""


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in set(sys.modules) - before:
        if "written_kernel" in name:
            del sys.modules[name]


def test_a_file(tmp_path: Path) -> None:
    found = written(tmp_path, GOOD + "tolerance = 0.1\nsizes = {'width': range(8, 33, 8)}\nmutates = 0\n")
    assert found.labels == ("x", "w")
    assert found.size_names == ("rows", "width")
    assert found.sizes == {"width": range(8, 33, 8)}
    assert found.mutates == (0,)
    assert found.tolerance["bfloat16"] == 0.1
    assert found.kernel(2, 3) == 6


def test_a_class_and_a_dict_of_a_file(tmp_path: Path) -> None:
    text = GOOD.replace("\n", "\n    ").strip()
    (tmp_path / "written_kernel_b.py").write_text(f"class Scale:\n    {text}\nd = {{'kernel': abs, **vars(Scale)}}\n")
    for name in ("Scale", "d"):
        found = read_definition(f"{tmp_path}/written_kernel_b.py:{name}")
        assert found.kernel(2, 3) == 6
        assert found.labels == ("x", "w")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("def reference", "def referense"), "has no reference.*did you mean referense"),
        (GOOD.replace("inputs =", "input ="), "has no inputs.*did you mean input"),
        (f"class A:\n  kernel = reference = abs\n{GOOD.replace('kernel', 'other')}", "name one of A after a colon"),
        (GOOD.replace("float[width]", "flot[width]"), "did you mean float"),
        (GOOD.replace(', "float[width]"', ","), "missing a required argument: 'w'"),
        (GOOD + "kernel = 3", "kernel is 3"),
        (GOOD + "inputs = 'float[n]'", "it is a tuple"),
        (GOOD + "inputs = (1, 2)", "at least one of them is a tensor"),
        (GOOD + "dtypes = ('float31',)", "did you mean float32"),
        (GOOD + "dtypes = 3", "dtypes has 3"),
        (GOOD + "layouts = ('contigous',)", "did you mean contiguous"),
        (GOOD + "sizes = {'widht': 8}", "sizes has 'widht'.*did you mean width"),
        (GOOD + "sizes = {'width': 0.5}", "sizes has width: 0.5"),
        (GOOD + "sizes = {'width': range(0)}", "sizes has width"),
        (GOOD + "mutates = (2,)", "mutates has 2"),
        (GOOD + "tolerance = 'low'", "tolerance is 'low'"),
        (GOOD + "tolerance = {'float99': 1}", "tolerance has 'float99'"),
        (GOOD + "gradient = 1", "gradient is 1"),
        (GOOD + "timing = {'width': 0}", "timing is"),
        ("x = 1 / 0", "written_kernel.py, line 1: ZeroDivisionError"),
        ("def f(:", "line 1: SyntaxError"),
        ("x = 1\0", r"written_kernel.py: SyntaxError: .*null bytes"),
        ("import no_such_module_here", "no module named 'no_such_module_here'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){said}"):
        written(tmp_path, text)


@pytest.mark.parametrize(("target", "said"), [("a.txt", "FILE.py"), ("b.py", "no such file: b.py"), ("c.py:x", "c.py")])
def test_a_file_that_is_not_there(target: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_definition(target)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "written_kernel_c.py").write_text("class Scale: pass\n")
    with pytest.raises(UsageError, match="did you mean Scale"):
        read_definition(f"{tmp_path}/written_kernel_c.py:scale")
