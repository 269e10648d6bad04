"""State dicts in transformers' layout with random weights, and what their models compute, written as plainly as can be.

Independent of flatout: one sequence at a time, one head at a time, attention written out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

StateDict = dict[str, Tensor]
WIDTH, HEADS, INNER, LAYERS, POSITIONS = 12, 3, 20, 2, 16


def gpt2_state(vocabulary: int, *, prefix: str = "transformer.", seed: int = 0) -> StateDict:
    shapes = {"wte.weight": (vocabulary, WIDTH), "wpe.weight": (POSITIONS, WIDTH)}
    for layer in range(LAYERS):
        start = f"h.{layer}"
        shapes |= _norm(f"{start}.ln_1") | _norm(f"{start}.ln_2")
        for name, (rows, columns) in {
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, INNER),
            "mlp.c_proj": (INNER, WIDTH),
        }.items():
            shapes |= {f"{start}.{name}.weight": (rows, columns), f"{start}.{name}.bias": (columns,)}
    state = _random(shapes | _norm("ln_f"), seed)
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def gpt2_logits(state: StateDict, tokens: Tensor, head: Tensor) -> Tensor:
    """state: without prefix. tokens: [tokens] -> [tokens, vocabulary]."""
    x = state["wte.weight"][tokens] + state["wpe.weight"][: len(tokens)]
    allowed = torch.ones(len(tokens), len(tokens)).tril().bool()

    def product(name: str, value: Tensor) -> Tensor:
        return value @ state[f"{name}.weight"] + state[f"{name}.bias"]  # [in, out]

    for layer in range(LAYERS):
        start = f"h.{layer}"
        q, k, v = product(f"{start}.attn.c_attn", _normed(state, f"{start}.ln_1", x, 1e-5)).split(WIDTH, dim=-1)
        x = x + product(f"{start}.attn.c_proj", _attention(q, k, v, allowed))
        inner = product(f"{start}.mlp.c_fc", _normed(state, f"{start}.ln_2", x, 1e-5))
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + product(f"{start}.mlp.c_proj", inner)
    return _normed(state, "ln_f", x, 1e-5) @ head.T


def bert_state(vocabulary: int, *, seed: int = 0) -> StateDict:
    """As a BertForPreTraining holds it, tied weights under both their names."""
    shapes = {
        "bert.embeddings.word_embeddings.weight": (vocabulary, WIDTH),
        "bert.embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "bert.embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    shapes |= _norm("bert.embeddings.LayerNorm")
    for layer in range(LAYERS):
        start = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes |= _linear(f"{start}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= _linear(f"{start}.attention.output.dense", WIDTH, WIDTH)
        shapes |= _linear(f"{start}.intermediate.dense", INNER, WIDTH) | _linear(f"{start}.output.dense", WIDTH, INNER)
        shapes |= _norm(f"{start}.attention.output.LayerNorm") | _norm(f"{start}.output.LayerNorm")
    shapes |= _linear("bert.pooler.dense", WIDTH, WIDTH) | _linear("cls.seq_relationship", 2, WIDTH)
    shapes |= _linear("cls.predictions.transform.dense", WIDTH, WIDTH)
    shapes |= _norm("cls.predictions.transform.LayerNorm") | {"cls.predictions.bias": (vocabulary,)}
    state = _random(shapes, seed)
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    return state


def bert_outputs(state: StateDict, tokens: Tensor, types: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, types: [tokens] -> hidden [tokens, width], pooled [width], logits [tokens, vocabulary]."""

    def product(name: str, value: Tensor) -> Tensor:
        return value @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def gelu(value: Tensor) -> Tensor:
        return value * 0.5 * (1 + torch.erf(value / math.sqrt(2)))

    embeddings = [state[f"bert.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")]
    x = embeddings[0][tokens] + embeddings[1][: len(tokens)] + embeddings[2][types]
    x = _normed(state, "bert.embeddings.LayerNorm", x, 1e-12)
    allowed = torch.ones(len(tokens), len(tokens)).bool()
    for layer in range(LAYERS):
        start = f"bert.encoder.layer.{layer}"
        q, k, v = (product(f"{start}.attention.self.{part}", x) for part in ("query", "key", "value"))
        attended = product(f"{start}.attention.output.dense", _attention(q, k, v, allowed))
        x = _normed(state, f"{start}.attention.output.LayerNorm", x + attended, 1e-12)
        inner = product(f"{start}.output.dense", gelu(product(f"{start}.intermediate.dense", x)))
        x = _normed(state, f"{start}.output.LayerNorm", x + inner, 1e-12)
    transformed = gelu(product("cls.predictions.transform.dense", x))
    transformed = _normed(state, "cls.predictions.transform.LayerNorm", transformed, 1e-12)
    return x, torch.tanh(product("bert.pooler.dense", x[0])), product("cls.predictions.decoder", transformed)


def _attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    share, heads = WIDTH // HEADS, []
    for head in range(HEADS):
        part = slice(head * share, (head + 1) * share)
        scores = (q[:, part] @ k[:, part].T / math.sqrt(share)).masked_fill(~allowed, -math.inf)
        heads.append(torch.softmax(scores, dim=-1) @ v[:, part])
    return torch.cat(heads, dim=-1)


def _normed(state: StateDict, name: str, x: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], epsilon)


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> StateDict:
    """Large enough that attention is far from even; norms and biases too are unlike their first values."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.5 for name, shape in shapes.items()}
