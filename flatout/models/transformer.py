"""The Transformer (Vaswani et al., 2017) as a language model: the encoder alone, or encoder and decoder.

Two departures make training more stable: norms come before each half of a block, not after, and embedding and head
share a matrix. Positions are sinusoids, so they need no training.

>>> import torch
>>> tokens = torch.zeros(2, 7, dtype=torch.int64)
>>> TransformerLM(TransformerConfig(vocab_size=50, width=32, heads=2, layers=2))(tokens).shape
torch.Size([2, 7, 50])
>>> config = Seq2SeqConfig(vocab_size=50, width=32, heads=2, encoder_layers=2, decoder_layers=2)
>>> Seq2SeqTransformer(config)(tokens, tokens[:, :4], source_valid=torch.tensor([7, 5])).shape
torch.Size([2, 4, 50])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.attention import CrossAttention, SelfAttention, causal_key_mask, key_mask
from flatout.models.config_checks import check_flag, check_heads, check_share, check_whole
from flatout.models.feed_forward import FeedForward
from flatout.models.pre_norm_block import PreNormBlock
from flatout.models.vocabulary import TokenEmbedding, check_tokens, token_loss, zero_rows


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a TransformerLM; the defaults are the guides'."""

    vocab_size: int = 50000
    max_tokens: int = 1024
    """The longest sequence."""
    width: int = 512
    heads: int = 8
    layers: int = 6
    inner_width: int | None = None
    """Width in the middle of the feed-forward; None = four times the width."""
    dropout: float = 0.1
    causal: bool = True
    """True: a token attends to itself and those before it (predicts the next). False: to all (fills gaps)."""
    vocab_multiple: int = 64
    """The vocabulary's matrix is padded to a multiple of it; 1 = not at all."""

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "max_tokens", "width", "heads", "layers", "vocab_multiple")
        if self.inner_width is not None:
            check_whole(self, "inner_width")
        check_heads("TransformerConfig", width=self.width, heads=self.heads)
        check_share(self, "dropout")
        check_flag(self, "causal")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes of a Seq2SeqTransformer; the defaults are the paper's base model. Both sides share the vocabulary."""

    vocab_size: int = 37000
    max_tokens: int = 1024
    """The longest source and the longest target."""
    width: int = 512
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    inner_width: int | None = None
    """Width in the middle of the feed-forward; None = four times the width."""
    dropout: float = 0.1
    vocab_multiple: int = 64
    """The vocabulary's matrix is padded to a multiple of it; 1 = not at all."""

    def __post_init__(self) -> None:
        check_whole(self, "vocab_size", "max_tokens", "width", "heads", "encoder_layers", "decoder_layers")
        check_whole(self, "vocab_multiple")
        if self.inner_width is not None:
            check_whole(self, "inner_width")
        check_heads("Seq2SeqConfig", width=self.width, heads=self.heads)
        check_share(self, "dropout")


class Positioned(nn.Module):
    """Embedded tokens plus their positions; its weight [padded vocabulary, width] also serves as the head."""

    def __init__(self, config: TransformerConfig | Seq2SeqConfig) -> None:
        super().__init__()
        self.max_tokens, self.scale = config.max_tokens, math.sqrt(config.width)
        self.tokens = TokenEmbedding(config.vocab_size, config.width, multiple=config.vocab_multiple)
        self.dropout = nn.Dropout(config.dropout)
        self.sines: Tensor
        self.register_buffer("sines", sines(config.max_tokens, config.width), persistent=False)

    def forward(self, tokens: Tensor, name: str = "tokens", start: int = 0) -> Tensor:
        """int64 or int32 [batch, tokens] -> the weight's dtype [batch, tokens, width].

        name: for errors. start: the position of the first token.
        """
        check_tokens(tokens, max_tokens=self.max_tokens - start, name=name)
        # As a head the weight must be small (variance 1 / width); as an embedding it is scaled to match the sines.
        out: Tensor = self.dropout(self.tokens(tokens) * self.scale + self.sines[start : start + tokens.shape[1]])
        return out


