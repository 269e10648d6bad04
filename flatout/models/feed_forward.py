"""The part of a Transformer that treats each token by itself: up to a wider layer, an activation, down again.

>>> import torch
>>> FeedForward(8, 32, activation="gelu", dropout=0.0)(torch.zeros(1, 2, 8)).shape
torch.Size([1, 2, 8])
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from flatout.errors import UsageError

Activation = Literal["gelu", "gelu_tanh", "relu"]
"""gelu is exact (erf); gelu_tanh is the approximation with which GPT-2 was trained."""

HUGGING_FACE_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The names that transformers uses."""


def activation_module(name: Activation) -> nn.Module:
    """The elementwise activation of this name, for any shape and dtype."""
    if name == "relu":
        return nn.ReLU()
    return nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")


def activation_from_hugging_face(name: object) -> Activation:
    """Our name of an activation of transformers."""
    if not isinstance(name, str) or name not in HUGGING_FACE_ACTIVATIONS:
        limit = f"supported: {', '.join(map(repr, HUGGING_FACE_ACTIVATIONS))}"
        raise UsageError(f"the config's activation is {name!r}", limit=limit, remedy="use transformers for this model")
    return HUGGING_FACE_ACTIVATIONS[name]


class FeedForward(nn.Module):
    """Linear, activation, linear, dropout."""

    def __init__(self, width: int, inner_width: int, *, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner_width)
        self.activation = activation_module(activation)
        self.down = nn.Linear(inner_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Floating point [batch, tokens, width] -> the same shape and dtype."""
        out: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return out
