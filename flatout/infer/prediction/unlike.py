"""Samples like one of the user's but with other content: what a neighbour, or padding, could have been instead.

Each value is one that the sample has or could have: ids stay between those seen, or inside the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.infer.prediction.calling import Calling
from flatout.infer.prediction.samples import Sample

LOUD = 4.0
"""Times the largest value: no maximum, norm or sum is unmoved by it."""


def disturbed(sample: Sample, how: float) -> Sample:
    """The same shapes; the first tensor has other values. `how` > 1: larger numbers, below 1: smaller ones."""
    first, *rest = sample.tensors
    tensors = {first: _other(sample.tensors[first], how), **{name: sample.tensors[name] for name in rest}}
    return sample.like(tensors, sample.length)


def _other(tensor: Tensor, how: float) -> Tensor:
    if tensor.is_floating_point():
        return tensor * how + 0.25
    if tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    mirrored = tensor.max() + tensor.min() - tensor
    if how < 1 and not torch.equal(tensor.flip(0), tensor):
        return tensor.flip(0)
    if torch.equal(mirrored, tensor):
        return tensor - 1 if int(tensor.min()) > 0 else tensor + 1
    return mirrored


def shortened(sample: Sample, length: int) -> Sample:
    """Its first `length` tokens."""
    assert sample.length is not None, "an input of fixed size has no tokens"
    cut = {
        name: one[:length].clone() if 1 <= one.dim() <= 2 and one.shape[0] == sample.length else one
        for name, one in sample.tensors.items()
    }
    return sample.like(cut, length)


class Noise:
    """What stands in padding while it is tried: never twice the same, and loud."""

    def __init__(self, calling: Calling, seed: int) -> None:
        self._vocabulary = calling.vocabulary
        self._generator = torch.Generator().manual_seed(seed)

    def like(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Of the dtype of `part`, a real sample."""
        if part.is_floating_point():
            size = LOUD * float(part.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) + 1.0
            drawn = torch.rand(shape, generator=self._generator) + 0.5
            signs = torch.randint(0, 2, shape, generator=self._generator) * 2 - 1
            return (drawn * signs * size).to(part.dtype)
        if part.dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self._generator).bool()
        low, high = int(part.min()), int(part.max())
        if self._vocabulary is not None and low >= 0 and high < self._vocabulary:
            low, high = 0, self._vocabulary - 1
        return torch.randint(low, high + 1, shape, generator=self._generator).to(part.dtype)
