"""Attention written by hand, in the ways that people write it, against torch's kernel."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.levers.attention import FusedAttention, attention_by_hand
from flatout.levers.attention_graph import attend, fuse_attention
from flatout.levers.observed import ModuleSeen, Observed
from flatout.levers.subject import Subject

# torch's tracer asks for it and hides the warning from a reader, though not from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

B, H, T, E = 2, 3, 8, 4
CAUSAL = torch.tril(torch.ones(T, T, dtype=torch.bool))
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def mingpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(~CAUSAL, float("-inf"))
    att = functional.softmax(att, dim=-1)
    att = functional.dropout(att, 0.1, training=False)
    return att @ v


def annotated_transformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(CAUSAL == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), v)


def lucidrains(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = torch.einsum("b h i d, b h j d -> b h i j", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)


def bert(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(B, 1, 1, T).masked_fill(torch.arange(T) > 5, -10000.0)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / 2.0
    scores = scores + bias
    return torch.matmul(nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def biased_before_scaling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.arange(T * 1.0) + q @ k.mT).mul(0.25).masked_fill_(~CAUSAL, -math.inf).softmax(-1) @ v


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v).view(B, H, T, E)


def returns_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def drops_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).pow(2).softmax(-1) @ v


def softly_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~CAUSAL, -5.0).softmax(-1) @ v


def rounded_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.div(q @ k.mT * 20, 3, rounding_mode="floor").softmax(-1) @ v


def whole_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 20).to(torch.int32).float().softmax(-1) @ v


def scores_written_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.empty(B, H, T, T)
    weights = torch.mul(q.detach() @ k.detach().mT, 2.0, out=scores).softmax(-1)
    return weights @ v + scores.sum()


def scores_added_to_a_bias_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.ones(B, H, T, T)
    total = bias
    total += q @ k.mT
    return total.softmax(-1) @ v + bias.mean()


def weights_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = (q @ k.mT).softmax(-1)
    return weights @ v


def scores_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scores = q @ k.mT
    return scores.softmax(-1) @ v


def mask_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    with torch.no_grad():
        scores = scores.masked_fill(~CAUSAL, -1e9)
    return scores.softmax(-1) @ v


def scores_in_fp32_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            weights = (30 * q.float() @ (30 * k.float()).mT / 8).softmax(-1)
        return (weights @ v).float()


def product_in_bf16_after_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (30 * q @ k.mT).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        return (weights @ v).float()


def query_changed_after_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.detach().clone(), k.detach().clone()
    weights = (q @ k.mT).softmax(-1)
    q.zero_()
    return weights @ v + q


def bias_changed_after_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(T, T).masked_fill(~CAUSAL, -1e4)
    weights = (q @ k.mT + bias[None]).softmax(-1)
    bias.zero_()
    return weights @ v


def bias_changed_after_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(T, T).masked_fill(~CAUSAL, -1e4)
    y = (q @ k.mT + bias).softmax(-1) @ v
    functional.dropout(bias, 0.5, True, True)
    return y


def masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(T, T)
    bias.masked_fill_(~CAUSAL, -math.inf)
    return (q @ k.mT + bias).softmax(-1) @ v


def mask_made_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    bias = torch.full((T, T), -math.inf)
    torch.triu(bias, 1, out=bias)
    return (scores + bias).softmax(-1) @ v


def query_scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q * 1, k * 1
    q.mul_(3.0)
    torch._foreach_mul_([q, k], 2.0)
    torch.clamp_(k, -0.5, 0.5)
    functional.leaky_relu(q, inplace=True)
    return (q @ k.mT).softmax(-1) @ v


def value_changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v * 1
    functional.dropout(v, 0.5, True, True)
    weights = (q @ k.mT).softmax(-1)
    v[:, :, 0].zero_()
    return weights @ v


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = torch.zeros(B, H, T, E)
    cache[:, :, :4].copy_(v[:, :, :4])
    cache.index_add_(2, torch.arange(T), v)
    return (q @ k.mT).softmax(-1) @ cache


def result_changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = (q @ k.mT).softmax(-1) @ v
    y *= 2
    y += v
    y[:, :, 0] = 0
    return y


def copy_of_result_changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(B, T, H * E)
    y *= 2
    return y.view(B, T, H, E).transpose(1, 2)


def result_viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).view(B, H * T, E).reshape(B, H, T, E)


def result_reshaped_and_viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).reshape(B, H, T, 2, E // 2).view(B * H, T, E).view(B, H, T, E)


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(H * E, 3 * H * E), nn.Linear(H * E, H * E), attention

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part.view(B, T, H, E).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = self.attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1)) if isinstance(y, Tensor) else y


def traced(block: Block, x: Tensor, counts: list[int]) -> Any:
    def backend(graph_module: Any, examples: Any) -> Any:
        counts.append(fuse_attention(graph_module))
        return graph_module.forward

    torch._dynamo.reset()
    return torch.compile(block, backend=backend)(x)


def with_gradients(call: Callable[[Tensor], Any], block: Block) -> list[Tensor]:
    x = torch.linspace(-2, 2, B * T * H * E).sin().view(B, T, H * E).requires_grad_()
    torch.manual_seed(1)
    y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    loss = (y.sin() * torch.arange(y.numel()).view_as(y)).sum() / y.numel()
    return [y, *torch.autograd.grad(loss, [x, *block.qkv.parameters()])]


FOUND = [mingpt, annotated_transformer, lucidrains, bert, biased_before_scaling, batched]
FOUND += [masked_in_place, mask_made_late, query_scaled_in_place, value_changed_in_place, cached]
FOUND += [result_changed, copy_of_result_changed, result_viewed, result_reshaped_and_viewed]
LEFT_ALONE = [returns_weights, drops_weights, over_queries, squared, softly_masked, rounded_scores, whole_scores]
LEFT_ALONE += [scores_written_elsewhere, scores_added_to_a_bias_in_place]
LEFT_ALONE += [weights_without_gradients, scores_without_gradients, mask_without_gradients]
LEFT_ALONE += [scores_in_fp32_under_autocast, product_in_bf16_after_fp32]
LEFT_ALONE += [query_changed_after_the_scores, bias_changed_after_the_scores, bias_changed_after_all]


@pytest.mark.parametrize("attention", FOUND, ids=lambda f: f.__name__)
def test_is_found_and_equals(attention: Attention) -> None:
    torch.manual_seed(0)
    block = Block(attention)
    counts: list[int] = []
    plain, fused = with_gradients(block, block), with_gradients(lambda x: traced(block, x, counts), block)
    assert counts == [1]
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", LEFT_ALONE, ids=lambda f: f.__name__)
def test_is_left_alone(attention: Attention) -> None:
    torch.manual_seed(0)
    block = Block(attention)
    counts: list[int] = []
    plain, left = with_gradients(block, block), with_gradients(lambda x: traced(block, x, counts), block)
    assert sum(counts) == 0
    for one, other in zip(plain, left, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_buffer_that_a_statement_changes_is_changed() -> None:
    class Counting(Block):
        calls: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__(lucidrains)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.ones(E))

        def forward(self, x: Tensor) -> Any:
            self.calls.add_(1)
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean())
            return super().forward(x) * self.calls

    models = [Counting() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    counts: list[int] = []
    plain = with_gradients(models[0], models[0])
    for one, other in zip(plain, with_gradients(lambda x: traced(models[1], x, counts), models[1]), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert counts == [1]
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_usual_projection_gets_the_kernels_own_result() -> None:
    block = Block(mingpt)
    seen: list[Any] = []

    def backend(graph_module: Any, examples: Any) -> Any:
        fuse_attention(graph_module)
        seen.extend(node.args[-1] for node in graph_module.graph.nodes if node.target is attend)
        return graph_module.forward

    for change in (False, True):
        block.attention = result_changed if change else mingpt
        torch._dynamo.reset()
        torch.compile(block, backend=backend)(torch.randn(B, T, H * E))
    assert seen == [False, True]  # does it need a copy with a product's strides?


ALIBI = 600 + torch.arange(T) * 0.5
BIASES = {
    "ALiBi as in BLOOM": (ALIBI, False),
    "ALiBi, its largest 0": (ALIBI - ALIBI.max(), True),  # halves below 4 are numbers of bf16
    "fifths": (torch.arange(T) / 5, True),
    "large fifths": (torch.arange(T) / 5 + 64, False),
    "BERT's": (torch.zeros(T).masked_fill(torch.arange(T) > 5, -1e4), True),
    "the lowest of fp32": (torch.zeros(T, T).masked_fill(~CAUSAL, torch.finfo(torch.float32).min), True),
    "the lowest of fp32 in whole rows": ((torch.arange(T) > 5)[:, None] * torch.finfo(torch.float32).min, False),
}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_the_kernels_precision_cannot_hold(name: str, autocast: bool, monkeypatch: Any) -> None:
    calls, kernel = [], functional.scaled_dot_product_attention

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(arguments)
        return kernel(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    torch.manual_seed(0)
    bias, fits = BIASES[name]
    exact = [torch.randn(B, H, T, E).bfloat16().double().requires_grad_() for _ in range(3)]
    inputs = [one.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_() for one in exact]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = attend(inputs[0], inputs[1], inputs[2], False, (("add", bias),))
    right = (exact[0] @ exact[1].mT + bias.double()).softmax(-1) @ exact[2]
    for one, other in zip(
        [right, *torch.autograd.grad(right.sin().sum(), exact)],
        [y, *torch.autograd.grad(y.double().sin().sum(), inputs)],
        strict=True,
    ):
        torch.testing.assert_close(other.double(), one, rtol=0.02, atol=0.03)
    assert len(calls) == fits


@pytest.mark.parametrize("shape", [(3, 1, H, T, T), (1, 1, 1, T, T), (4, H, T, T), (4, 1, 1, T)])
@pytest.mark.parametrize("step", ["add", "fill"])
def test_a_mask_that_makes_the_scores_larger(shape: tuple[int, ...], step: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, H, T, E, requires_grad=True) for _ in range(3)]
    operand = torch.randn(shape) if step == "add" else (torch.rand(shape) > 0.8) & (torch.arange(T) > 0)
    steps = (("add", operand),) if step == "add" else (("fill", operand, -1e9),)
    scores = inputs[0] @ inputs[1].mT
    scores = scores + operand if step == "add" else scores.masked_fill(operand, -1e9)
    plain, ours = scores.softmax(-1) @ inputs[2], attend(inputs[0], inputs[1], inputs[2], False, steps)
    for one, other in zip(
        [plain, *torch.autograd.grad(plain.sin().sum(), inputs)],
        [ours, *torch.autograd.grad(ours.sin().sum(), inputs)],
        strict=True,
    ):
        torch.testing.assert_close(other, one)


def test_no_gradient_of_a_gradient() -> None:
    observed = Observed(modules=(ModuleSeen(kind="Net", parameters=1, attention_by_hand="Block"),))
    machine: Any = None
    assert FusedAttention().applies(machine, observed).values == ("fused",)
    twice = dataclasses.replace(observed, differentiates_twice="train.py mentions create_graph")
    assert "create_graph" in FusedAttention().applies(machine, twice).reason


def test_masks_and_biases_add_up() -> None:
    q, k, v = (torch.randn(B, H, T, E) for _ in range(3))
    bias, late = torch.randn(T, T), torch.arange(T) > 6
    scores = (q @ k.mT * 0.5 + bias * 2).masked_fill(~CAUSAL, -math.inf).masked_fill(late, -1e9)
    scores[..., late & CAUSAL] = (q @ k.mT * 0.5 + bias * 2 - 1e9)[..., late & CAUSAL]  # a finite value is added
    steps = (("mul", 0.25), ("add", bias), ("mul", 2.0), ("fill", ~CAUSAL, -math.inf), ("fill", late, -1e9))
    seen = attend(q, k.mT, v, True, steps)
    torch.testing.assert_close(seen, scores.softmax(-1) @ v)


LEFT = (torch.arange(T) < torch.tensor([[3], [0]]))[:, None, None, :]  # [batch, 1, 1, keys]: padded on the left
WHOLE = torch.tensor([True, False])[:, None, None, None].expand(B, 1, 1, T)
LOWEST = torch.finfo(torch.float32).min
MASKS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "causal": (("fill", ~CAUSAL, -math.inf),),
    "causal, finite": (("mul", 0.5), ("fill", ~CAUSAL, -1e9)),
    "causal and padded on the left": (("mul", 0.5), ("fill", ~CAUSAL, -1e9), ("fill", LEFT, -1e9)),
    "the same with -inf": (("fill", ~CAUSAL, -math.inf), ("fill", LEFT, -math.inf)),
    "one of each": (("fill", ~CAUSAL, -math.inf), ("fill", LEFT, -1e9)),
    "two values": (("fill", ~CAUSAL, -1e9), ("fill", LEFT, -1e4)),
    "whole": (("fill", WHOLE, -1e9),),
    "whole, -1e4": (("fill", WHOLE, -1e4),),
    "whole, the lowest": (("fill", WHOLE, LOWEST),),
    "a row of queries": (("fill", torch.arange(T)[:, None] == 2, -1e9),),
    "a value that is not low enough": (("mul", 600.0), ("fill", ~CAUSAL, -1e4)),
    "scaled after": (("fill", ~CAUSAL, -1e6), ("mul", 1e-2)),
    "bias after": (("fill", WHOLE, -1e4), ("add", torch.linspace(-3, 3, T))),
    "large bias after": (("fill", ~CAUSAL, -1e9), ("add", 1e9 * (torch.arange(T) == T - 1).float())),
    "added": (("div", 2.0), ("add", torch.zeros(T).masked_fill(torch.arange(T) > 5, -1e9))),
    "added to whole rows": (("add", WHOLE.float() * -1e9),),
    "the lowest added to whole rows": (("add", WHOLE.float() * LOWEST),),
    "-1e4 added to whole rows": (("add", WHOLE.float() * -1e4),),
    "1e5 added to whole rows": (("add", WHOLE.float() * 1e5),),
    "added twice": (("add", WHOLE.float() * LOWEST), ("add", (~CAUSAL).float() * LOWEST)),
    "-inf added to whole rows": (("add", torch.zeros(B, 1, 1, T).masked_fill(WHOLE, -math.inf)),),
    "whole numbers added": (("add", torch.arange(T)), ("fill", ~CAUSAL, -math.inf)),
    "one number added": (("add", torch.tensor(2.0)),),
    "a number for each query": (("add", torch.randn(T, 1)),),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_scripts_numbers_and_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(B, H, T, E, dtype=dtype, requires_grad=True) for _ in range(3)]
    bias = torch.randn(H, T, T, dtype=dtype, requires_grad=True)
    for learned in ([], [bias]):
        steps = (*[("add", one) for one in learned], *MASKS[name])

        def script(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT
            for step, operand, *rest in steps:  # noqa: B023
                scores = scores.masked_fill(operand, *rest) if step == "fill" else getattr(torch, step)(scores, operand)
            return scores.softmax(-1) @ v

        found = []
        for y in (script(*inputs), attend(inputs[0], inputs[1], inputs[2], False, steps)):
            gradients = torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), [*inputs, *learned])
            found.append([y, *gradients])
        for plain, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [(T, E), (1, T, E), (B, 1, T, E), (H, T, E)])
def test_products_that_broadcast_are_the_scripts(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, T, E), torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(attend(q, k, v, False, ()), (q @ k.mT).softmax(-1) @ v)
    torch.testing.assert_close(attend(k, k, k, False, ()), (k @ k.mT).softmax(-1) @ k)


def test_a_mask_that_comes_to_hide_whole_rows_while_training() -> None:
    class Padded(Block):
        def forward(self, x: Tensor, hidden: Tensor) -> Any:  # type: ignore[override]
            q, k, v = (part.view(B, T, H, E).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return ((q @ k.mT / 2).masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, subject, x = Padded(lucidrains), Subject(), torch.randn(B, T, H * E)
    subject.modules.add(model)
    for hidden in (LEFT, WHOLE, LEFT):
        found = []
        for on in (False, True):
            model.zero_grad()
            with FusedAttention().apply(subject, "fused") if on else torch.enable_grad():
                y = model(x, hidden)
                (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
            assert model.qkv.weight.grad is not None
            found.append([y, model.qkv.weight.grad.clone()])
        for plain, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert subject.incidents == []


class CausalSelfAttention(nn.Module):
    """As minGPT has it, but with the weights' dropout given."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(E * H, 3 * E * H), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, H, E).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        att = self.drop(functional.softmax(q @ k.transpose(-2, -1) / 2, dim=-1))
        return (att @ v).transpose(1, 2).reshape(batch, tokens, width)


