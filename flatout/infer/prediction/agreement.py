"""Whether an output equals that of the same sample run alone, within the model's own measured rounding.

Floating-point outputs are compared row by row (a row is the last dimension, so one token), relative to the typical norm
of a row: one wrong token among a thousand is as wrong as a thousand. A different order of summation stays far below the
limits; a wrong position, mask or neighbour is far above them, or (where it is not) differs from run to run.

>>> agreement = Agreement("fp32")
>>> agreement.learn([{"output": torch.tensor([1.0, 2.0])}])
>>> agreement.why_not({"output": torch.tensor([1.0, 2.0])}, {"output": torch.tensor([1.0, 2.0])})
''
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from flatout.infer.output_tensors import output_values
from flatout.infer.prediction.model_batch import Batching, Runner
from flatout.infer.prediction.samples import Sample
from flatout.plan_document import short

Outputs = Mapping[str, object]
"""Of one sample, without a batch dimension: tensors, and whatever else the model returns, by path."""

_ROUNDING = {"fp32": (1e-4, 2e-3), "bf16": (0.05, 0.15), "fp16": (0.01, 0.03), "int8": (0.1, 0.2)}
"""Relative distance of a batched row from the same alone: what is always allowed, and what is never exceeded however
much rounding was measured. Other amounts of padding use other kernels, so the first is not measured."""
TIMES_MEASURED = 4
ANSWERS_ALIKE = 0.98
"""Of whole numbers (classes, ranks) in reduced precision, where ties are broken by rounding."""


class Agreement:
    """For one kind of sample on one model: typical norms of rows, and typical rounding."""

    def __init__(self, rate: str) -> None:
        self.lowest, self.highest = _ROUNDING[rate]
        self.limit = self.lowest
        self.reduced = rate != "fp32"
        self._sizes: dict[str, tuple[float, int]] = {}

    def learn(self, outputs: Iterable[Outputs]) -> None:
        """Learn the norms of rows: without them an output that happens to be near 0 would look wrong."""
        for output in outputs:
            for path, leaf in _as_numbers(output).items():
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                    rows = _rows(leaf.nan_to_num(0.0, 0.0, 0.0))
                    total, count = self._sizes.get(path, (0.0, 0))
                    self._sizes[path] = total + float(rows.square().sum()), count + len(rows)

    def measured(self, found: Outputs, right: Outputs) -> None:
        """These two are known to differ only by rounding."""
        found, right = _as_numbers(found), _as_numbers(right)
        apart = [
            self._apart(path, leaf, other)
            for path, leaf in found.items()
            if _inexact(leaf) and _inexact(other := right.get(path))
        ]
        usual = max(apart, default=0.0)
        if usual <= self.highest:
            self.limit = max(self.limit, min(self.highest, TIMES_MEASURED * usual))

    def why_not(self, found: Outputs, right: Outputs) -> str:
        """Where and by how much they differ beyond rounding; '' if they do not."""
        if found.keys() != right.keys():
            return f"the outputs are {', '.join(found)}, alone {', '.join(right)}"
        found, right = _as_numbers(found), _as_numbers(right)
        for path, leaf in found.items():
            expected = right[path]
            if not isinstance(leaf, Tensor) or not isinstance(expected, Tensor):
                if not _same(leaf, expected):
                    return f"{path} is {short(leaf)}, of the same sample alone {short(expected)}"
                continue
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
    """Whether all values are equal; NaN equals NaN."""
    pairs = [(_as_numbers(one), _as_numbers(other)) for one, other in zip(a, b, strict=True)]
    return all(
        one.keys() == other.keys() and all(_same(leaf, other[path]) for path, leaf in one.items())
        for one, other in pairs
    )


def _as_numbers(outputs: Outputs) -> Outputs:
    """The same with sparse tensors written out, and complex ones as pairs of numbers."""

    def plain(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        dense = leaf if leaf.layout is torch.strided else leaf.to_dense()
        return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense

    return {path: plain(leaf) for path, leaf in outputs.items()}


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    try:
        return a is b or bool(a == b) or (a != a and b != b)
    except Exception:  # arrays compare value by value, and an object of the user's may compare as it likes
        return False


def _rows(leaf: Tensor) -> Tensor:
    return leaf.reshape(-1, leaf.shape[-1]) if leaf.dim() > 1 else leaf.reshape(1, -1)


def _inexact(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


SHARE = 0.01
"""Share of the batches' time that is spent on random samples."""


class Mismatch(Exception):
    """A sample's output in a batch differs from its output alone."""

    def __init__(self, sample: Sample, how: Batching, batch: int, why: str) -> None:
        super().__init__(f"input {sample.index}, in a batch ({how}) of {batch}: {why}")
        self.sample, self.how, self.batch, self.why = sample, how, batch, why


class Audit:
    """Reruns finished samples alone during a run: what held for the first samples may not hold for all.

    Of each new size of batch (in steps of two, by samples and by tokens) the sample with the most padding and one more;
    after that one sample at random whenever it costs no more than a hundredth of the time. `batch_seconds` is
    updated by the caller. Ranks that call a model together measure unlike times: there it is one of every 100 batches.
    """

    def __init__(self, runner: Runner) -> None:
        self.batch_seconds = 0.0
        self.checked = 0
        self._runner = runner
        self._draw = random.Random(0)
        self._sizes: set[Hashable] = set()
        self._seconds = self._last_seconds = 0.0
        self._batches = 0

    def check(
        self, batch: Sequence[Sample], how: Batching, outputs: Sequence[object], agreement: Agreement, *, compiled: bool
    ) -> None:
        """Raises Mismatch. A sample that the model does not take alone is passed over."""
        if how == "alone" or (len(batch) == 1 and not compiled):
            return  # nothing was done that could have changed it
        places, random_one = self._places(batch, how)
        if not places:
            return
        start = time.perf_counter()
        found = [dict(output_values(one)) for one in outputs]
        agreement.learn(found)
        for place in places:
            try:
                right = self._runner.alone(batch[place])
            except Exception:  # it may only work in batches: then there is no reference
                continue
            self.checked += 1
            if why := agreement.why_not(found[place], right):
                raise Mismatch(batch[place], how, len(batch), why)
        self._last_seconds = time.perf_counter() - start
        if random_one:
            self._seconds += self._last_seconds

    def _places(self, batch: Sequence[Sample], how: Batching) -> tuple[list[int], bool]:
        """Places in the batch, and whether they were drawn at random only."""
        longest = max(sample.tokens for sample in batch)
        size = (batch[0].kind, how, len(batch).bit_length(), longest.bit_length())
        if size not in self._sizes:
            self._sizes.add(size)
            shortest = min(range(len(batch)), key=lambda place: batch[place].tokens)
            return sorted({shortest, self._draw.randrange(len(batch))}), False
        self._batches += 1
        if self._runner.placed.ranks is not None:
            due = self._batches % round(1 / SHARE) == 0
        else:
            due = self._seconds + self._last_seconds <= SHARE * self.batch_seconds
        if not due:
            return [], True
        return [self._draw.randrange(len(batch))], True