class TransformerLM(nn.Module):
    """Embedded tokens and positions, blocks, a final norm, the head."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TransformerConfig()
        self.embedding = Positioned(config)
        self.blocks = nn.ModuleList(_block(config, causal=config.causal) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = _tied_head(self.embedding.tokens)
        _initialise(self)

    def forward(self, tokens: Tensor, valid: Tensor | None = None, *, targets: Tensor | None = None) -> Tensor:
        """int64 or int32 [batch, tokens] -> logits, the weights' dtype [batch, tokens, vocabulary].

        valid: which tokens are real, as lengths or mask (see `attention`); a causal model with padding on the right
        needs none. With targets, int64 [batch, tokens]: their mean cross-entropy instead, ignoring targets of -100.
        """
        x = self.embedding(tokens)
        make_mask = causal_key_mask if self.config.causal else key_mask
        mask = make_mask(valid, *tokens.shape)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))[..., : self.config.vocab_size]
        return logits if targets is None else token_loss(logits, targets)


class DecoderBlock(nn.Module):
    """Causal attention over the target, attention over the source, feed-forward; each normalises its input."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        width, heads, dropout = config.width, config.heads, config.dropout
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout=dropout, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.cross_attention = CrossAttention(width, heads, dropout=dropout)
        self.norm3 = nn.LayerNorm(width)
        inner_width = config.inner_width or 4 * width
        self.feed_forward = FeedForward(width, inner_width, activation="relu", dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Floating point x [batch, tokens, width], memory [batch, source tokens, width] -> shape and dtype of x.

        mask: bool [batch, 1, 1, source tokens], True = a real token of the source.
        """
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.cross_attention(self.norm2(x), memory, mask))
        out: Tensor = x + self.feed_forward(self.norm3(x))
        return out

    def advance(self, x: Tensor, seen: Seen, causal: Tensor, mask: Tensor) -> tuple[Tensor, Seen]:
        """As forward, for tokens that follow those in `seen`; also returns `seen` with them.

        causal: bool [tokens, tokens seen and new], mask: bool [batch, 1, 1, source tokens], True = may attend.
        """
        queries, keys, values = self.attention.queries_keys_values(self.norm1(x))
        seen = seen._replace(keys=torch.cat((seen.keys, keys), dim=2), values=torch.cat((seen.values, values), dim=2))
        x = x + self.dropout(self.attention.attend(queries, seen.keys, seen.values, causal))
        mixed = self.cross_attention.attend(self.norm2(x), seen.source_keys, seen.source_values, mask)
        x = x + self.dropout(mixed)
        return x + self.feed_forward(self.norm3(x)), seen


class Seen(NamedTuple):
    """What a decoder block keeps of a text: keys and values, each [batch, heads, tokens, width / heads]."""

    keys: Tensor
    values: Tensor
    source_keys: Tensor
    source_values: Tensor


class Seq2SeqState(NamedTuple):
    """An encoded source, and the target so far."""

    mask: Tensor
    """bool [batch, 1, 1, source tokens], True = a real token of the source."""
    blocks: tuple[Seen, ...]


class Encoder(nn.Module):
    """Blocks over the source and a final norm."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block(config, causal=False) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Floating point [batch, source tokens, width] -> the same shape and dtype; `mask` as in SelfAttention."""
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """Blocks over the target, which also read the source, and a final norm."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """As DecoderBlock."""
        for block in self.blocks:
            x = block(x, memory, mask)
        out: Tensor = self.norm(x)
        return out


class Seq2SeqTransformer(nn.Module):
    """An encoder that reads the source and a decoder that predicts each next token of the target."""

    def __init__(self, config: Seq2SeqConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or Seq2SeqConfig()
        self.embedding = Positioned(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.head = _tied_head(self.embedding.tokens)
        _initialise(self)

    def forward(self, source: Tensor, target: Tensor, source_valid: Tensor | None = None) -> Tensor:
        """int64 or int32 source [batch, source tokens], target [batch, tokens] -> logits [batch, tokens, vocabulary].

        target: begins with a start token; the logits at each place are for the token after it. Padding on its right
        needs no mask. source_valid: which source tokens are real, as lengths or mask (see `attention`).
        """
        return self.decode(target, self.encode(source, source_valid), source_valid)

    def encode(self, source: Tensor, source_valid: Tensor | None = None) -> Tensor:
        """int64 or int32 [batch, source tokens] -> what the decoder reads, [batch, source tokens, width]."""
        x = self.embedding(source, "source")
        out: Tensor = self.encoder(x, key_mask(source_valid, *source.shape))
        return out

    def decode(self, target: Tensor, memory: Tensor, source_valid: Tensor | None = None) -> Tensor:
        """Target as in forward, memory from encode -> logits [batch, tokens, vocabulary]."""
        if memory.shape[0] != target.shape[0]:
            what = f"source has {memory.shape[0]} sequences and target {target.shape[0]}"
            raise UsageError(what, limit="each source has one target")
        x = self.embedding(target, "target")
        x = self.decoder(x, memory, key_mask(source_valid, *memory.shape[:2]))
        out: Tensor = self.head(x)[..., : self.config.vocab_size]
        return out

    def begin(self, source: Tensor, source_valid: Tensor | None = None) -> Seq2SeqState:
        """Encode a source, for `advance`: int64 or int32 [batch, source tokens]; source_valid as in forward."""
        memory = self.encode(source, source_valid)
        mask = key_mask(source_valid, *source.shape)
        if mask is None:
            mask = torch.ones(len(source), 1, 1, source.shape[1], dtype=torch.bool, device=source.device)
        blocks = []
        for block in self.decoder.blocks:
            assert isinstance(block, DecoderBlock), "a Decoder is made of them"
            keys, values = block.cross_attention.keys_values(memory)
            blocks.append(Seen(keys[:, :, :0], values[:, :, :0], keys, values))
        return Seq2SeqState(mask=mask, blocks=tuple(blocks))

    def advance(self, target: Tensor, state: Seq2SeqState) -> tuple[Tensor, Seq2SeqState]:
        """The target's next tokens, [batch, tokens], after those in the state -> logits [batch, tokens, vocabulary].

        Together they are what `forward` computes from the whole target; each token is computed once.
        """
        start, count = state.blocks[0].keys.shape[2], target.shape[1]
        x = self.embedding(target, "target", start)
        causal = torch.ones(count, start + count, dtype=torch.bool, device=x.device).tril(start)
        blocks = []
        for block, seen in zip(self.decoder.blocks, state.blocks, strict=True):
            assert isinstance(block, DecoderBlock), "a Decoder is made of them"
            x, seen = block.advance(x, seen, causal, state.mask)
            blocks.append(seen)
        logits = self.head(self.decoder.norm(x))[..., : self.config.vocab_size]
        return logits, state._replace(blocks=tuple(blocks))


def sines(tokens: int, width: int) -> Tensor:
    """fp32 [tokens, width]: for each position, sines and cosines of wavelengths from 2 pi to 10000 times that."""
    places = torch.arange(tokens, dtype=torch.float32)[:, None]
    angles = places * torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width].contiguous()


def _block(config: TransformerConfig | Seq2SeqConfig, *, causal: bool) -> PreNormBlock:
    return PreNormBlock(
        config.width,
        config.heads,
        config.inner_width or 4 * config.width,
        causal=causal,
        activation="relu",
        dropout=config.dropout,
        attention_dropout=config.dropout,
    )


def _tied_head(tokens: TokenEmbedding) -> nn.Linear:
    head = nn.Linear(tokens.embedding_dim, tokens.num_embeddings, bias=False)
    head.weight = tokens.weight
    return head


def _initialise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            joined = 3 if ".qkv." in name else 2 if ".kv." in name else 1
            for part in parameter.chunk(joined):  # each matrix has its own fan, also where several are one
                nn.init.xavier_uniform_(part)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            zero_rows(module.weight, module.vocab_size)
