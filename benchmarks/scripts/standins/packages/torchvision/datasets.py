"""MNIST and CIFAR10 with generated images: a blurred prototype for each class, shifted and with noise.

STANDIN_TRAIN_SAMPLES and STANDIN_TEST_SAMPLES say how many there are; without them, as many as in the real sets.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

CLASSES = 10
WRONG_LABELS = 0.05
MOSTLY_BLACK = 130  # written digits leave four pixels in five black


def generate_images(
    samples: int, shape: tuple[int, ...], seed: int, *, black_below: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images [samples, *shape] of bytes and their labels, some of them wrong; the prototypes ignore the seed."""
    prototypes = np.random.default_rng(0).random((CLASSES, *shape))
    for axis in (1, 2):  # blurred, so that a small shift changes little
        prototypes = np.mean([np.roll(prototypes, shift, axis) for shift in range(-2, 3)], axis=0)
    prototypes -= prototypes.min(axis=(1, 2), keepdims=True)
    prototypes /= prototypes.max(axis=(1, 2), keepdims=True)
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, samples)
    images = np.empty((samples, *shape), dtype=np.uint8)
    for start in range(0, samples, 1000):
        chosen = prototypes[labels[start : start + 1000]]
        chosen = np.roll(chosen, generator.integers(-2, 3, size=2), axis=(1, 2))
        noise = generator.standard_normal(chosen.shape, dtype=np.float32)
        images[start : start + 1000] = np.clip(160 * chosen + 48 * noise, 0, 255)
    images[images < black_below] = 0
    wrong = generator.random(samples) < WRONG_LABELS  # keeps a loss from sinking to nothing
    return images, np.where(wrong, generator.integers(0, CLASSES, samples), labels)


def sample_count(train: bool, default: int) -> int:
    return int(os.environ.get("STANDIN_TRAIN_SAMPLES" if train else "STANDIN_TEST_SAMPLES", default))


class MNIST(Dataset[tuple[Any, Any]]):
    """28 x 28 grey images; `data` and `targets` are tensors, as in the real class."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        samples = sample_count(train, 60_000 if train else 10_000)
        images, labels = generate_images(samples, (28, 28), seed=1 if train else 2, black_below=MOSTLY_BLACK)
        self.root, self.train = root, train
        self.transform, self.target_transform = transform, target_transform
        self.data, self.targets = torch.from_numpy(images), torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = self.data[index].numpy(), int(self.targets[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class CIFAR10(Dataset[tuple[Any, Any]]):
    """32 x 32 coloured images; `data` is an array [samples, 32, 32, 3] and `targets` a list, as in the real class."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        samples = sample_count(train, 50_000 if train else 10_000)
        self.data, labels = generate_images(samples, (32, 32, 3), seed=3 if train else 4, black_below=0)
        self.targets = labels.tolist()
        self.root, self.train = root, train
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = self.data[index], self.targets[index]
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target
