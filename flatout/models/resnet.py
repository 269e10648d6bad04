"""Residual networks with bottleneck blocks (He et al., 2015); the default is ResNet-50.

The stride is in the 3 x 3 convolution (often called v1.5): a 1 x 1 convolution with a stride would discard three
quarters of its input. Give the model and its images `channels_last`: that is how tensor cores read convolutions.

>>> import torch
>>> ResNet(ResNetConfig(classes=10)).eval()(torch.zeros(1, 3, 64, 64)).shape
torch.Size([1, 10])
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.config_checks import check_flag, check_whole, check_widths

EXPANSION = 4
"""A block's output is four times as wide as its middle."""


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Sizes of a ResNet: stages (3, 4, 6, 3) are ResNet-50, (3, 4, 23, 3) 101 and (3, 8, 36, 3) 152."""

    classes: int = 1000
    channels: int = 3
    stages: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage; every stage after the first halves the image and doubles the width."""
    width: int = 64
    """Channels after the first convolution."""
    zero_init_residual: bool = True
    """Start each block as the identity (its last scale is 0): large batches train better that way (Goyal et al.,
    2017)."""

    def __post_init__(self) -> None:
        check_whole(self, "classes", "channels", "width")
        check_widths(self, "stages", low=1)
        check_flag(self, "zero_init_residual")


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, added to a shortcut, which is a convolution only where the shape changes."""

    def __init__(self, channels: int, middle: int, *, stride: int) -> None:
        super().__init__()
        after = middle * EXPANSION
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != after:
            convolution = nn.Conv2d(channels, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Floating point [batch, channels, height, width] -> [batch, 4 middle, height / stride, width / stride]."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        out: Tensor = self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """A first convolution, blocks in stages, an average over the image, one linear layer."""

    def __init__(self, config: ResNetConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ResNetConfig()
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, config.width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(config.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList()
        channels = config.width
        for stage, count in enumerate(config.stages):
            middle = config.width * 2**stage
            for block in range(count):
                self.blocks.append(Bottleneck(channels, middle, stride=2 if stage and block == 0 else 1))
                channels = middle * EXPANSION
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, config.classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        """Floating point [batch, channels, height, width], any size -> logits, same dtype [batch, classes]."""
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            limit = f"it must be [batch, {self.config.channels}, height, width]"
            raise UsageError(f"the input is {list(images.shape)}", limit=limit, remedy="set channels to the data's")
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.pool(x).flatten(1))
        return out

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Bottleneck) and self.config.zero_init_residual:
                nn.init.zeros_(module.norm3.weight)
