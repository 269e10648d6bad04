"""Rates of a GPU put to operators, by hand-computed cases and by what was measured on one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.machine.published_peaks import catalogue_entry
from flatout.predicted_time.gpu_rates import H100, KINDS, GpuModel, Rate, gpu_time, ideal_seconds, kind_of
from flatout.profiling.step_operators import Operator

GPU = catalogue_entry("h100")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "whatif_h100.json"


def product(**changes: object) -> Operator:
    values: dict[str, object] = {
        "name": "aten::mm",
        "operator_class": "matmul",
        "part": "forward",
        "shapes": ((512, 1024), (1024, 2048)),
        "dtype": "float32",
        "calls": 3.0,
        "flops": 6e12,
        "bytes": 1e6,
    }
    return Operator(**{**values, **changes})  # type: ignore[arg-type]


def test_every_kind_has_a_rate_and_every_part_a_cost() -> None:
    assert H100.rates.keys() == KINDS
    assert all(rate.share > 0 and rate.seconds_per_call >= 0 for rate in H100.rates.values())
    assert H100.host_seconds.keys() == {"forward", "backward", "optimizer", "time step"}


@pytest.mark.parametrize(
    ("operator", "tf32", "kind", "seconds"),
    [
        (product(), False, "matmul, fp32", 6e12 / GPU.flops_per_second["fp32"]),
        (product(), True, "matmul, tf32", 6e12 / GPU.flops_per_second["tf32"]),
        (product(dtype="bfloat16"), False, "matmul, half", 6e12 / GPU.flops_per_second["bf16"]),
        (product(bytes=1e13), False, "matmul, fp32", 1e13 / GPU.memory_bytes_per_second),
        (
            product(dtype="bfloat16", shapes=((512, 1024), (1024, 2047))),
            False,
            "matmul, half",
            5 * 6e12 / GPU.flops_per_second["bf16"],
        ),
        (
            product(name="aten::add", operator_class="pointwise", flops=0.0, bytes=1e9),
            True,
            "pointwise",
            1e9 / GPU.memory_bytes_per_second,
        ),
    ],
)
def test_the_longer_of_computing_and_moving(operator: Operator, tf32: bool, kind: str, seconds: float) -> None:
    assert kind_of(operator, tf32=tf32) == kind
    assert ideal_seconds(operator, GPU, tf32=tf32) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "operator_class", "part", "dtype", "kind"),
    [
        ("aten::convolution_backward", "convolution", "backward", "float32", "convolution backward, fp32"),
        ("aten::native_batch_norm", "normalisation", "forward", "bfloat16", "batch norm, half"),
        ("aten::native_layer_norm_backward", "normalisation", "backward", "float32", "normalisation backward"),
        ("aten::_foreach_add_", "pointwise", "optimizer", "float32", "optimizer"),
        ("aten::gelu_backward", "pointwise", "backward", "float32", "pointwise"),
        ("aten::mkldnn_rnn_layer", "recurrent", "forward", "float32", "recurrent, fp32"),
        ("aten::whatever", "other", "forward", "float32", "pointwise"),
    ],
)
def test_kinds(name: str, operator_class: str, part: str, dtype: str, kind: str) -> None:
    one = product(name=name, operator_class=operator_class, part=part, dtype=dtype)
    assert kind_of(one, tf32=False) == kind


def test_time_of_device_and_host() -> None:
    model = GpuModel(
        rates={kind: Rate(1e-6, 0.5) for kind in KINDS},
        host_seconds={"forward": 1.0, "backward": 2.0, "optimizer": 4.0, "time step": 0.1},
    )
    found = gpu_time([product(), product(part="backward", calls=1.0)], GPU, model, tf32=False)
    ideal = 6e12 / GPU.flops_per_second["fp32"]
    assert found.device_seconds == pytest.approx(4e-6 + 2 * ideal / 0.5)
    assert found.host_seconds == pytest.approx(3 + 2)
    assert found.step_seconds >= max(found.device_seconds, found.host_seconds)
    recurrent = product(name="aten::mkldnn_rnn_layer", operator_class="recurrent", shapes=((100, 8, 4),), calls=2.0)
    assert gpu_time([recurrent], GPU, model, tf32=False).host_seconds == pytest.approx(2 * 1.0 + 200 * 0.1)


def test_a_gpu_without_the_dtype_says_which() -> None:
    with pytest.raises(KeyError, match="bf16"):
        gpu_time([product(dtype="bfloat16")], catalogue_entry("t4"), H100, tf32=False)


def test_a_gpu_where_tf32_is_no_faster() -> None:
    entry = catalogue_entry("t4")
    plain = replace(entry, flops_per_second={"fp32": 8e12})
    assert ideal_seconds(product(), plain, tf32=True) == pytest.approx(6e12 / 8e12)


def test_the_errors_that_the_documentation_states() -> None:
    """Left out of the fit, without the one recurrent model: half within 15 %, nine in ten within 30 %."""
    errors = json.loads(MEASURED.read_text())["errors"]["left out, without the recurrent model"]
    assert errors["median"] < 0.15
    assert errors["nine in ten"] < 0.3


def test_products_in_fp64_have_no_rate() -> None:
    with pytest.raises(KeyError, match="float64"):
        gpu_time([product(dtype="float64")], catalogue_entry("rtx-4090"), H100, tf32=True)
