"""flatout kernel check from the command line: exit codes, one document, no traceback of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main

WRONG = """
print("printed by the file")
def kernel(x):
    return 2 * x + (x.shape[0] > 8)
def reference(x):
    return 2 * x
inputs, dtypes, layouts, gradient, compiles = ("float[n]",), "float32", "contiguous", False, False
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "wrong.py").write_text(WRONG)


@pytest.mark.slow
def test_a_wrong_kernel_as_a_document(capsys: Any) -> None:
    assert main(["kernel", "check", "wrong.py", "--quick", "--no-timing", "--device", "cpu", "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["flatout"]["document"] == "kernel-check"
    assert document["ok"] is False
    forward = next(one for one in document["properties"] if one["name"] == "forward")
    assert forward["verdict"] == "failed"
    assert forward["failure"]["case"] == "n=9, float32"
    assert printed.err == "wrong.py is executed now, in a process of its own\n"


@pytest.mark.slow
def test_a_right_kernel_as_text(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "right.py").write_text(WRONG.replace(" + (x.shape[0] > 8)", ""))
    assert main(["kernel", "check", "right.py", "--quick", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "\nforward     passed   " in text
    assert "as fast as the reference" in text
    assert "\nverdict     right in " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "absent.py"], "no such file: absent.py"),
        (["check", "wrong.txt"], "the file is 'wrong.txt'"),
        (["check", "wrong.py", "--timeout", "soon"], "'soon' is not a duration"),
        (["check", "wrong.py", "--cases", "-1"], "cases is -1"),
        (["check", "wrong.py", "--device", "tpu"], "--device is 'tpu'"),
        (["chek", "wrong.py"], "'chek' is not one of 'check'"),
        ([], "Missing argument"),
    ],
)
def test_usage_errors(words: list[str], said: str, capsys: Any) -> None:
    assert main(["kernel", *words]) == 2
    assert said in capsys.readouterr().err