class Model(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CausalSelfAttention(p) for _ in range(2)])
        self.head = nn.Linear(E * H, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).softmax(-1) @ torch.ones(5, 1)  # a softmax and a product, but no attention of its own


def test_only_the_innermost_modules_are_meant() -> None:
    model = Model()
    assert attention_by_hand(model) == list(model.blocks)
    assert attention_by_hand(nn.TransformerEncoderLayer(8, 2)) == []
    assert attention_by_hand(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))) == []


@pytest.mark.parametrize(("implementation", "found"), [("sdpa", 0), ("eager", 2)])
def test_a_model_of_transformers_says_which_attention_it_uses(implementation: str, found: int) -> None:
    model = Model()
    for block in model.blocks:
        block.config = SimpleNamespace(_attn_implementation=implementation)
    assert sum(one in model.blocks for one in attention_by_hand(model)) == found


@pytest.mark.slow
def test_the_lever_on_a_model_with_changing_shapes_and_modes() -> None:
    torch.manual_seed(0)
    model, subject = Model(), Subject()
    subject.modules.add(model)
    with FusedAttention().apply(subject, "fused"):
        for tokens in (8, 5, 7, 3):
            x = torch.randn(2, tokens, E * H)
            fused = [model(x), model.eval()(x)]
            model.train()
            for y in fused:
                torch.testing.assert_close(y, Model.forward(model, x), rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).isfinite().all()
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert subject.incidents == []


