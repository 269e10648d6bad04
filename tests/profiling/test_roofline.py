"""Classes of operators against made-up ceilings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Gpu, Machine
from flatout.operator_bytes import moves_no_data
from flatout.profiling.operator_classes import operator_class
from flatout.profiling.profile import KernelRow, OperatorClass, OperatorRow
from flatout.profiling.roofline import matrix_units, roofline

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))


def peak(value: float, unit: str) -> Peak:
    return Peak(value=value, low=value, high=value, samples=9, unit=unit, how="made up")


CEILINGS = Ceilings(
    device="cpu",
    gemm_flops_per_second={"fp32": peak(100e9, "FLOP/s"), "bf16": peak(400e9, "FLOP/s")},
    memory_copy_bytes_per_second=peak(10e9, "B/s"),
    quick=False,
    threads=2,
    measured_at="2026-01-01T00:00:00+00:00",
    torch_version="2.13.0",
)


def row(
    kind: OperatorClass,
    *,
    seconds: float = 1.0,
    flops: float | None = None,
    size_bytes: float | None = None,
    dtype: str = "float32",
    name: str = "aten::mm",
    shapes: str = "",
) -> OperatorRow:
    return OperatorRow(
        name=name,
        operator_class=kind,
        shapes=shapes,
        dtype=dtype,
        calls=1,
        seconds=seconds,
        host_seconds=seconds,
        device="cpu",
        flops=flops,
        bytes=size_bytes,
    )


def test_products_are_bound_by_compute_and_pointwise_operators_by_memory() -> None:
    found = roofline(
        [row("matmul", seconds=3, flops=150e9, size_bytes=1e9), row("pointwise", seconds=1, size_bytes=4e9)],
        CEILINGS,
        device="cpu",
    )
    products, pointwise = found
    assert (products.bound, products.share_of_ceiling, products.ceiling_name) == ("compute", 0.5, "fp32 products")
    assert (pointwise.bound, pointwise.share_of_ceiling, pointwise.share) == ("memory", 0.4, 0.25)


def test_thin_products_are_bound_by_memory() -> None:
    (found,) = roofline([row("matmul", seconds=1, flops=1e9, size_bytes=5e9)], CEILINGS, device="cpu")
    assert (found.bound, found.share_of_ceiling) == ("memory", 0.5)


def test_short_calls_are_no_matter_of_ceilings() -> None:
    (found,) = roofline([row("pointwise", seconds=5e-6, size_bytes=1e3)], CEILINGS, device="cpu")
    assert found.reason == "calls of 5 µs are mostly the cost of a call"


def test_operators_without_a_count_do_not_lower_the_rate() -> None:
    rows = [row("matmul", seconds=1, flops=50e9, size_bytes=1e6), row("matmul", seconds=3)]
    (found,) = roofline(rows, CEILINGS, device="cpu")
    assert (found.seconds, found.attained_flops_per_second, found.share_of_ceiling) == (4, 50e9, 0.5)


def test_each_dtype_has_its_own_ceiling() -> None:
    found = roofline(
        [row("matmul", seconds=2, flops=100e9), row("matmul", flops=100e9, dtype="bfloat16")], CEILINGS, device="cpu"
    )
    assert [(one.dtype, one.share_of_ceiling) for one in found] == [("fp32", 0.5), ("bf16", 0.25)]


def test_what_stays_in_caches_says_so() -> None:
    (found,) = roofline([row("pointwise", seconds=1, size_bytes=20e9)], CEILINGS, device="cpu")
    assert found.share_of_ceiling == 2.0
    assert "caches" in found.reason


def test_a_share_of_products_beyond_what_was_measured_says_so() -> None:
    (found,) = roofline([row("matmul", dtype="float32", seconds=1, flops=200e9, size_bytes=1)], CEILINGS, device="cpu")
    assert found.share_of_ceiling == 2.0
    assert found.reason.startswith("above the rate that was measured")


@pytest.mark.parametrize(
    ("ceilings", "device", "dtype", "reason"),
    [
        (None, "cpu", "float32", "were not measured (flatout check --measure)"),
        (CEILINGS, "cuda:0", "float32", "the ceilings of cpu were measured, and the steps ran on cuda:0"),
        (CEILINGS, "cpu", "float16", "the fp16 rate of this device was not measured"),
    ],
)
def test_an_unknown_ceiling_has_a_reason(ceilings: Ceilings | None, device: str, dtype: str, reason: str) -> None:
    (found,) = roofline([row("matmul", flops=1e9, size_bytes=1, dtype=dtype)], ceilings, device=device)
    assert found.share_of_ceiling is None
    assert reason in found.reason


def test_operators_of_no_dtype_have_a_reason_too() -> None:
    (found,) = roofline([row("other", flops=1e9, size_bytes=1)], CEILINGS, device="cpu")
    assert found.reason == "unknown, because the rate of this device was not measured"


def test_the_share_of_products_on_matrix_units_of_a_cpu() -> None:
    rows = [row("matmul", seconds=3, flops=1.0), row("matmul", seconds=1, flops=1.0, dtype="bfloat16")]
    found = matrix_units(rows, (), MACHINE, device="cpu")
    assert found is not None
    assert (found.unit, found.share, found.seconds_on_units) == ("AVX-512 BF16/VNNI", 0.25, 1.0)
    assert found.rest == (("fp32: AVX-512 BF16/VNNI here takes bf16, int8", 3.0),)


def test_where_onednn_chooses_the_share_is_unknown() -> None:
    found = matrix_units([row("matmul", flops=1.0)], (), MACHINE, device="cpu", tf32=True)
    assert found is not None
    assert found.share is None
    assert "nothing says which it does" in found.reason
    half = matrix_units([row("matmul", flops=1.0, dtype="bfloat16")], (), MACHINE, device="cpu", tf32=True)
    assert half is not None
    assert half.share == 1.0


def test_a_plain_cpu_has_none() -> None:
    plain = replace(MACHINE, cpu=replace(MACHINE.cpu, features=("avx2",)))
    found = matrix_units([row("matmul", flops=1.0)], (), plain, device="cpu")
    assert found is not None
    assert (found.share, found.reason) == (None, "this device has no matrix units")
    assert matrix_units([row("pointwise")], (), plain, device="cpu") is None


def test_tensor_cores_by_kernel_then_by_dtype_and_sizes() -> None:
    gpu = Gpu(name="made up", index=0, compute_capability=(9, 0))
    machine = replace(MACHINE, devices=(gpu,), versions=replace(MACHINE.versions, cuda="12.8"))
    rows = [
        row("matmul", name="aten::mm", flops=1.0),
        row("matmul", name="aten::bmm", flops=1.0),
        row("matmul", name="aten::addmm", flops=1.0, dtype="float16", shapes="[64, 64] [64, 30]"),
        row("matmul", name="aten::addmm", flops=1.0, dtype="float16", shapes="[64, 64] [64, 32]"),
    ]
    kernels = [
        KernelRow(name="sm80_xmma_gemm_f32tf32_tensorop", kind="kernel", calls=1, seconds=1, operator="aten::mm"),
        KernelRow(name="ampere_sgemm_128x64_nn", kind="kernel", calls=1, seconds=1, operator="aten::bmm"),
    ]
    found = matrix_units(rows, kernels, machine, device="cuda:0")
    assert found is not None
    assert (found.unit, found.share) == ("Tensor Cores", 0.5)
    assert dict(found.rest) == {
        "its kernel does not use them (ampere_sgemm_128x64_nn)": 1.0,
        "fp16: sizes are not multiples of 8": 1.0,
    }
    tf32 = matrix_units([row("matmul", flops=1.0)], (), machine, device="cuda:0", tf32=True)
    assert tf32 is not None
    assert tf32.share == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "matmul"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mkldnn_rnn_layer", "recurrent"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::_log_softmax", "softmax"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::max_pool2d_with_indices", "reduction"),
        ("aten::_foreach_addcdiv_", "pointwise"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copy"),
        ("c10d::allreduce_", "communication"),
        ("aten::view", "other"),
        ("mylib::anything", "other"),
        ("flatout::linear_gradients", "matmul"),
        ("flatout::gelu_tanh", "pointwise"),
        ("flatout::batch_norm_gradients", "normalisation"),
        ("flash_attn::_flash_attn_backward", "attention"),
        ("autograd::engine::evaluate_function: torch::lstm", "other"),
    ],
)
def test_classes(name: str, expected: str) -> None:
    assert operator_class(name) == expected


def test_views_move_no_data() -> None:
    assert moves_no_data("aten::transpose")
    assert not moves_no_data("aten::clone")
