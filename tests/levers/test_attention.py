"""Attention written by hand, in the ways that people write it, against torch's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.levers.attention import FusedAttention, attention_by_hand
from flatout.levers.attention_graph import attend, fuse_attention
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


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(H * E, 3 * H * E), nn.Linear(H * E, H * E), attention

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part.view(B, T, H, E).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = self.attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1)) if isinstance(y, Tensor) else y


def traced(block: Block, x: Tensor) -> tuple[Any, int]:
    counts: list[int] = []

    def backend(graph_module: Any, examples: Any) -> Any:
        counts.append(fuse_attention(graph_module))
        return graph_module.forward

    torch._dynamo.reset()
    return torch.compile(block, backend=backend)(x), sum(counts)


@pytest.mark.parametrize("attention", [mingpt, annotated_transformer, lucidrains, bert, biased_before_scaling, batched])
def test_is_found_and_equals(attention: Attention) -> None:
    torch.manual_seed(0)
    block, x = Block(attention), torch.randn(B, T, H * E, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).square().sum(), [x])
    y, count = traced(block, x)
    (fused,) = torch.autograd.grad(y.square().sum(), [x])
    assert count == 1
    torch.testing.assert_close(y, block(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "attention", [returns_weights, drops_weights, over_queries, squared, softly_masked], ids=lambda f: f.__name__
)
def test_is_left_alone(attention: Attention) -> None:
    torch.manual_seed(0)
    block, x = Block(attention), torch.randn(B, T, H * E)
    torch.manual_seed(1)
    y, count = traced(block, x)
    torch.manual_seed(1)
    plain = block(x)
    assert count == 0
    torch.testing.assert_close(y, plain, rtol=0, atol=0)


def test_masks_and_biases_add_up() -> None:
    q, k, v = (torch.randn(B, H, T, E) for _ in range(3))
    bias, late = torch.randn(T, T), torch.arange(T) > 6
    scores = (q @ k.mT * 0.5 + bias * 2).masked_fill(~CAUSAL, -math.inf).masked_fill(late, -1e9)
    scores[..., late & CAUSAL] = (q @ k.mT * 0.5 + bias * 2 - 1e9)[..., late & CAUSAL]  # a finite value is added
    seen = attend(q, k.mT, v, True, 0.5, added=((bias, 2.0),), filled=((~CAUSAL, -math.inf), (late, -1e9)))
    torch.testing.assert_close(seen, scores.softmax(-1) @ v)


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
