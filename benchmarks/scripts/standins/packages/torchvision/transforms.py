"""The transforms that the public scripts use, on numpy images [height, width] or [height, width, channels]."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Bytes [height, width, channels] to a float tensor [channels, height, width] between 0 and 1."""

    def __call__(self, image: np.ndarray) -> Tensor:
        if image.ndim == 2:
            image = image[:, :, None]
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).float().div(255)


class Normalize(torch.nn.Module):
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, image: Tensor) -> Tensor:
        mean = torch.as_tensor(self.mean, dtype=image.dtype).view(-1, 1, 1)
        std = torch.as_tensor(self.std, dtype=image.dtype).view(-1, 1, 1)
        return image.clone().sub_(mean).div_(std)


class Pad(torch.nn.Module):
    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, image: np.ndarray) -> np.ndarray:
        around = (self.padding, self.padding)
        return np.pad(image, (around, around, *[(0, 0)] * (image.ndim - 2)))


class RandomHorizontalFlip(torch.nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, image: np.ndarray) -> np.ndarray:
        return image[:, ::-1] if torch.rand(1) < self.p else image


class RandomCrop(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: np.ndarray) -> np.ndarray:
        top = int(torch.randint(0, image.shape[0] - self.size + 1, size=(1,)))
        left = int(torch.randint(0, image.shape[1] - self.size + 1, size=(1,)))
        return image[top : top + self.size, left : left + self.size]
