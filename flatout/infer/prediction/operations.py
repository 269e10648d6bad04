"""How many operations a sample takes: counted at two lengths, between them by a * length + b * length^2."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from flatout.infer.prediction.samples import Sample
from flatout.torch_private.lookup import is_missing
from flatout.torch_private.tensors import onednn_linear
from flatout.train.flops import count_step

if TYPE_CHECKING:
    from flatout.train.flops import Packet

T = TypeVar("T")


class Operations:
    """Counted on one model, by kind of sample."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, float]] = {}

    def learn(self, samples: Sequence[Sample], run: Callable[[Sample], object]) -> None:
        """From the shortest and the longest of these, of one kind; `run` calls the model on one."""
        known = self._known.setdefault(samples[0].kind, {})
        lengths = {sample.tokens: sample for sample in samples}
        for length in sorted({min(lengths), max(lengths)} - set(known))[: 2 - len(known)]:
            self.counted(lengths[length], run)

    def counted(self, sample: Sample, run: Callable[[Sample], T]) -> T:
        """Returns what `run` returns; its operations are counted until two lengths are known."""
        known = self._known.setdefault(sample.kind, {})
        if len(known) >= 2 or sample.tokens in known:
            return run(sample)
        finish = count_step(_formulas())
        try:
            output = run(sample)
        except Exception:  # a bad sample: its operations are no measure
            finish()
            raise
        known[sample.tokens] = finish()
        return output

    def of(self, sample: Sample) -> float | None:
        """None where none of its kind could be counted."""
        known = self._known.get(sample.kind) or {}
        if not known:
            return None
        if sample.tokens in known:
            return known[sample.tokens]
        (short, of_short), *others = known.items()
        if not others or sample.length is None:
            return of_short * sample.tokens / short
        ((long, of_long),) = others
        b = (of_long / long - of_short / short) / (long - short)
        return (of_short / short - b * short + b * sample.tokens) * sample.tokens


def _formulas() -> Mapping[Packet, Callable[..., int]]:
    """Operations of oneDNN's products, which torch's counter does not know."""
    found: dict[Packet, Callable[..., int]] = {}

    def product(x: Sequence[int], weight: Sequence[int]) -> int:
        return 2 * int(torch.Size(x).numel()) * (weight[0] if weight[1] == x[-1] else weight[1])

    if not is_missing(onednn_linear):
        found[cast("Packet", onednn_linear)] = lambda x, weight, *_: product(x, weight)
    whole = getattr(torch.ops.onednn, "qlinear_pointwise", None)
    if whole is not None:
        found[whole] = lambda x, x_scale, x_zero, weight, *_: product(x, weight)
    return found
