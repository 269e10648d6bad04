"""flatout export from the command line: exit codes, one document, and no traceback of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(100, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))

class Choosy(Net):
    def forward(self, ids):
        x = super().forward(ids)
        return x if x.sum() > 0 else -x

def made():
    print("made")
    return Net(), torch.zeros(2, 8, dtype=torch.int64)

def broken():
    return Net(), torch.full((2, 8), 100)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "net_to_export.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("net_to_export", None)


@pytest.mark.slow
def test_a_function_that_gives_its_inputs(tmp_path: Path, capsys: Any) -> None:
    command = [
        "export",
        "net_to_export.py:made",
        "--format",
        "pt2,onnx",
        "--out",
        "out/deep",
        "--name",
        "net",
        "--json",
    ]
    assert main(command) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["flatout"]["document"] == "export"
    assert [file["path"] for file in document["files"]] == ["out/deep/net.pt2", "out/deep/net.onnx"]
    assert printed.err == "made\n"
    assert sorted(path.name for path in (tmp_path / "out" / "deep").iterdir()) == ["net.onnx", "net.pt2"]


def test_specs_and_a_failure_that_names_its_line(tmp_path: Path, capsys: Any) -> None:
    command = ["export", "net_to_export:Choosy", "--input", "int64[3,8]<100", "--out", "out"]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "not exported: the module branches on the values of its data" in text
    assert "at net_to_export.py, line 16: return x if x.sum() > 0 else -x" in text
    assert "0 of 1 exported" in text
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothere.py:net"], "no such file: nothere.py"),
        (["net_to_export.py:Net"], "comes without example inputs"),
        (["net_to_export.py:Net", "--input", "int64[2,8]"], "write int64[2,8]<1000"),
        (["net_to_export.py:made", "--format", "tflite"], "format is 'tflite'"),
        (["net_to_export.py:made", "--dynamic", "all"], "'all' is not one of 'batch', 'length', 'none'"),
        (["net_to_export.py:made", "--out", "net_to_export.py"], "cannot make net_to_export.py"),
        (["net_to_export.py:made", "--name", "../x"], "--name is ../x; it is the name of files in the folder of --out"),
        (["net_to_export.py:broken"], "fails on the example inputs at net_to_export.py, line 11"),
        (["net_to_export.py:Net", "--input", "float32[2,8]"], "fails on the example inputs"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: Any) -> None:
    assert main(["export", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") == 1 + ("made" in printed.err)
    assert printed.out == ""
