"""Gradients, torch.compile, autocast and operators: right ones pass, wrong ones are shown, missing ones are noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.custom.definitions import checked, defined, reference, right

pytestmark = pytest.mark.usefixtures("one_thread")


def _gradients(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (x, w)]
        return torch.autograd.grad(reference(*leaves), leaves, grad)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return right(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_x, of_w = _gradients(*ctx.saved_tensors, grad)
        return of_x, of_w * (1.01 if len(of_w) > 5 else 1)


class _ContiguousGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return right(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradients(*ctx.saved_tensors, grad.as_strided(grad.shape, (grad.shape[1], 1)))


def wrong_gradient(x: Tensor, w: Tensor) -> Tensor:
    return _WrongGradient.apply(x, w)  # type: ignore[no-any-return]


def contiguous_gradient_only(x: Tensor, w: Tensor) -> Tensor:
    return _ContiguousGradientOnly.apply(x, w)  # type: ignore[no-any-return]


def operator(name: str, *, fake: bool = True, gradient: bool = False, aliases: bool = False) -> Any:
    """A custom operator, registered under a new name."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return x if aliases else right(x, w)

    made = torch.library.custom_op(f"flatout_test::{name}", kernel, mutates_args=())
    if fake:
        made.register_fake(lambda x, w: torch.empty(x.shape, dtype=x.dtype))
    if gradient:
        made.register_autograd(
            lambda ctx, grad: _gradients(*ctx.saved_tensors, grad),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    return made


def test_a_wrong_gradient_is_found_in_the_smallest_case() -> None:
    one = checked(defined(wrong_gradient, compiles=False))[0]["gradient"]
    assert one.verdict == "failed"
    assert one.failure is not None
    assert one.failure.case in ("rows=1, width=6, float32", "rows=1, width=7, float32", "rows=1, width=8, float32")
    assert one.failure.what.startswith("gradient of w: element [")


def test_the_gradient_of_a_sum_is_not_contiguous() -> None:
    one = checked(defined(contiguous_gradient_only, compiles=False))[0]["gradient"]
    assert one.failure is not None
    assert "backward raises RuntimeError: setStorage: " in one.failure.what


def test_a_full_operator_passes() -> None:
    properties, _ = checked(defined(operator("full", gradient=True), gradient=True, compiles=True))
    assert {one.verdict for one in properties.values()} == {"passed"}
    assert "test_aot_dispatch_dynamic" in properties["operator"].text


def test_what_is_missing_is_noted_and_a_mistake_only_where_it_was_asked_for() -> None:
    kernel = operator("bare", fake=False)
    properties, _ = checked(defined(kernel))
    assert (properties["gradient"].verdict, properties["compile"].verdict) == ("noted", "noted")
    assert properties["gradient"].text == "no gradient: its operator has no autograd formula"
    assert properties["compile"].text.startswith("not in torch.compile(fullgraph=True): ")
    properties, _ = checked(defined(kernel, gradient=True, compiles=True))
    assert (properties["gradient"].verdict, properties["compile"].verdict) == ("failed", "failed")


def test_a_function_without_gradient_would_be_silent_in_training() -> None:
    one = checked(defined(lambda x, w: right(x.detach(), w.detach()), compiles=False))[0]["gradient"]
    assert one.verdict == "noted"
    assert "silently" in one.text


def test_an_operator_that_breaks_its_contract_is_shown_by_opcheck() -> None:
    same = {"reference": lambda x, w: x.clone(), "gradient": False, "compiles": False}
    properties, _ = checked(defined(operator("alias", aliases=True), **same))
    wrong = [one.failure.what for one in properties.values() if one.failure is not None]
    assert wrong
    assert "alias" in " ".join(wrong)


def test_a_function_that_cannot_be_traced_is_explained() -> None:
    @torch.compiler.disable
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return right(x, w)

    one = checked(defined(kernel, gradient=False))[0]["compile"]
    assert one.verdict == "noted"
    assert "torch.compiler.disable" in one.text or "torch._dynamo.disable" in one.text


def test_autocast_reaches_the_kernel() -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("not under autocast")
        return right(x, w)

    one = checked(defined(kernel, compiles=False))[0]["autocast"]
    assert one.failure is not None
    assert "under autocast it raises TypeError: not under autocast" in one.failure.what
