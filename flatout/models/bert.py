"""BERT (Devlin et al., 2018): a bidirectional Transformer encoder, its pooler and its masked-token head.

>>> import torch
>>> bert = Bert(BertConfig(vocab_size=100, max_tokens=32, width=48, heads=3, layers=2)).eval()
>>> output = bert(torch.zeros(2, 5, dtype=torch.int64), valid=torch.tensor([5, 3]))
>>> output.hidden.shape, output.pooled.shape
(torch.Size([2, 5, 48]), torch.Size([2, 48]))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.attention import SelfAttention, key_mask
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
from flatout.models.feed_forward import Activation, FeedForward, activation_module
from flatout.models.hugging_face import Source, load_strictly
from flatout.models.vocabulary import TokenEmbedding, check_tokens, zero_rows


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT; the defaults are BERT-base, uncased."""

    vocab_size: int = 30522
    max_tokens: int = 512
    """Learnt positions: the longest sequence."""
    token_types: int = 2
    """Segments, such as first and second sentence."""
    width: int = 768
    heads: int = 12
    layers: int = 12
    inner_width: int | None = None
    """Width in the middle of the feed-forward; None = four times the width."""
    activation: Activation = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_epsilon: float = 1e-12
    init_std: float = 0.02
    tied: bool = True
    """The masked-token head uses the token embedding itself."""
    vocab_multiple: int = 64
    """The embedding's rows are padded to a multiple of this; 1 = no padding."""

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "max_tokens", "token_types", "width", "heads", "layers", "vocab_multiple")
        if self.inner_width is not None:
            check_whole(self, "inner_width")
        check_heads("BertConfig", width=self.width, heads=self.heads)
        check_word(self, "activation", Activation)
        check_share(self, "dropout", "attention_dropout")
        check_above_zero(self, "norm_epsilon", "init_std")
        check_flag(self, "tied")

    @classmethod
    def base(cls, **changes: object) -> BertConfig:
        """BERT-base: 12 layers of width 768; any field may be changed."""
        return config_of(cls, changes)

    @classmethod
    def large(cls, **changes: object) -> BertConfig:
        """BERT-large: 24 layers of width 1024; any other field may be changed."""
        return config_of(cls, {"width": 1024, "heads": 16, "layers": 24, **changes})

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, object]) -> BertConfig:
        """From `model.config.to_dict()` of a transformers BERT, or its config.json."""
        required = {
            "position_embedding_type": ("absolute", None),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        }
        names = {
            "vocab_size": "vocab_size",
            "max_position_embeddings": "max_tokens",
            "type_vocab_size": "token_types",
            "hidden_size": "width",
            "num_attention_heads": "heads",
            "num_hidden_layers": "layers",
            "intermediate_size": "inner_width",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "layer_norm_eps": "norm_epsilon",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tied",
        }
        return config_from_hugging_face(cls, values, model_type="bert", required=required, names=names)


class BertOutput(NamedTuple):
    """What Bert returns, both in the weights' dtype."""

    hidden: Tensor
    """[batch, tokens, width]"""
    pooled: Tensor | None
    """[batch, width], read from the first token; None in a Bert without a pooler."""


class BertBlock(nn.Module):
    """Attention, then feed-forward; each sum is normalised (post-norm), as in the paper."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, inner_width = config.width, config.inner_width or 4 * config.width
        self.attention = SelfAttention(width, config.heads, dropout=config.attention_dropout, causal=False)
        self.dropout = nn.Dropout(config.dropout)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(width, inner_width, activation=config.activation, dropout=config.dropout)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_epsilon)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Floating point [batch, tokens, width] -> the same shape and dtype; `mask` as in SelfAttention."""
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        out: Tensor = self.norm2(x + self.feed_forward(x))
        return out


class Bert(nn.Module):
    """The encoder and, unless `pooler` is False, its pooler (an unused part should not be in an optimizer)."""

    def __init__(self, config: BertConfig | None = None, *, pooler: bool = True) -> None:
        super().__init__()
        self.config = config = config or BertConfig()
        self.tokens = TokenEmbedding(config.vocab_size, config.width, multiple=config.vocab_multiple)
        self.positions = nn.Embedding(config.max_tokens, config.width)
        self.types = nn.Embedding(config.token_types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width) if pooler else None
        _initialise(self, config)

    def forward(self, tokens: Tensor, token_types: Tensor | None = None, valid: Tensor | None = None) -> BertOutput:
        """int64 or int32 [batch, tokens] -> hidden [batch, tokens, width] and pooled [batch, width].

        token_types: as tokens; None = all 0. valid: which tokens are real, as lengths or mask (see `attention`).
        """
        check_tokens(tokens, max_tokens=self.config.max_tokens)
        if token_types is not None and token_types.shape != tokens.shape:
            what = f"token_types is {list(token_types.shape)} while tokens is {list(tokens.shape)}"
            raise UsageError(what, limit="each token has one type")
        places = torch.arange(tokens.shape[1], device=tokens.device)
        types = self.types.weight[0] if token_types is None else self.types(token_types)
        x = self.dropout(self.norm(self.tokens(tokens) + types + self.positions(places)))
        mask = key_mask(valid, *tokens.shape)
        for block in self.blocks:
            x = block(x, mask)
        return BertOutput(x, None if self.pooler is None else self.pooler(x[:, 0]).tanh())

    @classmethod
    def from_hugging_face(cls, state_dict: Mapping[str, Tensor], config: BertConfig, *, pooler: bool = True) -> Bert:
        """A model with these weights, copied, in their dtype and on their device; in training mode, like any new one.

        state_dict: of a transformers BertModel, or of a BERT with heads, which are left out; floating point. Anything
        missing, unexpected or of another shape is an error that lists it.
        """
        with torch.device("meta"):
            model = cls(config, pooler=pooler)
        ignored = _ignored(r"cls\..*", r"classifier\..*", r"qa_outputs\..*", *([] if pooler else [r"pooler\..*"]))
        load_strictly(model, _sources(config, pooler), state_dict, prefix="bert.", ignored=ignored, rename=_new_name)
        return model


