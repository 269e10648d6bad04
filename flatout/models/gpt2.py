"""GPT-2 (Radford et al., 2019): a causal Transformer that predicts the next token.

>>> import torch
>>> config = GPT2Config(vocab_size=65, max_tokens=32, width=48, heads=3, layers=2)
>>> GPT2(config)(torch.zeros(4, 32, dtype=torch.int64)).shape
torch.Size([4, 32, 65])
>>> GPT2Config.of_size("124M").layers
12
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.config_checks import (
    check_above_zero,
    check_flag,
    check_heads,
    check_share,
    check_whole,
    check_word,
    config_from_hugging_face,
    config_of,
)
from flatout.models.feed_forward import Activation
from flatout.models.hugging_face import Source, load_strictly
from flatout.models.pre_norm_block import PreNormBlock
from flatout.models.vocabulary import TokenEmbedding, check_tokens, token_loss, zero_rows

Size = Literal["124M", "355M", "774M", "1.5B"]
_SIZES: dict[Size, tuple[int, int, int]] = {
    "124M": (768, 12, 12),
    "355M": (1024, 16, 24),
    "774M": (1280, 20, 36),
    "1.5B": (1600, 25, 48),
}
"""Width, heads, layers of the published models."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2; the defaults are the smallest published model, 124M."""

    vocab_size: int = 50257
    max_tokens: int = 1024
    """Learnt positions: the longest sequence."""
    width: int = 768
    heads: int = 12
    layers: int = 12
    inner_width: int | None = None
    """Width in the middle of the feed-forward; None = four times the width."""
    activation: Activation = "gelu_tanh"
    dropout: float = 0.1
    """On the output of each half of a block."""
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    tied: bool = True
    """The head is the token embedding itself."""
    vocab_multiple: int = 64
    """The embedding's rows are padded to a multiple of this; 1 = no padding."""

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "max_tokens", "width", "heads", "layers", "vocab_multiple")
        if self.inner_width is not None:
            check_whole(self, "inner_width")
        check_heads("GPT2Config", width=self.width, heads=self.heads)
        check_word(self, "activation", Activation)
        check_share(self, "dropout", "embedding_dropout", "attention_dropout")
        check_above_zero(self, "norm_epsilon", "init_std")
        check_flag(self, "tied")

    @classmethod
    def of_size(cls, size: Size, **changes: object) -> GPT2Config:
        """A published size, with any other field changed: GPT2Config.of_size("355M", dropout=0.0)."""
        if size not in _SIZES:
            raise UsageError(f"there is no GPT-2 of size {size!r}", limit=f"published: {', '.join(_SIZES)}")
        width, heads, layers = _SIZES[size]
        return config_of(cls, {"width": width, "heads": heads, "layers": layers, **changes})

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, object]) -> GPT2Config:
        """From `model.config.to_dict()` of a transformers GPT-2, or its config.json."""
        required = {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        }
        names = {
            "vocab_size": "vocab_size",
            "n_positions": "max_tokens",
            "n_embd": "width",
            "n_head": "heads",
            "n_layer": "layers",
            "n_inner": "inner_width",
            "activation_function": "activation",
            "resid_pdrop": "dropout",
            "embd_pdrop": "embedding_dropout",
            "attn_pdrop": "attention_dropout",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tied",
        }
        return config_from_hugging_face(cls, values, model_type="gpt2", required=required, names=names)


class GPT2(nn.Module):
    """Tokens and positions, causal blocks, a final norm, the head."""

    def __init__(self, config: GPT2Config | None = None) -> None:
        super().__init__()
        self.config = config = config or GPT2Config()
        self.tokens = TokenEmbedding(config.vocab_size, config.width, multiple=config.vocab_multiple)
        self.positions = nn.Embedding(config.max_tokens, config.width)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, self.tokens.num_embeddings, bias=False)
        self._tie()
        self._initialise()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """int64 or int32 [batch, tokens] -> logits, the weights' dtype [batch, tokens, vocabulary].

        With targets, int64 [batch, tokens]: their mean cross-entropy instead, ignoring targets of -100. A batch padded
        on the right needs no mask: no token attends to what follows it.
        """
        if targets is None:
            return self.logits(self.hidden(tokens))
        return token_loss(self.logits(self.hidden(tokens)), targets)

    def hidden(self, tokens: Tensor) -> Tensor:
        """int64 or int32 [batch, tokens] -> what the head reads, [batch, tokens, width]."""
        check_tokens(tokens, max_tokens=self.config.max_tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocabulary]: a view without the padding."""
        out: Tensor = self.head(hidden)[..., : self.config.vocab_size]
        return out

    @classmethod
    def from_hugging_face(cls, state_dict: Mapping[str, Tensor], config: GPT2Config) -> GPT2:
        """A model with these weights, copied, in their dtype and on their device; in training mode, like any new one.

        state_dict: of a transformers GPT2LMHeadModel or (tied only) GPT2Model, floating point. Anything missing,
        unexpected or of another shape is an error that lists it.
        """
        with torch.device("meta"):
            model = cls(config)
        load_strictly(model, _sources(config), state_dict, prefix="transformer.", ignored=_BUFFERS)
        model._tie()
        return model

    def _tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        """As in the paper: every layer adds to one sum, so its output starts smaller by the root of their number."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                scale = 1 / math.sqrt(2 * self.config.layers) if adds else 1.0
                nn.init.normal_(parameter, std=self.config.init_std * scale)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
        for padded in (self.tokens.weight, self.head.weight):
            zero_rows(padded, self.config.vocab_size)


def _block(config: GPT2Config) -> PreNormBlock:
    return PreNormBlock(
        config.width,
        config.heads,
        config.inner_width or 4 * config.width,
        causal=True,
        activation=config.activation,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        norm_epsilon=config.norm_epsilon,
    )


_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks that older checkpoints store as if they were weights."""

_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


def _sources(config: GPT2Config) -> dict[str, Source]:
    """Our parameter -> where a transformers state dict holds it."""
    head = ("lm_head.weight",)
    sources = {
        "tokens.weight": Source(parts=("wte.weight",), aliases=head if config.tied else (), rows=config.vocab_size),
        "positions.weight": Source(parts=("wpe.weight",)),
        "norm.weight": Source(parts=("ln_f.weight",)),
        "norm.bias": Source(parts=("ln_f.bias",)),
    }
    if not config.tied:
        sources["head.weight"] = Source(parts=head, rows=config.vocab_size)
    for layer in range(config.layers):
        for ours, theirs in _BLOCK.items():
            weight, bias = f"h.{layer}.{theirs}.weight", f"h.{layer}.{theirs}.bias"
            # Their Conv1D stores a matrix as [in, out].
            sources[f"blocks.{layer}.{ours}.weight"] = Source(parts=(weight,), transposed="norm" not in ours)
            sources[f"blocks.{layer}.{ours}.bias"] = Source(parts=(bias,))
    return sources
