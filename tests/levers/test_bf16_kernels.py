"""Linear layers, attention and GELU of a model by Flatout's kernels: where, with which numbers, and undone again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flatout import Plan, TrainStep, supervised
from flatout.errors import MachineError
from flatout.kernels import bf16_products as kernels
from flatout.kernels.native import native
from flatout.levers import bf16_kernels, chunked_loss
from flatout.levers.bf16_kernels import Bf16Kernels
from flatout.levers.observed import ModuleSeen, Observed
from flatout.levers.subject import Subject
from flatout.machine.detect import detect
from flatout.models import GPT2, GPT2Config

OPERATORS: Any = torch.ops.flatout
needs_kernels = pytest.mark.skipif(native("linear").library is None, reason=native("linear").reason)


@pytest.fixture
def small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "obstacle", lambda: None)
    for least in ("LEAST_IN_LINEAR", "LEAST_IN_ATTENTION", "LEAST_ELEMENTS"):
        monkeypatch.setattr(bf16_kernels, least, 1)
    monkeypatch.setattr(chunked_loss, "LEAST_SCORES_BYTES", 1)


@pytest.fixture
def on(small_calls_too: None) -> Iterator[None]:
    with Bf16Kernels().apply(Subject(), "bf16"):
        yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were dispatched, by name."""
    found: list[str] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    mode = Dispatched()
    monkeypatch.setattr(sys.modules[__name__], "_MODE", mode)
    return found


_MODE: Any = None


@needs_kernels
@pytest.mark.usefixtures("on")
def test_what_is_taken_over(called: list[str]) -> None:
    x = torch.randn(4, 8)
    with _MODE:
        functional.linear(x, torch.randn(6, 8))
        nn.Linear(8, 6)(x)
        torch.addmm(torch.randn(6), x, torch.randn(8, 6))
        nn.GELU()(x)
        functional.gelu(x, approximate="tanh")
    assert [name for name in called if name.startswith("flatout.")] == ["flatout.linear.default"] * 3 + [
        "flatout.gelu_tanh.default"
    ]


@needs_kernels
@pytest.mark.usefixtures("small_calls_too")
@pytest.mark.parametrize("matrix_units", [True, False])
def test_linear_layers_under_autocast_are_torchs_without_matrix_units(
    monkeypatch: pytest.MonkeyPatch, called: list[str], matrix_units: bool
) -> None:
    """As fast there. Without autocast they are in bf16 with these kernels alone; attention and GELU are taken over."""
    monkeypatch.setattr(kernels, "has_matrix_units", lambda: matrix_units)
    layer, x, heads = nn.Linear(8, 6), torch.randn(4, 8), torch.randn(1, 2, 5, 8)
    with Bf16Kernels().apply(Subject(), "bf16"), _MODE:
        layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
            functional.scaled_dot_product_attention(heads, heads, heads)
            functional.gelu(x, approximate="tanh")
    linears = 2 if matrix_units else 1
    assert called.count("flatout.linear.default") == linears
    assert len([name for name in called if name.startswith("flatout.")]) == linears + 2


@needs_kernels
@pytest.mark.usefixtures("on")
def test_what_is_left_alone(called: list[str]) -> None:
    x = torch.randn(4, 8)
    heads = torch.randn(1, 2, 5, 8)
    with _MODE:
        functional.linear(x.double(), torch.randn(6, 8).double())
        functional.linear(x.half(), torch.randn(6, 8).half())
        functional.linear(x.bfloat16(), torch.randn(6, 8).bfloat16(), torch.randn(6).bfloat16().requires_grad_())
        torch.addmm(torch.randn(6), x, torch.randn(8, 6), beta=0.5)
        torch.addmm(torch.randn(4, 6), x, torch.randn(8, 6))
        functional.gelu(x.double())
        functional.scaled_dot_product_attention(heads, heads, heads)  # fp32, without autocast
        half = heads.bfloat16()
        functional.scaled_dot_product_attention(half, half, half, dropout_p=0.5)
        functional.scaled_dot_product_attention(half, half[:, :1], half[:, :1], enable_gqa=True)
        learnt = torch.zeros(5, 5).requires_grad_()
        functional.scaled_dot_product_attention(half, half, half, learnt.bfloat16()[None, None])
        with torch.autocast("cpu", torch.float16):
            functional.linear(x, torch.randn(6, 8))
    assert [name for name in called if name.startswith("flatout.")] == ["flatout.linear.default"]


@needs_kernels
@pytest.mark.usefixtures("on")
@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
def test_results_are_laid_out_as_torchs_and_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = torch.randn(2, 3, 5, 8).bfloat16()
    functional.scaled_dot_product_attention(heads, heads, heads).view(6, 5, 8)
    apart = torch.randn(2, 5, 3, 8).bfloat16().transpose(1, 2)
    functional.scaled_dot_product_attention(apart, heads, heads).transpose(1, 2).view(2, 5, 24)
    for x in (
        torch.randn(4, 8).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 8)[:, ::2],
    ):
        found = functional.gelu(x, approximate="tanh")
        with monkeypatch.context() as patch:
            patch.setattr(bf16_kernels, "LEAST_ELEMENTS", 1 << 60)
            wanted = functional.gelu(x, approximate="tanh")
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        y = functional.linear(torch.randn(4, 8), torch.randn(6, 8))
    y += torch.randn(4, 6, requires_grad=True)
    frozen, x = torch.randn(8, 8), torch.randn(4, 8, requires_grad=True) * 1
    x += functional.linear(x, frozen)  # a frozen layer's gradient does not need its input
    x.sum().backward()
    torch.addmm(1, torch.randn(6), torch.randn(4, 8), torch.randn(8, 6))  # type: ignore[call-overload]