class BertMaskedLM(nn.Module):
    """An encoder without pooler, and the head that names the tokens which were masked."""

    def __init__(self, config: BertConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or BertConfig()
        self.bert = Bert(config, pooler=False)
        self.transform = nn.Linear(config.width, config.width)
        self.activation = activation_module(config.activation)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, self.bert.tokens.num_embeddings)
        self._tie()
        _initialise(self, config)
        zero_rows(self.head.weight, config.vocab_size)

    def forward(self, tokens: Tensor, token_types: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """int64 or int32 [batch, tokens] -> logits, the weights' dtype [batch, tokens, vocabulary]; rest as in Bert."""
        return self.logits(self.bert(tokens, token_types, valid).hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocabulary]. Few tokens are masked: give it those rows alone, hidden[mask]."""
        x = self.norm(self.activation(self.transform(hidden)))
        out: Tensor = self.head(x)[..., : self.config.vocab_size]
        return out

    @classmethod
    def from_hugging_face(cls, state_dict: Mapping[str, Tensor], config: BertConfig) -> BertMaskedLM:
        """As Bert.from_hugging_face, of a transformers BertForMaskedLM or BertForPreTraining."""
        with torch.device("meta"):
            model = cls(config)
        sources = {f"bert.{name}": source for name, source in _sources(config, pooler=False).items()}
        sources |= _head_sources(config)
        if config.tied:
            shared = Source(parts=(_WORDS,), aliases=("cls.predictions.decoder.weight",), rows=config.vocab_size)
            sources["bert.tokens.weight"] = shared
        else:
            sources["head.weight"] = Source(parts=("cls.predictions.decoder.weight",), rows=config.vocab_size)
        ignored = _ignored(r"cls\.seq_relationship\..*", r"pooler\..*")
        load_strictly(model, sources, state_dict, prefix="bert.", ignored=ignored, rename=_new_name)
        model._tie()
        return model

    def _tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.bert.tokens.weight


def _initialise(model: nn.Module, config: BertConfig) -> None:
    """Normal weights, zero biases, norms as they are. The paper cuts the normal at two deviations; torch's
    trunc_normal_ looks at what it drew, which waits for the device and fails on fake tensors."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=config.init_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            zero_rows(module.weight, module.vocab_size)


_WORDS = "embeddings.word_embeddings.weight"
_BLOCK = {
    "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "norm2": "output.LayerNorm",
}


def _sources(config: BertConfig, pooler: bool) -> dict[str, Source]:
    """Parameter of Bert -> where a transformers state dict holds it."""
    sources = {
        "tokens.weight": Source(parts=(_WORDS,), rows=config.vocab_size),
        "positions.weight": Source(parts=("embeddings.position_embeddings.weight",)),
        "types.weight": Source(parts=("embeddings.token_type_embeddings.weight",)),
    }
    for kind in ("weight", "bias"):
        sources[f"norm.{kind}"] = Source(parts=(f"embeddings.LayerNorm.{kind}",))
        if pooler:
            sources[f"pooler.{kind}"] = Source(parts=(f"pooler.dense.{kind}",))
        for layer in range(config.layers):
            theirs = f"encoder.layer.{layer}"
            parts = tuple(f"{theirs}.attention.self.{part}.{kind}" for part in ("query", "key", "value"))
            sources[f"blocks.{layer}.attention.qkv.{kind}"] = Source(parts=parts)
            for our_name, their_name in _BLOCK.items():
                source = Source(parts=(f"{theirs}.{their_name}.{kind}",))
                sources[f"blocks.{layer}.{our_name}.{kind}"] = source
    return sources


def _head_sources(config: BertConfig) -> dict[str, Source]:
    theirs = "cls.predictions"
    sources = {
        # transformers adds the decoder's bias; older files hold it only beside the decoder.
        "head.bias": Source(
            parts=(f"{theirs}.decoder.bias",),
            aliases=(f"{theirs}.bias",),
            aliases_agree=config.tied,
            rows=config.vocab_size,
        )
    }
    for kind in ("weight", "bias"):
        sources[f"transform.{kind}"] = Source(parts=(f"{theirs}.transform.dense.{kind}",))
        sources[f"norm.{kind}"] = Source(parts=(f"{theirs}.transform.LayerNorm.{kind}",))
    return sources


def _ignored(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join((r"embeddings\.position_ids", *patterns)))


def _new_name(name: str) -> str:
    """Files converted from TensorFlow call a norm's weight gamma and its bias beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
