"""Attention written by hand, in the ways that people write it, against torch's kernel."""

from __future__ import annotations

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
