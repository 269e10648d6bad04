"""Products of a few rows by the native kernel: against torch's, in every format, shape and build."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.errors import MachineError, UsageError
from flatout.kernels import native as native_module
from flatout.kernels.native import Native, native
from flatout.kernels.panels import BFLOAT16, FLOAT, INT4, INT8, Panels, pack
from flatout.precision.quantize import quantize_groups_int4, quantize_rows_int8
from tests.kernels.unpacking import product, unpacked
from tests.odd_defaults import odd_defaults
from tests.precision.dequantized import dequantize_groups_int4, dequantize_rows_int8

FORMS = [FLOAT, BFLOAT16, INT8, INT4]


def packed(form: int, weight: Tensor, bias: Tensor | None) -> tuple[Panels, Tensor]:
    """The panels, and the weights that they stand for in fp64."""
    panels = pack([weight], bias, form)
    return panels, unpacked(panels).double()


@pytest.fixture(params=["this processor", "any processor"])
def _build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """The kernel with this processor's instructions, and once more in portable C++."""
    if native().library is None:
        pytest.skip(native().reason)
    if request.param == "any processor":
        library = _portable(tmp_path_factory.getbasetemp())
        monkeypatch.setattr(native_module, "native", lambda name: Native(library=library, reason=""))


def _portable(folder: Path) -> ctypes.CDLL:
    target = folder / "portable.so"
    if not target.exists():
        source = native_module.SOURCES / "decoder.cpp"
        subprocess.run(["g++", *native_module._FLAGS, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (16, 64), (17, 96), (50, 160), (130, 32)])
def test_a_product_is_that_of_the_weights_held(form: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    panels, held = packed(form, weight, bias)
    for rows in (1, 2, 7, 8, 9, 20):
        x = torch.randn(rows, inputs, generator=generator)
        expected = x.double() @ held.T + bias
        error = (product(panels, x) - expected).abs().max() / (x.double().abs() @ held.abs().T).max()
        assert error < (4e-3 if form == BFLOAT16 else 1e-4), (form, rows)


@pytest.mark.parametrize("form", [FLOAT, BFLOAT16, INT8])
@pytest.mark.usefixtures("_build")
def test_inputs_that_fill_no_group(form: int) -> None:
    weight = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    panels, held = packed(form, weight, None)
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(panels, x).double(), x.double() @ held.T, rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
def test_a_row_comes_out_the_same_alone_and_among_others(form: int) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    x = torch.randn(21, 128, generator=torch.Generator().manual_seed(1))
    panels, _ = packed(form, weight, None)
    together = product(panels, x)
    for row in (0, 8, 20):
        assert torch.equal(product(panels, x[row : row + 1])[0], together[row])


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(form: int, bad: float) -> None:
    panels, _ = packed(form, torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), None)
    x = torch.ones(2, 64)
    x[1, 5] = bad
    y = product(panels, x)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", [INT8, INT4])
def test_one_huge_input_leaves_other_groups_exact(form: int) -> None:
    """Inputs are rounded group by group: an outlier must not take the bits of the others."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 1e4
    weight[:, :64] = 0.0
    panels, held = packed(form, weight, None)
    error = (product(panels, x).double() - x.double() @ held.T).abs().max()
    assert error < 5e-3, "the other groups kept their precision"


def _lain(how: str, weight: Tensor) -> list[Tensor]:
    """The same matrix as models hold it."""
    if how == "transposed":
        return [weight.t().contiguous().t()]
    if how == "in parts":
        return [weight[:5], weight[5:6], weight[6:]]
    if how == "every other column":
        wide = torch.zeros(weight.shape[0], 2 * weight.shape[1])
        wide[:, ::2] = weight
        return [wide[:, ::2]]
    return [weight.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[how])]


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("shape", [(7, 32), (50, 160), (33, 64)])
@pytest.mark.parametrize("how", ["transposed", "in parts", "every other column", "bf16", "fp16", "fp64"])
def test_panels_stand_for_the_weights_however_they_lie(how: str, shape: tuple[int, int]) -> None:
    parts = _lain(how, torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])))
    weight = torch.cat([one.float() for one in parts])
    assert torch.equal(unpacked(pack(parts, None, FLOAT)), weight)
    assert torch.equal(unpacked(pack(parts, None, BFLOAT16)), weight.bfloat16().float())
    assert torch.equal(unpacked(pack(parts, None, INT8)), dequantize_rows_int8(*quantize_rows_int8(weight)))
    values, scales = quantize_groups_int4(weight)
    by_torch = dequantize_groups_int4(values, scales.bfloat16().float())
    error, least = ((one - weight).square().sum() for one in (unpacked(pack(parts, None, INT4)), by_torch))
    assert error <= 1.001 * least  # two scales as good as each other may be chosen differently


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("form", [INT8, INT4])
def test_weights_of_any_size(form: int, size: float) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * size
    found = unpacked(pack([weight], None, form))
    assert found.isfinite().all()
    assert (found - weight).abs().max() <= (0.3 if size > 1e-35 else 5.0) * size  # so small a scale is 1


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_whole_numbers_for_what_is_not_finite_are_refused(form: int, bad: float) -> None:
    weight = torch.ones(40, 64)
    weight[33, 7] = bad
    with pytest.raises(UsageError, match="1 of 2560 weights are inf or NaN; whole numbers stand for neither"):
        pack([weight], None, form)


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("form", FORMS)
def test_what_the_user_set_for_new_tensors_changes_nothing(form: int) -> None:
    weight, bias, x = torch.randn(5, 64), torch.randn(5), torch.randn(3, 64)
    expected = product(pack([weight], bias, form), x)
    with odd_defaults():
        found = product(pack([weight], bias, form), x)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("_build")
def test_zeros() -> None:
    panels, _ = packed(INT8, torch.zeros(16, 64), torch.ones(16))
    assert torch.equal(product(panels, torch.zeros(1, 64)), torch.ones(1, 16))


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    native.cache_clear()
    try:
        assert native().library is None
        assert native().reason == "there is no C++ compiler 'no-such-compiler'"
        with pytest.raises(MachineError, match=r"no C\+\+ compiler 'no-such-compiler'; install a C\+\+ compiler"):
            product(pack([torch.eye(3)], None, FLOAT), torch.zeros(1, 3))
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
