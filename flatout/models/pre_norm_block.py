"""The block that GPT-2 and the Transformer repeat: each half normalises its input and adds its output to it.

The sum itself is never normalised, so gradients reach the first block undamped, however many there are.
"""

from __future__ import annotations

from torch import Tensor, nn

from flatout.models.attention import SelfAttention
from flatout.models.feed_forward import Activation, FeedForward


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner_width: int,
        *,
        causal: bool,
        activation: Activation,
        dropout: float,
        attention_dropout: float,
        norm_epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_epsilon)
        self.attention = SelfAttention(width, heads, dropout=attention_dropout, causal=causal)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=norm_epsilon)
        self.feed_forward = FeedForward(width, inner_width, activation=activation, dropout=dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Floating point [batch, tokens, width] -> the same shape and dtype; `mask` as in SelfAttention."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out
