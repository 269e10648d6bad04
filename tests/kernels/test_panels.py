"""Products of a few rows by the native kernel: against torch's, in every format, shape and build."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.errors import MachineError
from flatout.kernels import native as native_module
from flatout.kernels import panels as panels_module
from flatout.kernels.native import Native, native
from flatout.kernels.panels import Panels, pack_dense, pack_int4, pack_int8, product
from flatout.precision.quantize import (
    dequantize_groups_int4,
    dequantize_rows_int8,
    quantize_groups_int4,
    quantize_rows_int8,
)

FORMS = ["fp32", "bf16", "int8", "int4"]


def packed(form: str, weight: Tensor, bias: Tensor | None) -> tuple[Panels, Tensor]:
    """The panels, and the weights that they stand for in fp64."""
    if form == "int8":
        values, scales = quantize_rows_int8(weight)
        return pack_int8(values, scales, bias), dequantize_rows_int8(values, scales).double()
    if form == "int4":
        values, scales = quantize_groups_int4(weight)
        kept = scales.bfloat16().float()  # as they are held
        return pack_int4(values, scales, bias), dequantize_groups_int4(values, kept).double()
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    return pack_dense(weight, bias, dtype), weight.to(dtype).double()


@pytest.fixture(params=["this processor", "any processor"])
def _build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """The kernel with this processor's instructions, and once more in portable C++."""
    if native().library is None:
        pytest.skip(native().reason)
    if request.param == "any processor":
        library = _portable(tmp_path_factory.getbasetemp())
        monkeypatch.setattr(panels_module, "native", lambda: Native(library=library, reason=""))


def _portable(folder: Path) -> ctypes.CDLL:
    target = folder / "portable.so"
    if not target.exists():
        source = native_module.SOURCES / "decoder.cpp"
        subprocess.run(["g++", *native_module._FLAGS, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (16, 64), (17, 96), (50, 160), (130, 32)])
def test_a_product_is_that_of_the_weights_held(form: str, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    panels, held = packed(form, weight, bias)
    for rows in (1, 2, 7, 8, 9, 20):
        x = torch.randn(rows, inputs, generator=generator)
        expected = x.double() @ held.T + bias
        error = (product(panels, x) - expected).abs().max() / (x.double().abs() @ held.abs().T).max()
        assert error < (4e-3 if form == "bf16" else 1e-4), (form, rows)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.usefixtures("_build")
def test_inputs_that_fill_no_group(form: str) -> None:
    weight = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    panels, held = packed(form, weight, None)
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(panels, x).double(), x.double() @ held.T, rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
def test_a_row_comes_out_the_same_alone_and_among_others(form: str) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    x = torch.randn(21, 128, generator=torch.Generator().manual_seed(1))
    panels, _ = packed(form, weight, None)
    together = product(panels, x)
    for row in (0, 8, 20):
        assert torch.equal(product(panels, x[row : row + 1])[0], together[row])


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(form: str, bad: float) -> None:
    panels, _ = packed(form, torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), None)
    x = torch.ones(2, 64)
    x[1, 5] = bad
    y = product(panels, x)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_one_huge_input_leaves_other_groups_exact(form: str) -> None:
    """Inputs are rounded group by group: an outlier must not take the bits of the others."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 1e4
    weight[:, :64] = 0.0
    panels, held = packed(form, weight, None)
    error = (product(panels, x).double() - x.double() @ held.T).abs().max()
    assert error < 5e-3, "the other groups kept their precision"


@pytest.mark.usefixtures("_build")
def test_zeros() -> None:
    panels, _ = packed("int8", torch.zeros(16, 64), torch.ones(16))
    assert torch.equal(product(panels, torch.zeros(1, 64)), torch.ones(1, 16))


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    native.cache_clear()
    try:
        assert native().library is None
        assert native().reason == "there is no C++ compiler 'no-such-compiler'"
        with pytest.raises(MachineError, match=r"no C\+\+ compiler 'no-such-compiler'; install a C\+\+ compiler"):
            product(pack_dense(torch.eye(3), None, torch.float32), torch.zeros(1, 3))
    finally:
        native.cache_clear()


def test_a_compiler_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    native.cache_clear()
    try:
        assert native().library is None
        assert "did not build it: x.cpp:1: error: no such header" in native().reason
        assert list((tmp_path / "cache" / "native").iterdir()) == [], "nothing half made is left"
    finally:
        native.cache_clear()
