"""Recurrent networks over tokens: a classifier of sequences and a generator of characters, of RNN or LSTM cells.

Each step depends on the one before it, so a sequence is as many small products as it has tokens: on a GPU these models
are bound by kernel launches, not by arithmetic, unless cuDNN runs the whole sequence, which nn.RNN and nn.LSTM let it
do. torch.compile does not trace them (it breaks the graph there), and would lose cuDNN if it did.

>>> import torch
>>> model = RecurrentClassifier(RecurrentClassifierConfig(vocab_size=100, classes=3))
>>> model(torch.zeros(2, 7, dtype=torch.int64), lengths=torch.tensor([7, 4])).shape
torch.Size([2, 3])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.config_checks import check_share, check_whole, check_word
from flatout.models.vocabulary import check_tokens

Cell = Literal["rnn", "lstm"]
State = Tensor | tuple[Tensor, Tensor]
"""[layers, batch, hidden_width], and for an LSTM its cell's state of the same shape."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """What both models share. Neither pads its vocabulary: an embedding is only looked up, and characters are few."""

    cell: Cell = "lstm"
    vocab_size: int
    embedding_width: int = 128
    hidden_width: int = 256
    layers: int = 1
    dropout: float = 0.0
    """On the embedding and between and after the layers."""

    def __post_init__(self) -> None:
        check_word(self, "cell", Cell)
        check_whole(self, "vocab_size", "embedding_width", "hidden_width", "layers")
        check_share(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class RecurrentClassifierConfig(RecurrentConfig):
    """Sizes of a RecurrentClassifier."""

    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "classes")


@dataclass(frozen=True, kw_only=True)
class CharacterGeneratorConfig(RecurrentConfig):
    """Sizes of a CharacterGenerator; vocab_size is the number of characters."""


class RecurrentBody(nn.Module):
    """Embedding and recurrent layers."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_width)
        self.dropout = nn.Dropout(config.dropout)
        kind = nn.LSTM if config.cell == "lstm" else nn.RNN
        between = config.dropout if config.layers > 1 else 0.0  # torch warns of dropout between one layer
        self.layers = kind(
            config.embedding_width, config.hidden_width, config.layers, batch_first=True, dropout=between
        )
        _initialise(self.layers)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """int64 or int32 [batch, tokens] -> [batch, tokens, hidden_width] and the state after the last token."""
        check_tokens(tokens)
        output, after = self.layers(self.dropout(self.embedding(tokens)), state)
        return self.dropout(output), after


class RecurrentClassifier(nn.Module):
    """The class of a sequence, read from the state after its last real token."""

    def __init__(self, config: RecurrentClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.body = RecurrentBody(config)
        self.head = nn.Linear(config.hidden_width, config.classes)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """int64 or int32 [batch, tokens] -> logits, the weights' dtype [batch, classes].

        lengths: whole numbers [batch], real tokens at the start of each sequence (at least 1); None = all are real.
        """
        output, _ = self.body(tokens)
        if lengths is None:
            logits: Tensor = self.head(output[:, -1])
            return logits
        batch, count = tokens.shape
        if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype is torch.bool:
            what = f"lengths is {lengths.dtype} {list(lengths.shape)}"
            raise UsageError(what, limit=f"it must be whole numbers [{batch}]", remedy="count a mask with .sum(1)")
        # Nothing after the last real token can change the output there; packing would need the lengths on the CPU.
        last = lengths.to(torch.int64).clamp(1, count) - 1
        logits = self.head(output[torch.arange(batch, device=output.device), last])
        return logits


class CharacterGenerator(nn.Module):
    """Predicts each next character from all before it."""

    def __init__(self, config: CharacterGeneratorConfig) -> None:
        super().__init__()
        self.config = config
        self.body = RecurrentBody(config)
        self.head = nn.Linear(config.hidden_width, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 or int32 [batch, tokens] -> logits, the weights' dtype [batch, tokens, vocabulary]."""
        return self.advance(tokens)[0]

    def advance(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """As forward, from a state (None = the start of a text); also returns the state after the last token."""
        output, after = self.body(tokens, state)
        return self.head(output), after

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """int64 [batch, tokens] -> int64 [batch, tokens + count]: the text continued, each character sampled.

        temperature: below 1 likely characters become likelier; 0 always takes the likeliest. Call eval() first if there
        is dropout.
        """
        whole = isinstance(count, int) and not isinstance(count, bool)
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not (whole and number and count >= 0 and 0 <= temperature < math.inf):
            what = f"count is {count!r} and temperature {temperature!r}"
            raise UsageError(what, limit="both must be at least 0, count a whole number and temperature finite")
        pieces, newest, state = [tokens], tokens, None
        for _ in range(count):
            logits, state = self.advance(newest, state)
            newest = _drawn(logits[:, -1], temperature, generator)
            pieces.append(newest)
        return torch.cat(pieces, dim=1)


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """[batch, vocabulary] -> int64 [batch, 1]"""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # Against the greatest logit first: however low the temperature, exp then never overflows.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).float() / min(max(temperature, 1e-30), 1e30)
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)


def _initialise(layers: nn.RNN | nn.LSTM) -> None:
    """Orthogonal recurrent weights keep the state's size; an LSTM starts with open forget gates, so it remembers."""
    gates = 4 if isinstance(layers, nn.LSTM) else 1
    for name, parameter in layers.named_parameters():
        for gate, part in enumerate(parameter.data.chunk(gates)):  # input, forget, cell, output
            if "weight_hh" in name:
                nn.init.orthogonal_(part)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(part)
            else:
                nn.init.constant_(part, 1.0 if gates == 4 and gate == 1 and "bias_ih" in name else 0.0)