def test_dropped_out_weights_are_told_once_and_keep_their_bits() -> None:
    model, subject, x = Model(p=0.5), Subject(), torch.randn(2, 6, E * H)
    subject.modules.add(model)
    torch.manual_seed(3)
    plain = model(x)
    with FusedAttention().apply(subject, "fused"):
        torch.manual_seed(3)
        assert torch.equal(model(x), plain)
    (incident,) = subject.incidents
    assert incident[0] == "fused attention"
    assert "dropped out" in incident[1]


def test_a_forward_made_by_exec_belongs_to_no_module() -> None:
    made: dict[str, Any] = {}
    exec("def forward(self, x):\n    return (x @ x.mT).softmax(-1) @ x", made)
    model = type("Made", (nn.Module,), {"forward": made["forward"]})()
    made["forward"].__module__ = None
    assert attention_by_hand(model) == [model]


@pytest.mark.parametrize("change", ["added", "removed"])
def test_layers_that_come_and_go_meanwhile(change: str) -> None:
    """The end raised, as it looked for as many layers as there were at first."""
    model, subject = Model(), Subject()
    subject.modules.add(model)
    blocks = list(model.blocks)
    with FusedAttention().apply(subject, "fused"):
        if change == "added":
            model.blocks.append(copy.deepcopy(blocks[0]))
        else:
            del model.blocks[0]
    assert all(block._compiled_call_impl is None for block in (*blocks, *model.blocks))
