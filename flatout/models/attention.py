"""Multi-head attention and its masks, the same for every Transformer here.

`valid` says which tokens of a ragged batch are real: lengths, whole numbers [batch], for sequences padded on the
right, or bool [batch, tokens], True for a real token. (torch.nn.Transformer's masks mean the opposite.) Outputs at
padding are meaningless but finite, and do not affect the real tokens.

Keys and values are computed in one place (`SelfAttention.queries_keys_values`, `CrossAttention.keys_values`) and used
in another (`attend`): a cache for generation goes between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.errors import UsageError


def key_mask(valid: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """Which keys may be attended to: bool [batch, 1, 1, tokens], True = yes; None if all.

    A sequence without any real token keeps its first one: attention over nothing is NaN on some devices, and one NaN
    spoils the gradients of the whole batch.
    """
    if valid is None:
        return None
    if valid.dtype is torch.bool and valid.shape == (batch, tokens):
        first = torch.arange(tokens, device=valid.device) == 0
        real = valid | (first & ~valid.any(dim=1, keepdim=True))
    elif not (valid.is_floating_point() or valid.dtype is torch.bool) and valid.shape == (batch,):
        real = torch.arange(tokens, device=valid.device) < valid.clamp(min=1)[:, None]
    else:
        limit = f"it must be lengths, whole numbers [{batch}], or bool [{batch}, {tokens}]"
        remedy = "turn a mask of 0 and 1 into bool with .bool()"
        raise UsageError(f"valid is {valid.dtype} {list(valid.shape)}", limit=limit, remedy=remedy)
    return real[:, None, None, :]


def causal_key_mask(valid: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The mask that causal attention needs beside causality: bool [batch, 1, tokens, tokens] or None.

    Padding on the right needs none, since no real token attends to what follows it: lengths cost nothing.
    """
    mask = key_mask(valid, batch, tokens)  # also checks
    if mask is None or valid is None or valid.ndim == 1:
        return None
    places = torch.arange(tokens, device=mask.device)
    causal, itself = places[:, None] >= places, places[:, None] == places
    return (mask & causal) | itself  # padding on the left attends to itself, so that it attends to something


class SelfAttention(nn.Module):
    """Every token attends to the others (causal: to itself and those before it).

    One matrix product computes queries, keys and values: three small ones would use a device less well.
    """

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Floating point [batch, tokens, width] -> the same shape and dtype.

        mask: bool, broadcast to [batch, heads, tokens, tokens], True = may attend; None = causality alone. A mask must
        include causality.
        """
        queries, keys, values = self.queries_keys_values(x)
        return self.attend(queries, keys, values, mask)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, tokens, width] -> three of [batch, heads, tokens, width / heads]."""
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Three of [batch, heads, tokens, width / heads] -> [batch, tokens, width]; keys may outnumber queries."""
        causal = self.causal and mask is None
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Every token of one sequence attends to all of another, the encoder's output."""

    def __init__(self, width: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Floating point x [batch, tokens, width], memory [batch, source tokens, width] -> shape and dtype of x.

        mask: bool, broadcast to [batch, heads, tokens, source tokens], True = may attend.
        """
        keys, values = self.keys_values(memory)
        return self.attend(x, keys, values, mask)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, source tokens, width] -> two of [batch, heads, source tokens, width / heads]."""
        keys, values = self.kv(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, tokens, width] with keys and values [batch, heads, source tokens, share] -> shape of x."""
        queries = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