@needs_kernels
@pytest.mark.usefixtures("on")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own rules for them
def test_forward_gradients_are_torchs() -> None:
    x, weight, tangent = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(functional.linear(dual, weight)).tangent
    torch.testing.assert_close(found, tangent @ weight.t())


@needs_kernels
@pytest.mark.usefixtures("on")
def test_transforms_of_functions_are_torchs() -> None:
    weight, x = torch.randn(6, 8), torch.randn(3, 4, 8)
    torch.testing.assert_close(torch.func.vmap(lambda one: functional.linear(one, weight))(x), x @ weight.t())
    slope = torch.func.grad(lambda one: functional.gelu(one, approximate="tanh").sum())(x)
    assert slope.shape == x.shape


@needs_kernels
@pytest.mark.usefixtures("on")
def test_errors_are_torchs() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        functional.linear(torch.randn(4, 8), torch.randn(6, 9))
    with pytest.raises(RuntimeError):
        functional.gelu(torch.randn(4), approximate="other")


@needs_kernels
@pytest.mark.usefixtures("on")
def test_under_autocast_inputs_and_outputs_are_bf16_and_gradients_fp32() -> None:
    layer, x = nn.Linear(8, 6), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        heads = torch.randn(1, 2, 5, 8)
        assert functional.scaled_dot_product_attention(heads, heads, heads).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@needs_kernels
@pytest.mark.usefixtures("on")
def test_an_activation_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers.activations")

    class NewGELUActivation(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return 0.5 * input * (1 + torch.tanh(0.7978845608 * (input + 0.044715 * input**3)))

    module.NewGELUActivation = NewGELUActivation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.activations", module)
    x = torch.randn(5, 8)
    plain = NewGELUActivation()(x)
    with Bf16Kernels().apply(Subject(), "bf16"):
        found = NewGELUActivation()(x)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_torchs_functions_come_back() -> None:
    before = functional.linear, torch.addmm, functional.gelu, functional.scaled_dot_product_attention
    patch = pytest.MonkeyPatch()
    patch.setattr(kernels, "obstacle", lambda: None)
    with Bf16Kernels().apply(Subject(), "bf16"):
        assert functional.linear is not before[0]
    patch.undo()
    assert before == (functional.linear, torch.addmm, functional.gelu, functional.scaled_dot_product_attention)


def losses(plan: Plan, *, tied: bool = True, steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1100, max_tokens=48, width=64, heads=2, layers=2, tied=tied)
    model = GPT2(replace(config, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan)
    tokens = torch.randint(0, 1100, (4, 49))
    try:
        found = [step((tokens[:, :-1], tokens[:, 1:])).item() for _ in range(steps)]
        assert not step.rolled_back
        return found
    finally:
        step.close()


@needs_kernels
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracer asks for it
@pytest.mark.usefixtures("small_calls_too")
@pytest.mark.parametrize("more", [{}, {"loss": "chunked"}, {"compile": "regional"}])
@pytest.mark.first_case
def test_a_model_learns_as_under_autocast(more: dict[str, Any]) -> None:
    plain = losses(Plan(precision="bf16"))
    found = losses(Plan(precision="bf16", kernels="bf16", **more))
    assert plain[-1] < plain[0] - 0.5
    assert found == pytest.approx(plain, abs=0.03)


@needs_kernels
@pytest.mark.usefixtures("small_calls_too")
def test_a_model_learns_without_autocast() -> None:
    assert losses(Plan(kernels="bf16")) == pytest.approx(losses(Plan()), abs=0.02)


def test_on_a_processor_without_products_of_bf16_the_choice_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "obstacle", lambda: "there are none")
    with pytest.raises(MachineError, match="kernels = 'bf16' is not possible: there are none"):
        Bf16Kernels().apply(Subject(), "bf16").__enter__()
    model = nn.Linear(4, 2)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), Plan(kernels="bf16")
    )
    step((torch.randn(3, 4), torch.tensor([0, 1, 0])))
    assert [why for _, why in step.rolled_back if "there are none" in why]


@pytest.mark.parametrize(
    ("seen", "features", "reason"),
    [
        ({}, ("avx512f",), "no products of bf16"),
        ({"device": "cuda:0"}, ("amx_bf16",), "not on the CPU"),
        ({"modules": (ModuleSeen(kind="Net", parameters=1),)}, ("amx_bf16",), "no linear layers"),
        ({"differentiates_twice": "line 3"}, ("amx_bf16",), "none of their own"),
    ],
)
def test_where_it_is_not_tried(seen: dict[str, Any], features: tuple[str, ...], reason: str) -> None:
    observed = replace(Observed(modules=(ModuleSeen(kind="Net", parameters=1, linears=2),)), **seen)
    machine = detect()
    machine = replace(machine, cpu=replace(machine.cpu, features=features))
    verdict = Bf16Kernels().applies(machine, observed)
    assert not verdict
    assert reason in verdict.reason


def test_where_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "obstacle", lambda: None)
    observed = Observed(modules=(ModuleSeen(kind="Net", parameters=1, linears=2),))
    machine = detect()
    machine = replace(machine, cpu=replace(machine.cpu, features=("amx_bf16",)))
    assert Bf16Kernels().applies(machine, observed).values == ("bf16",)
