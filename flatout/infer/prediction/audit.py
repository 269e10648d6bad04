"""Finished samples run again, alone, while a run goes on: what was tried at its beginning may not hold for ever.

Of each new size of batch (in steps of two, by samples and by tokens) the sample with the most padding and one more;
after that one sample at random whenever it costs no more than a hundredth of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from flatout.data.nested import leaves_in
from flatout.infer.prediction.agreement import Agreement
from flatout.infer.prediction.model_batch import Batching, Runner
from flatout.infer.prediction.samples import Sample

SHARE = 0.01
"""Of the time spent on batches, for samples at random."""


class Mismatch(Exception):
    """This sample's output in a batch is not what the sample alone gives."""

    def __init__(self, sample: Sample, how: Batching, batch: int, why: str) -> None:
        super().__init__(f"input {sample.index}, in a batch ({how}) of {batch}: {why}")
        self.sample, self.how, self.batch, self.why = sample, how, batch, why


class Audit:
    """Of one run. `batch_seconds` is added to by whoever runs batches."""

    def __init__(self, runner: Runner) -> None:
        self.batch_seconds = 0.0
        self.checked = 0
        self._runner = runner
        self._draw = random.Random(0)
        self._sizes: set[Hashable] = set()
        self._seconds = self._last_seconds = 0.0

    def check(
        self, batch: Sequence[Sample], how: Batching, outputs: Sequence[Any], agreement: Agreement, *, compiled: bool
    ) -> None:
        """Raises Mismatch. A sample that the model does not take alone is passed over."""
        if how == "alone" or (len(batch) == 1 and not compiled):
            return  # nothing was done that could have changed it
        places, random_one = self._places(batch, how)
        if not places:
            return
        start = time.perf_counter()
        found = [dict(leaves_in(one, "output", lambda leaf: isinstance(leaf, Tensor))) for one in outputs]
        agreement.learn(found)
        for place in places:
            try:
                right = self._runner.alone(batch[place])
            except Exception:  # as where it only works in batches: then nobody can say what is right
                continue
            self.checked += 1
            if why := agreement.why_not(found[place], right):
                raise Mismatch(batch[place], how, len(batch), why)
        self._last_seconds = time.perf_counter() - start
        if random_one:
            self._seconds += self._last_seconds

    def _places(self, batch: Sequence[Sample], how: Batching) -> tuple[list[int], bool]:
        """Places in the batch, and whether they were drawn by chance alone."""
        longest = max(sample.tokens for sample in batch)
        size = (batch[0].kind, how, len(batch).bit_length(), longest.bit_length())
        if size not in self._sizes:
            self._sizes.add(size)
            shortest = min(range(len(batch)), key=lambda place: batch[place].tokens)
            return sorted({shortest, self._draw.randrange(len(batch))}), False
        if self._seconds + self._last_seconds > SHARE * self.batch_seconds:
            return [], True
        return [self._draw.randrange(len(batch))], True
