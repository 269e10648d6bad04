"""A small convolutional classifier, as in the guides: convolution, ReLU, pooling, twice; then two linear layers.

>>> import torch
>>> ConvNet(ConvNetConfig(channels=3, height=28, width=28))(torch.zeros(8, 3, 28, 28)).shape
torch.Size([8, 10])
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.config_checks import check_share, check_whole, check_widths


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Sizes of a ConvNet. Each stage halves height and width."""

    channels: int = 3
    height: int = 28
    width: int = 28
    stages: tuple[int, ...] = (32, 64)
    """Channels of each stage's convolution."""
    hidden: int = 128
    """Width of the linear layer before the last."""
    classes: int = 10
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, "channels", "height", "width", "hidden", "classes")
        check_widths(self, "stages", low=1)
        check_share(self, "dropout")
        if min(self.height, self.width) < 2 ** len(self.stages):
            what = f"ConvNetConfig: images are {self.height} x {self.width} with {len(self.stages)} stages"
            limit = f"each stage halves them, so they must be at least {2 ** len(self.stages)} high and wide"
            raise UsageError(what, limit=limit, remedy="use fewer stages or larger images")


class ConvNet(nn.Module):
    """Stages of convolution, ReLU and max pooling, then two linear layers."""

    def __init__(self, config: ConvNetConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ConvNetConfig()
        widths = (config.channels, *config.stages)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for width, after in itertools.pairwise(widths)
        )
        shrink = 2 ** len(config.stages)
        flat = widths[-1] * (config.height // shrink) * (config.width // shrink)
        self.hidden = nn.Sequential(nn.Linear(flat, config.hidden), nn.ReLU(), nn.Dropout(config.dropout))
        self.head = nn.Linear(config.hidden, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module is not self.head:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # keeps the variance through ReLU
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Floating point [batch, channels, height, width] -> logits, same dtype [batch, classes]."""
        shape = (self.config.channels, self.config.height, self.config.width)
        if images.ndim != 4 or images.shape[1:] != shape:
            limit = f"it must be [batch, {', '.join(map(str, shape))}]"
            raise UsageError(f"the input is {list(images.shape)}", limit=limit, remedy="fit the config to the data")
        x = images
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.hidden(x.flatten(1)))
        return out
