"""The rules against what torch's profiler sees of the real kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves, tree_map_only

import flatout
from flatout.memory import onednn_workspaces
from flatout.memory.fake_run import FakeRun
from flatout.memory.kernel_workspaces import cpu_workspace
from flatout.memory.onednn_workspaces import instruction_set, rules_were_read_for

aten = torch.ops.aten
BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("one_thread")


def really_held(operation: Any, args: Any) -> int:
    """Peak of the allocator within one call."""
    operation(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("mark"):
        kept = operation(*args)
    events = profiler.profiler.kineto_results.events()
    mark = next(one for one in events if one.name() == "mark")
    inside = [one for one in events if one.name() == "[memory]" and one.start_ns() >= mark.start_ns()]
    held = peak = 0
    for one in sorted(inside, key=lambda one: one.start_ns()):
        held += one.nbytes()
        peak = max(peak, held)
    del kept
    return peak


def forecast(operation: Any, args: Any) -> int:
    """Bytes of the fake results and what the rule adds."""
    world = FakeRun()
    copies = tree_map_only(torch.Tensor, world.fake_copies, args)
    with world:
        out = operation(*copies)
        found = cpu_workspace(operation, copies, {}, out)
        results = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
        sizes = [one.untyped_storage().nbytes() if isinstance(one, torch.Tensor) else 0 for one in results]
    if found is None:
        return sum(sizes)
    for number, size in found.returned_bytes.items():
        sizes[number] = max(sizes[number], size)
    return sum(sizes) + found.inside_bytes


def convolution(dtype: torch.dtype, *, last: bool = False, **changes: Any) -> tuple[Any, Any]:
    x, weight = torch.randn(8, 24, 32, 32, dtype=dtype), torch.randn(40, 24, 3, 3, dtype=dtype)
    if last:
        x, weight = (one.to(memory_format=torch.channels_last) for one in (x, weight))
    stride = changes.get("stride", 1)
    return aten.convolution.default, (x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)


def convolution_backward(dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    operation, args = convolution(dtype, **changes)
    mask = [True, True, False]
    return aten.convolution_backward.default, (torch.ones_like(operation(*args)), *args[:2], None, *args[3:], mask)


def depthwise(kernel: int, last: bool) -> tuple[Any, Any]:
    x, weight = torch.randn(4, 48, 16, 16), torch.randn(48, 1, kernel, kernel)
    if last:
        x = x.to(memory_format=torch.channels_last)
    rest = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 48
    return aten.convolution_backward.default, (torch.ones_like(x), x, weight, None, *rest, [True, True, False])


def transposed() -> tuple[Any, Any]:
    x, weight = torch.randn(8, 32, 16, 16), torch.randn(32, 16, 4, 4)
    return aten.convolution.default, (x, weight, None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)


def lstm(dtype: torch.dtype) -> tuple[Any, Any]:
    x = torch.randn(40, 12, 50, dtype=dtype)
    weights = [torch.randn(size, dtype=dtype) for size in ((280, 50), (280, 70), (280,), (280,))]
    state = torch.zeros(12, 70, dtype=dtype)
    return aten.mkldnn_rnn_layer.default, (
        x,
        *weights,
        state,
        state.clone(),
        False,
        [],
        2,
        70,
        1,
        True,
        False,
        False,
        True,
    )


def batch_norm_backward() -> tuple[Any, Any]:
    x, scale = torch.randn(8, 20, 30, 30), torch.ones(20)
    moments = scale, scale, scale, scale
    return aten.native_batch_norm_backward.default, (x, x, scale, *moments, True, 1e-5, [True] * 3)


def volume(samples: int, *, kernel: int = 3) -> tuple[Any, Any]:
    """What torch leaves to its own kernel, on one thread."""
    x, weight = torch.randn(samples, 16, 12, 12, 12), torch.randn(24, 16, *[kernel] * 3)
    return aten.convolution.default, (x, weight, None, [1] * 3, [kernel // 2] * 3, [1] * 3, False, [0] * 3, 1)


KERNELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "softmax of a transposed": lambda: (aten._log_softmax.default, (torch.randn(5000, 64).t(), 1, False)),
    "mse": lambda: (aten.mse_loss.default, (torch.randn(64, 500), torch.randn(64, 500))),
    "soft margin": lambda: (aten.soft_margin_loss.default, (torch.randn(64, 500), torch.ones(64, 500))),
    "soft margin of each": lambda: (aten.soft_margin_loss.default, (torch.randn(64, 500), torch.ones(64, 500), 0)),
    "abs of complex": lambda: (aten.abs.default, (torch.randn(256, 33, dtype=torch.complex64),)),
    "angle of complex": lambda: (aten.angle.default, (torch.randn(256, 33, dtype=torch.complex64),)),
    "mse in bf16": lambda: (
        aten.mse_loss.default,
        (torch.randn(64, 500, dtype=BF16), torch.randn(64, 500, dtype=BF16)),
    ),
    "mixed dtypes": lambda: (aten.add.Tensor, (torch.randn(64, 500, dtype=BF16), torch.randn(64, 500))),
    "mean in bf16": lambda: (aten.mean.dim, (torch.randn(8, 20, 30, 30, dtype=BF16), [2, 3])),
    "sum over outer and inner": lambda: (aten.sum.dim_IntList, (torch.randn(8, 20, 900, dtype=BF16), [0, 2])),
    "sum over inner": lambda: (aten.sum.dim_IntList, (torch.randn(8, 20, 900, dtype=BF16), [1, 2])),
    "batch norm": batch_norm_backward,
    "upsampling": lambda: (aten.upsample_bilinear2d.default, (torch.randn(4, 16, 24, 24), [48, 48], False)),
    "gather in bf16": lambda: (
        aten.gather.default,
        (torch.randn(64, 500, dtype=BF16), 1, torch.randint(500, (64, 90))),
    ),
    "scatter in bf16": lambda: (
        aten.scatter.src,
        (torch.zeros(64, 500, dtype=BF16), 1, torch.randint(500, (64, 90)), torch.randn(64, 90, dtype=BF16)),
    ),
    "scattered sum in bf16": lambda: (
        aten.scatter_add.default,
        (torch.zeros(64, 500, dtype=BF16), 1, torch.randint(500, (64, 90)), torch.randn(64, 90, dtype=BF16)),
    ),
    "product of batches in no order in bf16": lambda: (
        aten.bmm.default,
        (torch.randn(100, 16, 128, dtype=BF16).permute(1, 0, 2), torch.randn(16, 128, 100, dtype=BF16)),
    ),
    "convolution of one volume": lambda: volume(1),
    "convolution of two volumes by one number": lambda: volume(2, kernel=1),
    "embedding": lambda: (
        aten.embedding_dense_backward.default,
        (torch.randn(60, 9000).t(), torch.randint(90, (9000,)), 90, -1, False),
    ),
}
ONEDNN: dict[str, Callable[[], tuple[Any, Any]]] = {
    "convolution": lambda: convolution(torch.float32),
    "convolution in bf16": lambda: convolution(BF16),
    "convolution, channels last": lambda: convolution(torch.float32, last=True),
    "convolution with a stride": lambda: convolution(torch.float32, stride=2),
    "convolution backward": lambda: convolution_backward(torch.float32),
    "convolution backward in bf16": lambda: convolution_backward(BF16),
    "convolution backward, channels last": lambda: convolution_backward(torch.float32, last=True),
    "convolution backward with a stride": lambda: convolution_backward(torch.float32, stride=2),
    "depthwise backward": lambda: depthwise(3, last=False),
    "wide depthwise backward, channels last": lambda: depthwise(7, last=True),
    "transposed convolution": transposed,
    "lstm": lambda: lstm(torch.float32),
    "lstm in bf16": lambda: lstm(BF16),
}


@pytest.mark.parametrize("name", KERNELS)
def test_rules(name: str) -> None:
    operation, args = KERNELS[name]()
    assert forecast(operation, args) == pytest.approx(really_held(operation, args), rel=0.02)


@pytest.mark.parametrize("name", ONEDNN)
def test_onednn_rules(name: str) -> None:
    operation, args = ONEDNN[name]()
    dtype = next(one.dtype for one in args if isinstance(one, torch.Tensor))
    if not rules_were_read_for(dtype):
        pytest.skip(f"the rules for {dtype} were read on AVX-512 without AMX; here is {instruction_set()}")
    assert forecast(operation, args) == pytest.approx(really_held(operation, args), rel=0.03)


def test_the_lstms_workspace_to_the_byte() -> None:
    operation, args = lstm(torch.float32)
    with torch.enable_grad():
        real = operation(*args)[3].numel()
        found = cpu_workspace(operation, args, {}, None)
    assert found is not None
    if rules_were_read_for(torch.float32):
        assert found.returned_bytes[3] == real


@pytest.mark.parametrize(
    ("capability", "features", "limit", "expected"),
    [
        ("AVX512", ["avx512_bf16"], "", "avx512"),
        ("AVX512", ["avx512_bf16", "amx_bf16"], "", "amx"),
        ("AVX512", ["avx512_bf16", "amx_bf16"], "DEFAULT", "amx"),
        ("AVX512", ["amx_bf16"], "avx512_core_bf16", "avx512"),
        ("AVX512", ["amx_bf16"], "AVX512_CORE_AMX", "amx"),
        ("AVX512", ["avx512_bf16"], "AVX2", "other"),
        ("AVX2", [], "", "other"),
    ],
)
def test_the_instruction_set_that_the_rules_depend_on(
    capability: str, features: list[str], limit: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(cpu=SimpleNamespace(features=features))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn_workspaces, "detect", lambda: machine)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert instruction_set.__wrapped__() == expected


def test_a_forecast_says_where_its_rules_were_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_workspaces, "instruction_set", lambda: "amx")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    loss_fn = flatout.supervised(torch.nn.CrossEntropyLoss())
    plain, bf16 = (
        flatout.forecast(flatout.TrainStep(model, optimizer, loss_fn, flatout.Plan(precision=precision)), batch)
        for precision in (None, "bf16")
    )
    assert (plain.uncertainty, bf16.uncertainty) == (0.03, 0.3)
    assert any("AVX-512 without AMX" in text for text in bf16.not_covered)
    assert not any("AVX-512 without AMX" in text for text in plain.not_covered)


def test_pointwise_operations_of_one_dtype_hold_nothing() -> None:
    x = torch.randn(10)
    assert cpu_workspace(aten.add.Tensor, (x, x), {}, x) is None
    assert cpu_workspace(aten.view.default, (x, [10]), {}, x) is None
