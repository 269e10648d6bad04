"""Fully connected layers: the guides' classifier of flat inputs.

>>> import torch
>>> MLP(MLPConfig(inputs=784, hidden=(256,), classes=10))(torch.zeros(32, 1, 28, 28)).shape
torch.Size([32, 10])
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.config_checks import check_share, check_whole, check_widths


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes of an MLP; the defaults are the guides' 1000-512-128-10."""

    inputs: int = 1000
    hidden: tuple[int, ...] = (512, 128)
    """Width of each hidden layer; () leaves one linear layer."""
    classes: int = 10
    dropout: float = 0.0
    """Probability of dropping a hidden value in training."""

    def __post_init__(self) -> None:
        check_whole(self, "inputs", "classes")
        check_widths(self, "hidden", low=0)
        check_share(self, "dropout")


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, config: MLPConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MLPConfig()
        widths = (config.inputs, *config.hidden)
        layers: list[nn.Module] = []
        for width, after in itertools.pairwise(widths):
            layers += [nn.Linear(width, after), nn.ReLU(), nn.Dropout(config.dropout)]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], config.classes)
        for module in self.hidden:
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # keeps the variance through ReLU
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Floating point [batch, ...] with `inputs` values each -> logits, same dtype [batch, classes]."""
        flat = x.flatten(1) if x.ndim > 1 else x
        if flat.ndim != 2 or flat.shape[1] != self.config.inputs:
            limit = f"it must be [batch, ...] with {self.config.inputs} values each"
            raise UsageError(f"the input is {list(x.shape)}", limit=limit, remedy="set inputs to the data's size")
        out: Tensor = self.head(self.hidden(flat))
        return out
