"""Is this the output of the same sample run alone? Within rounding, which is measured on the model itself.

Floating-point outputs are compared row by row (a row: the last dimension, so one token), relative to the usual size of
a row: one wrong token among a thousand is as wrong as a thousand. Sums in another order differ by far less than the
limits; a wrong position, mask or neighbour by far more, or (where it is less) not by the same bits twice.

>>> agreement = Agreement("fp32")
>>> agreement.learn([{"output": torch.tensor([1.0, 2.0])}])
>>> agreement.why_not({"output": torch.tensor([1.0, 2.0])}, {"output": torch.tensor([1.0, 2.0])})
''
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Outputs = Mapping[str, Tensor]
"""Of one sample, without a batch dimension, by path."""

_ROUNDING = {"fp32": (1e-4, 2e-3), "bf16": (0.05, 0.15), "fp16": (0.01, 0.03), "int8": (0.1, 0.2)}
"""Relative distance of a batched row from the same alone: what is always allowed, and what is never exceeded however
much the model was seen to round. Padding in other amounts takes other kernels, so the first is no measured value."""
TIMES_MEASURED = 4
ANSWERS_ALIKE = 0.98
"""Of whole numbers (classes, ranks) in reduced precision, where ties are broken by rounding."""


class Agreement:
    """Of one kind of sample on one model: the sizes that rows have, and how much rounding is usual."""

    def __init__(self, rate: str) -> None:
        self.lowest, self.highest = _ROUNDING[rate]
        self.limit = self.lowest
        self.reduced = rate != "fp32"
        self._sizes: dict[str, tuple[float, int]] = {}

    def learn(self, outputs: Iterable[Outputs]) -> None:
        """What size rows have: without it one output that happens to lie near 0 would look wrong."""
        for output in outputs:
            for path, leaf in output.items():
                if leaf.is_floating_point() and leaf.numel():
                    rows = _rows(leaf.nan_to_num(0.0, 0.0, 0.0))
                    total, count = self._sizes.get(path, (0.0, 0))
                    self._sizes[path] = total + float(rows.square().sum()), count + len(rows)

    def measured(self, found: Outputs, right: Outputs) -> None:
        """These two are known to differ by rounding alone."""
        usual = max((self._apart(path, leaf, right[path]) for path, leaf in found.items() if _inexact(leaf)), default=0)
        if usual <= self.highest:
            self.limit = max(self.limit, min(self.highest, TIMES_MEASURED * usual))

    def why_not(self, found: Outputs, right: Outputs) -> str:
        """Where and by how much they differ beyond rounding; '' if they do not."""
        if found.keys() != right.keys():
            return f"the outputs are {', '.join(found)}, alone {', '.join(right)}"
        for path, leaf in found.items():
            expected = right[path]
            if leaf.shape != expected.shape:
                return f"{path} of a sample is {list(leaf.shape)}, alone {list(expected.shape)}"
            if not _inexact(leaf):
                alike = float((leaf == expected).double().mean()) if leaf.numel() else 1.0
                if alike < (ANSWERS_ALIKE if self.reduced else 1.0):
                    return f"{path} differs from the same sample alone in {1 - alike:.1%} of its values"
                continue
            apart = self._apart(path, leaf, expected)
            if not apart <= self.limit:
                return f"{path} differs from the same sample alone by {apart:.2%} (rounding: {self.limit:.2%})"
        return ""

    def _apart(self, path: str, found: Tensor, right: Tensor) -> float:
        """Largest distance of a row, over the usual size of one; inf where only one of the two is not finite."""
        if not found.numel():
            return 0.0
        difference = found.double() - right.double()
        same = (found == right) | (found.isnan() & right.isnan())
        difference = torch.where(same, 0.0, difference)
        largest = float(_rows(difference).norm(dim=-1).max())
        if largest == 0.0:
            return 0.0
        total, count = self._sizes.get(path, (0.0, 0))
        own = _rows(right.nan_to_num(0.0, 0.0, 0.0)).double().square().sum(-1).mean()
        size = math.sqrt(max(float(own), total / count if count else 0.0))
        return largest / size if size > 0 and math.isfinite(largest) else math.inf


def same_bits(a: Sequence[Outputs], b: Sequence[Outputs]) -> bool:
    """Every value of both; NaN equals NaN."""
    return all(
        one.keys() == other.keys()
        and all(torch.allclose(leaf, other[path], rtol=0, atol=0, equal_nan=True) for path, leaf in one.items())
        for one, other in zip(a, b, strict=True)
    )


def _rows(leaf: Tensor) -> Tensor:
    return leaf.reshape(-1, leaf.shape[-1]) if leaf.dim() > 1 else leaf.reshape(1, -1)


def _inexact(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()
