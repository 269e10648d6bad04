"""Autocast inside, fp32 outside; fp16's loss scale never seen."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flatout.precision.autocast import autocast_call, in_fp32, loss_scaled_backward

Out = namedtuple("Out", "logits hidden")


@dataclass(frozen=True)
class Result:
    logits: Any
    text: str = "x"


def half() -> torch.Tensor:
    return torch.ones(2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        (half(), lambda r: [r]),
        ((half(), [half()]), lambda r: [r[0], r[1][0]]),
        ({"a": half(), "b": 3}, lambda r: [r["a"]]),
        (Out(half(), (half(),)), lambda r: [r.logits, r.hidden[0]]),
        (Result([half()]), lambda r: r.logits),
    ],
)
def test_whatever_comes_out_is_fp32(value: Any, tensors: Callable[[Any], list[torch.Tensor]]) -> None:
    result = in_fp32(value, torch.bfloat16)
    assert type(result) is type(value)
    assert [tensor.dtype for tensor in tensors(result)] == [torch.float32] * len(tensors(result))


def test_other_dtypes_stay() -> None:
    assert in_fp32(torch.ones(1, dtype=torch.int64), torch.bfloat16).dtype == torch.int64
    assert in_fp32(None, torch.bfloat16) is None


def test_around_a_model_and_not_around_a_loss() -> None:
    seen = []
    model, wrap = torch.nn.Linear(2, 2), autocast_call("bf16")

    def call() -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        out: torch.Tensor = model(torch.ones(1, 2))
        return out

    assert wrap(model, call).dtype == torch.float32
    wrap(torch.nn.MSELoss(), call)
    assert seen == [True, False]


def model_and_loss(dtype: str = "fp16") -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, wrap = torch.randn(16, 4), autocast_call(dtype)
    return model, lambda: wrap(model, lambda: model(x)).pow(2).mean()


@pytest.mark.parametrize("known", ["optimizer", "module", "neither"])
def test_gradients_are_the_unscaled_ones_and_add_up(known: str) -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled = loss_scaled_backward([optimizer] if known == "optimizer" else [], [model] if known == "module" else [])
    loss().backward()
    loss().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    for _ in range(2):
        scaled(loss(), lambda tensor: tensor.backward())
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=1e-4)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in plain]).norm(), rtol=2e-2, atol=1e-4)


def test_a_pass_that_overflows_is_left_out_and_halves_the_scale() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    scaled, scales = loss_scaled_backward([]), []

    def run(factor: float) -> None:
        def backward(tensor: torch.Tensor) -> None:
            scales.append(float(tensor.detach()))
            tensor.backward()

        scaled((weight * factor).sum(), backward)

    run(1.0)
    assert weight.grad is not None
    assert weight.grad.item() == 1.0
    run(float("inf"))
    assert weight.grad.item() == 1.0
    run(1.0)
    assert weight.grad.item() == 2.0
    assert scales[2] == scales[0] / 2


def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    loss_scaled_backward([])(table(torch.tensor([1, 1])).sum(), lambda tensor: tensor.backward())
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_a_second_model_whose_weights_are_in_bf16_is_left_as_it_is() -> None:
    """A frozen one gave fp32, on which the script's next product failed."""
    frozen, trained = torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4)
    wrapper = autocast_call("bf16")
    for module, expected in ((frozen, torch.bfloat16), (trained, torch.float32)):
        x = torch.ones(2, 4, dtype=module.weight.dtype)
        inside: list[bool] = []

        def call(module: torch.nn.Module = module, x: torch.Tensor = x, inside: list[bool] = inside) -> torch.Tensor:
            inside.append(torch.is_autocast_enabled("cpu"))
            return module(x)

        out = wrapper(module, call)
        assert isinstance(out, torch.Tensor)
        assert (out.dtype, inside) == (expected, [module is trained])


def test_a_pass_that_fails_leaves_the_gradients_that_were_there() -> None:
    """They were lost: a script that goes on after running out of memory then stepped without them."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()

    def fails(loss: Any) -> None:
        loss.backward()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        loss_scaled_backward([])((weight * 2).sum(), fails)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
