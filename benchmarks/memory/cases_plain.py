"""Models written in plain torch: convolutional nets of several kinds, recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory.cases import BF16, Case, Subject, cases_of, classify, next_token, parts


def plain_cases() -> list[Case]:
    images, loss = classify(3, 48, 48, classes=20)
    vgg = Subject(name="VGG with BatchNorm", make=lambda: _vgg(norm=True), batch=images, loss_fn=loss, sizes=(4, 24))
    bare = Subject(name="VGG", make=lambda: _vgg(norm=False), batch=images, loss_fn=loss, sizes=(4, 24))
    separable = Subject(name="separable convolutions", make=_separable, batch=images, loss_fn=loss, sizes=(4, 24))
    unet = Subject(name="U-Net", make=UNet, batch=_pictures, loss_fn=_reproduce, sizes=(2, 10))
    autoencoder = Subject(name="autoencoder", make=_autoencoder, batch=_pictures, loss_fn=_reproduce, sizes=(4, 20))
    tokens, next_loss = next_token(300, 40)

    def recurrent(kind: str, **fields: Any) -> Subject:
        return Subject(
            name=f"nn.{kind}",
            make=lambda: Recurrent(kind, **fields),
            batch=tokens,
            loss_fn=next_loss,
            sizes=(6, 40),
        )

    return [
        *cases_of(vgg, ("momentum", {}), ("adam", BF16)),
        *cases_of(bare, ("adam", parts(2)), ("adafactor", {})),
        *cases_of(separable, ("adam", {}), ("momentum", BF16)),
        *cases_of(unet, ("adam", {}), ("adam", BF16)),
        *cases_of(autoencoder, ("adam", {}), ("momentum", BF16)),
        *cases_of(recurrent("GRU"), ("adam", {}), ("adam", BF16)),
        *cases_of(recurrent("LSTM", bidirectional=True), ("adam", {}), ("momentum", BF16)),
    ]


def _vgg(*, norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 64), (64, 64), (64, 96)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers.append(nn.ReLU(inplace=True))
        layers += [nn.MaxPool2d(2)] if outputs != inputs or outputs == 96 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(864, 256), nn.ReLU(), nn.Dropout(),
                         nn.Linear(256, 20))  # fmt: skip


def _separable() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.Hardswish()]
    for inputs, outputs, stride in ((24, 48, 1), (48, 48, 1), (48, 96, 2), (96, 96, 1)):
        layers += [
            nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.Hardswish(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 20))


def _pictures(samples: int) -> Any:
    return torch.randn(samples, 3, 64, 64)


def _reproduce(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch), batch)


class UNet(nn.Module):
    """Convolutions with GroupNorm down, upsampling up, with connections across."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = 3
        for width in widths:
            self.down.append(self._stage(before, width))
            before = width
        for width in reversed(widths[:-1]):
            self.up.append(self._stage(before + width, width))
            before = width
        self.head = nn.Conv2d(before, 3, 1)

    @staticmethod
    def _stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        across: list[Tensor] = []
        for stage in self.down:
            if across:
                x = nn.functional.avg_pool2d(x, 2)
            x = stage(x)
            across.append(x)
        across.pop()
        for stage in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = stage(torch.cat([x, across.pop()], 1))
        return self.head(x)


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


class Recurrent(nn.Module):
    """Embedding, recurrent layers, a head for every token."""

    def __init__(self, kind: str, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 72)
        self.layers = getattr(nn, kind)(72, 128, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(256 if bidirectional else 128, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])
