"""Tokens in, logits out: a vocabulary padded so that its large matrix product runs on whole tiles.

The product with the vocabulary is the largest of a small language model, and tensor cores read their operands in
tiles: an odd number of rows (GPT-2's 50257) means a slow kernel. So the matrix gets rows up to the next multiple,
zeros that no token uses and whose logits are cut off before anything reads them: losses are exact, and padding is never
predicted.

>>> padded_size(50257, 64)
50304
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.errors import UsageError


def padded_size(size: int, multiple: int) -> int:
    """The next multiple, so the rows of the matrix."""
    return -(-size // multiple) * multiple


class TokenEmbedding(nn.Embedding):
    """Token -> vector, with rows of padding after the vocabulary.

    weight: floating point [vocabulary padded to `multiple`, width]; the padding is zero and has gradient zero.
    """

    def __init__(self, vocab_size: int, width: int, *, multiple: int) -> None:
        super().__init__(padded_size(vocab_size, multiple), width)
        self.vocab_size = vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole numbers [batch, tokens] -> the weight's dtype [batch, tokens, width]."""
        if self.vocab_size < self.num_embeddings:
            # A token past the vocabulary's end is an error, and not a row of padding. (The gradient of a part of the
            # weight would be copied into one of the whole: as slow as the rest of a small step.)
            tokens = torch.where(tokens < self.vocab_size, tokens, tokens + self.num_embeddings)
        return F.embedding(tokens, self.weight)


def zero_rows(parameter: Tensor, vocab_size: int) -> None:
    """Zero the padding of a parameter [padded vocabulary, ...]."""
    with torch.no_grad():
        parameter[vocab_size:].zero_()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of [batch, tokens, vocabulary], a scalar in fp32; targets of -100 are ignored.

    Under a plan with `loss = "chunked"` the logits are never held whole.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def check_tokens(tokens: Tensor, *, max_tokens: int | None = None, name: str = "tokens") -> None:
    """Tokens are whole numbers [batch, tokens], at least one and not more than the model has positions for."""
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        what = f"{name} is {tokens.dtype} {list(tokens.shape)}"
        remedy = "add the batch with .unsqueeze(0)" if tokens.ndim == 1 else "pass token numbers, not vectors or scores"
        raise UsageError(what, limit="it must be int64 or int32 [batch, tokens]", remedy=remedy)
    length = tokens.shape[1]
    if length < 1:
        raise UsageError(f"{name} holds sequences of 0 tokens", limit="it must hold at least 1 each")
    if max_tokens is not None and length > max_tokens:
        limit = f"the model has {max_tokens} positions"
        what = f"{name} holds sequences of {length} tokens"
        raise UsageError(what, limit=limit, remedy="cut them or raise max_tokens")
