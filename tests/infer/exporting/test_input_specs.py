"""Example inputs as a person types them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.exporting.input_specs import example_inputs, inputs_from
from tests.odd_defaults import odd_defaults


class Two(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids if mask is None else ids * mask


def test_specs() -> None:
    args, kwargs = inputs_from(["int64[2, 16]<10", "float32[3]", "uint8[]<3", "mask=bool[4,2]", "x=int32[9]5..7"])
    assert [(one.dtype, list(one.shape)) for one in args] == [
        (torch.int64, [2, 16]),
        (torch.float32, [3]),
        (torch.uint8, []),
    ]
    assert int(args[0].max()) < 10
    assert kwargs["mask"].dtype is torch.bool
    assert set(kwargs["x"].tolist()) <= {5, 6}
    again = inputs_from(["int64[2, 16]<10"])[0][0]
    assert torch.equal(args[0], again)
    with odd_defaults():
        for one, other in zip(inputs_from(["int64[2, 16]<10", "float32[3]"])[0], args, strict=False):
            assert torch.equal(one, other)


def test_positional_beside_named_and_files(tmp_path: Path) -> None:
    assert list(example_inputs(Two(), ["mask=bool[2]", "int64[2]<3"])) == ["ids", "mask"]
    assert isinstance(example_inputs(Two(), ["int64[2]<3"]), tuple)
    both = {"ids": torch.ones(2), "mask": torch.zeros(2)}
    save_file(both, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", ids=np.ones(2), mask=np.zeros(2))
    torch.save(both, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.npz", "a.pt"):
        assert set(example_inputs(Two(), [str(tmp_path / name)])) == {"ids", "mask"}
    torch.save((torch.ones(2), torch.zeros(2)), tmp_path / "b.pt")
    assert len(example_inputs(Two(), [str(tmp_path / "b.pt")])) == 2
    np.savez(tmp_path / "one.npz", whatever=np.ones(2))
    assert isinstance(example_inputs(Two(), [str(tmp_path / "one.npz")]), tuple)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int64(2,16)", r"the input is 'int64\(2,16\)'; an input is"),
        ("int63[2]", "the input is 'int63.*dtypes are float64"),
        ("int64[2,16]", r"how large.*write int64\[2,16\]<1000"),
        ("int8[2]<1000", "int8 goes to 127"),
        ("int64[2]<0", "leaves no number"),
        ("float32[2]<5", "only whole numbers have one"),
        ("float32[99999999999999999999,4]", "an example of at most 8 GiB is drawn"),
        ("x=float32[2]", r"forward does not take x \(missing.*it is forward\(ids"),
        ("nowhere.npz", "no such file: nowhere.npz"),
        ("junk.npz", "junk.npz cannot be read"),
        ("junk.pt", "junk.pt cannot be read"),
        ("junk.safetensors", "junk.safetensors cannot be read"),
        ("pickled.pt", "pickled.pt cannot be read"),
        ("number.pt", "number.pt holds a int"),
    ],
)
def test_bad_specs(spec: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("junk.npz", "junk.pt", "junk.safetensors"):
        (tmp_path / name).write_bytes(b"junk")
    torch.save(Two(), tmp_path / "pickled.pt")
    torch.save(7, tmp_path / "number.pt")
    with pytest.raises(UsageError, match=says):
        example_inputs(Two(), [spec])


def test_a_name_that_is_given_twice(tmp_path: Path) -> None:
    np.savez(tmp_path / "batch.npz", ids=np.arange(6), mask=np.ones(6))
    for specs in (["ids=int64[6]<5", f"{tmp_path}/batch.npz"], [f"{tmp_path}/batch.npz", "ids=int64[6]<5"]):
        with pytest.raises(UsageError, match="the input 'ids' is given twice"):
            inputs_from(specs)
    with pytest.raises(UsageError, match="the input 'mask' is given twice"):
        inputs_from(["mask=bool[2]", "mask=bool[3]"])


def test_too_many_without_a_name() -> None:
    with pytest.raises(UsageError, match="2 inputs have no name"):
        example_inputs(Two(), ["bool[2]", "bool[2]", "mask=bool[2]"])
