"""Exports of modules, inputs and places that are out of the ordinary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.exporting.export import export
from flatout.infer.exporting.report import ExportReport
from flatout.infer.exporting.trace import failure_of


def failed(report: ExportReport) -> str:
    (file,) = report.files
    assert file.failure is not None
    assert file.path is None
    return file.failure.what


def test_arrays_that_torch_does_not_take(tmp_path: Path) -> None:
    flipped, fixed = np.ones((3, 4), np.float32)[::-1], np.ones((3, 4), ">f4")
    fixed.setflags(write=False)
    for number, array in enumerate((flipped, fixed)):
        assert export(nn.Linear(4, 2), array, tmp_path / f"net{number}").ok


class Doing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Any:
        call = next(self.calls)
        if self.what == "fails":
            if call > 1:
                raise ValueError("once is enough")
            return x
        if self.what == "counts":
            return (x,) * (1 + call % 2)
        return x.to_sparse() if self.what == "sparse" else {0: x, "0": x + 1}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fails", "ValueError: once is enough"),
        ("counts", "two results for one input (2 tensors, then 1)"),
        ("sparse", "output is a sparse tensor"),
        ("keys", "output has keys that are the same as texts: 0, '0'"),
    ],
)
def test_what_cannot_be_verified_is_in_the_report(what: str, says: str, tmp_path: Path) -> None:
    assert says in failed(export(Doing(what), torch.eye(4), tmp_path / "net"))
    assert list(tmp_path.iterdir()) == []


def test_keys_that_are_no_texts_are_said(tmp_path: Path) -> None:
    class Numbered(nn.Module):
        def forward(self, x: Tensor) -> dict[int, Tensor]:
            return {3: x + 1, 5: x + 2}

    report = export(Numbered(), torch.eye(4), tmp_path / "net")
    assert report.ok
    assert report.notes == ("output's keys are texts in the file: '3', '5'",)


def test_inputs_of_keywords_alone(tmp_path: Path) -> None:
    class Keywords(nn.Module):
        def forward(self, **batch: Tensor) -> Tensor:
            return batch["x"] + 1

    inputs = {"x": torch.ones(3, 4)}
    assert "forward takes x as **batch" in failed(export(Keywords(), inputs, tmp_path / "net"))
    assert export(Keywords(), inputs, tmp_path / "net", dynamic="none").ok


def test_an_autocast_around_the_call_is_not_in_the_file(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert export(model, x, tmp_path / "net").ok
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(x), model(x))


def test_the_example_is_not_written_to(tmp_path: Path) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) + 1

    x = torch.ones(3, 4)
    assert export(Doubling(), x, tmp_path / "net", format="torchscript").ok
    assert float(x.sum()) == 12


def test_16_bit_images(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float() / 65535

    x = torch.tensor([[1, 40000], [7, 65535]]).to(torch.uint16)
    assert export(Scaled(), x, tmp_path / "net").ok


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "weights", tmp_path / "net.pt2"
    real.write_text("old")
    link.symlink_to(real)
    assert export(nn.Linear(4, 2), torch.ones(3, 4), link).ok
    assert link.is_symlink()
    assert real.read_bytes()[:2] == b"PK"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["net.pt2", "weights"]


def test_a_folder_where_a_file_is_to_be(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").mkdir()
    with pytest.raises(UsageError, match=r"net.onnx is a folder; an export is a file; choose another name"):
        export(nn.Linear(4, 2), torch.ones(3, 4), tmp_path / "net", format=("pt2", "onnx"))


def test_a_long_name(tmp_path: Path) -> None:
    assert export(nn.Linear(4, 2), torch.ones(3, 4), tmp_path / ("n" * 240)).ok


def test_an_error_of_the_system_without_a_file_names_none() -> None:
    assert failure_of(OSError(28, "No space left on device")).what == "No space left on device"


def test_a_parametrized_module(tmp_path: Path) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    assert export(model, torch.ones(3, 4), tmp_path / "net").ok
    assert not model._forward_hooks
