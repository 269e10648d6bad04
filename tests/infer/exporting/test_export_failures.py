"""What cannot be exported: no file, and the reason with the user's own line."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.infer.exporting import export as export_module
from flatout.infer.exporting import formats as export_formats
from flatout.infer.exporting.export import export
from flatout.report.export_text import export_text
from tests.infer.exporting import exportable

ALL = ("pt2", "onnx", "torchscript")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Branch", "the module branches on the values of its data"),
        ("Item", "the module branches on the values of its data"),
        ("Numpy", "the module converts tensors to numpy"),
    ],
)
def test_python_decisions_name_their_line(name: str, what: str, tmp_path: Path, capfd: Any) -> None:
    report = export(getattr(exportable, name)(), torch.rand(3, 4), tmp_path / "net", format=ALL)
    assert not report.ok
    first = report.files[0].failure
    assert first is not None
    assert first.what == what
    assert first.line is not None
    assert first.line.endswith(f"# the line of {name}")
    assert first.limit
    assert first.remedy
    assert all(file.path is None and file.failure is not None for file in report.files)
    assert list(tmp_path.iterdir()) == []
    assert f"# the line of {name}" in export_text(report)
    assert capfd.readouterr() == ("", "")  # torch prints its graph on the way


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ReturnsThing", "returns a .*Thing without a tensor"),
        ("Random", "gives two results for one input"),
        ("Counter", "output differs by"),
        ("FixedReshape", "runs at no batch larger than 3"),
    ],
)
def test_what_no_file_can_hold(name: str, what: str, tmp_path: Path) -> None:
    model = getattr(exportable, name)()
    report = export(model, torch.randn(3, 4), tmp_path / "net", format=ALL)
    for file in report.files:
        assert file.failure is not None
        assert re.search(what, file.failure.what), file
    assert list(tmp_path.iterdir()) == []
    if name == "Counter":
        assert (model.count, model.seen) == (0, [0])


def test_a_fixed_batch_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    model = exportable.OverSamples()
    refused = export(model, torch.randn(3, 4), tmp_path / "net", format=("pt2", "torchscript"))
    assert refused.files[0].failure is not None
    assert refused.files[0].failure.what == "the module works for batch 3 alone"
    assert refused.files[1].failure is not None
    assert "the file fails" in refused.files[1].failure.what
    assert list(tmp_path.iterdir()) == []
    for name in ("OverSamples", "FixedReshape"):
        model = getattr(exportable, name)()
        allowed = export(model, torch.randn(3, 4), tmp_path / "net", format=("pt2", "torchscript"), allow_fixed=True)
        assert allowed.ok
        assert all(file.dynamic == () and "fixed to the example's" in file.notes[0] for file in allowed.files)
        assert {check.batch for check in allowed.files[0].checks} == {3}
        assert "fixed sizes" in export_text(allowed)


def test_a_recurrent_layer_keeps_its_length_but_not_its_batch(tmp_path: Path) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    report = export(Last(), torch.randn(3, 5, 4), tmp_path / "net", dynamic="length")
    assert report.files[0].failure is not None
    assert "step by step" in report.files[0].failure.limit
    report = export(exportable.OneLength(), torch.randn(3, 5, 4), tmp_path / "net", dynamic="length")
    assert report.files[0].failure is not None
    assert report.files[0].failure.what == "the module itself runs at length 5 alone"
    report = export(Last(), torch.randn(3, 5, 4), tmp_path / "net", dynamic="length", allow_fixed=True)
    assert report.files[0].dynamic == ("batch",)
    assert "length is fixed to the example's" in report.files[0].notes[0]


def test_a_wrong_file_is_never_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer exports another module: only the comparison can see it."""
    good = export_formats.EXPORTERS["pt2"]

    def write(job: Any, path: Path) -> None:
        with torch.no_grad():
            job.model.weight[0, 0] += 0.01
        good.write(job, path)
        with torch.no_grad():
            job.model.weight[0, 0] -= 0.01

    monkeypatch.setitem(export_module.EXPORTERS, "pt2", replace(good, write=write))
    (tmp_path / "net.pt2").write_text("old")
    report = export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net.pt2")
    assert report.files[0].failure is not None
    assert "on the example of batch 3, output differs by" in report.files[0].failure.what
    assert (tmp_path / "net.pt2").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    assert export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net.pt2", tolerance=1.0).ok


def test_a_missing_extra_or_compiler_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else found(name, *rest))
    monkeypatch.setattr("shutil.which", lambda name: None)
    report = export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net", format=("aoti", "onnx", "pt2"))
    aoti, onnx, pt2 = report.files
    assert aoti.failure is not None
    assert "no C++ compiler was found" in aoti.failure.what
    assert "install g++" in aoti.failure.remedy
    assert onnx.failure is not None
    assert onnx.failure.what == "onnx is not installed"
    assert onnx.failure.remedy == "pip install onnx"
    assert pt2.failure is None


def test_a_full_disk_is_a_reason_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "net.pt2"))

    monkeypatch.setattr(torch.export, "save", full)
    report = export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net")
    assert report.files[0].failure is not None
    assert "No space left on device" in report.files[0].failure.what
    assert list(tmp_path.iterdir()) == []


def test_executorch_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "executorch" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(export_formats.importlib.util, "find_spec", missing)
    report = export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net", format="executorch", allow_fixed=True)
    failure = report.files[0].failure
    assert failure is not None
    assert failure.what == "executorch is not installed"
    assert failure.remedy == "pip install executorch"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")  # of executorch's own imports
def test_executorch_is_of_fixed_sizes(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    report = export(model, torch.randn(3, 4), tmp_path / "net", format="executorch")
    failure = report.files[0].failure
    assert failure is not None
    assert failure.what.startswith("batch may vary")
    report = export(model, torch.randn(3, 4), tmp_path / "net", format="executorch", allow_fixed=True)
    assert report.ok, report.files[0].failure
    assert report.files[0].dynamic == ()
    assert (tmp_path / "net.pte").stat().st_size == report.files[0].bytes
    assert len(report.files[0].checks) > 1
