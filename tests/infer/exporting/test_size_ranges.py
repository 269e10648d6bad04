"""A branch on a size is found: stated where the file checks sizes, refused where it would be wrong in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatout.infer.exporting.export import export
from flatout.report.export_text import export_document, export_text


class Branch(nn.Module):
    def __init__(self, beyond: Callable[[torch.Size], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.beyond = nn.Linear(4, 4), beyond

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if self.beyond(x.shape) else y


@pytest.mark.parametrize(
    ("beyond", "smallest", "largest", "refused", "reason"),
    [
        (lambda shape: shape[1] > 20, 1, 20, (21,), "<= 20"),
        (lambda shape: shape[1] < 5, 5, None, (1, 4), ">= 5"),
        (lambda shape: shape[0] * shape[1] > 100, 1, 33, (34,), "<= 100"),
    ],
)
def test_a_branch_on_the_length(
    beyond: Callable[[torch.Size], bool],
    smallest: int,
    largest: int | None,
    refused: tuple[int, ...],
    reason: str,
    tmp_path: Path,
) -> None:
    report = export(
        Branch(beyond), torch.randn(3, 6, 4), tmp_path / "net", format=("pt2", "torchscript"), dynamic="length"
    )
    pt2, script = report.files
    assert pt2.failure is None, pt2
    (length,) = (one for one in pt2.ranges if one.name == "length")
    assert (length.smallest, length.largest) == (smallest, largest)
    assert set(refused) <= set(length.refused)
    assert reason in length.reason
    assert (largest or smallest) in length.tested
    assert script.failure is not None
    assert "gives other results than the module" in script.failure.what
    assert "use pt2" in script.failure.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.pt2"]


def test_a_branch_on_the_batch_is_no_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    report = export(Branch(lambda shape: shape[0] > 64), torch.randn(3, 4), tmp_path / "net", format=("pt2", "onnx"))
    pt2, onnx = report.files
    assert pt2.ranges[0].tested == (1, 2, 3, 4, 7, 64)
    assert onnx.failure is not None
    assert onnx.failure.what == "at batch 65 the file gives other results than the module, without an error"
    assert "batch 1 to 64 (x.size()[0] <= 64); the file refuses 65" in export_text(report)
    document = json.loads(json.dumps(export_document(report), allow_nan=False))
    assert document["files"][0]["ranges"][0]["largest"] == 64
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    with pytest.raises(AssertionError, match="64"):
        loaded(torch.randn(65, 4))


def test_a_bound_that_changes_nothing_is_no_reason(tmp_path: Path) -> None:
    """The other branch gives the same: torch guards it all the same, and the file is right past it."""

    class Same(Branch):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.shape[0] > 9 else self.linear(x) + 0.0

    report = export(Same(bool), torch.randn(3, 4), tmp_path / "net", format=("pt2", "torchscript"))
    assert report.ok, export_text(report)
    assert report.files[0].ranges[0].refused == (10,)
    assert report.files[1].ranges[0].refused == ()


def test_a_bound_between_the_sizes_that_are_checked_anyway(tmp_path: Path) -> None:
    """Batch 7 is checked as one of the usual sizes, and as the first one past the bound."""
    (file,) = export(Branch(lambda shape: shape[0] > 6), torch.randn(3, 4), tmp_path / "net").files
    assert file.failure is None
    assert (file.ranges[0].largest, file.ranges[0].refused) == (6, (7,))
