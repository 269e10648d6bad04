"""How close a faster model's outputs are to the same model's in fp32, and how close is close enough.

    error        standard deviation of the difference over that of the reference's outputs: noise against signal
    agreement    share of the answers (class or token with the highest score) that are as good as the reference's: the
                 same, or one that the reference considers nearly as likely. Two tokens at 31 % and 30 % swap under any
                 rounding; calling that an error would rule out bf16 and say nothing about int4
    same answer  share of the answers that are identical
    divergence   mean Kullback-Leibler divergence from the reference's distribution, in nats: the increase in log
                 perplexity

>>> import torch
>>> closeness = Closeness()
>>> closeness.add("output", torch.tensor([[0.0, 3.0]]), torch.tensor([[0.0, 2.9]]), scores=True)
>>> found = closeness.found()
>>> found.agreement, Tolerance().why_not(found)
(1.0, '')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from flatout.errors import UsageError

TIE_NATS = 0.05
"""An answer that is at least exp(-0.05) = 95 % as likely as the best, by the reference, is as good."""
ROUNDING_ERROR = 1e-3
"""Larger errors are not a different order of summation in fp32: thousands of layers add up to less."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One way to run a model against the reference, on the user's sample."""

    error: float
    """Of the output in which it is largest. 0 = the same; inf or NaN where only the candidate's outputs are."""
    largest_error: float
    """Largest single difference over the same standard deviation."""
    agreement: float | None = None
    """None: the outputs are no scores of answers."""
    same_answer: float | None = None
    divergence: float | None = None
    answers: int = 0
    same_bits: bool = False

    def __str__(self) -> str:
        if self.same_bits:
            return "the same bits"
        parts = [f"error {self.error:.2%}" if self.error >= 1e-5 else f"error {self.error:.0e}"]
        if self.agreement is not None:
            parts.insert(0, f"agreement {self.agreement:.2%} of {self.answers:,} answers")
        if self.divergence is not None:
            parts.append(f"divergence {self.divergence:.1e}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Values that are not finite become None: JSON has no infinity."""
        return _for_json(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest acceptable loss. A choice beyond it is dropped, however fast it is.

    max_error: 5 % of noise turn an embedding by a cosine of 0.999; bf16 costs 0.3 to 1 %, 8 bits 0.5 to 3 %, 4 bits 5
    to 20 %. min_agreement: one answer in a hundred may be another one. max_divergence: 0.01 nats are 1 % of perplexity.
    """

    max_error: float = 0.05
    min_agreement: float = 0.99
    max_divergence: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_error", "max_divergence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise UsageError(f"{name} is {value!r}", limit="it is a number of at least 0", remedy="0.05 means 5 %")
        share = self.min_agreement
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            what = f"min_agreement is {share!r}"
            raise UsageError(what, limit="it is a share from 0 to 1", remedy="0.99 means 99 %")

    def why_not(self, found: Accuracy, plain: Accuracy | None = None) -> str:
        """Why the accuracy is not sufficient; '' if it is.

        plain: the accuracy of the unchanged model (in bf16, say). No bound is stricter than that.
        """
        if not math.isfinite(found.error):
            return "it gives inf or NaN where fp32 gives numbers"
        broken = []
        least, most_error, most_divergence = self.min_agreement, self.max_error, self.max_divergence
        if plain is not None and math.isfinite(plain.error):
            least = min(least, 1.0 if plain.agreement is None else plain.agreement)
            most_error = max(most_error, 1.1 * plain.error)
            most_divergence = max(most_divergence, 1.1 * (plain.divergence or 0.0))
        if found.agreement is not None and found.agreement < least:
            broken.append(f"agreement {found.agreement:.2%} of {found.answers:,} answers is below {least:.2%}")
        if found.error > most_error:
            broken.append(f"error {found.error:.1%} is above {most_error:.1%}")
        if found.divergence is not None and found.divergence > most_divergence:
            broken.append(f"divergence {found.divergence:.1e} is above {most_divergence:.1e}")
        return "; ".join(broken)

    def to_json(self) -> dict[str, object]:
        """A bound of infinity, which forbids nothing, becomes None."""
        return _for_json(asdict(self))


def _for_json(values: dict[str, object]) -> dict[str, object]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Closeness:
    """Accumulates pairs of outputs, so that none have to be kept."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._answers = self._as_good = self._same = 0
        self._divergence = 0.0
        self._scored = 0
        self._same_bits = True

    def add(self, path: str, reference: Tensor, candidate: Tensor, *, scores: bool) -> None:
        """One output of both, of any equal shape, on the CPU. scores: its last dimension holds scores of answers."""
        if reference.shape != candidate.shape:
            what = f"{path} is {list(candidate.shape)}"
            raise UsageError(what, limit=f"in fp32 it is {list(reference.shape)}", remedy="drop what changes its shape")
        if reference.is_floating_point():
            self._add_numbers(path, reference.float(), candidate.float(), scores=scores)
        else:
            self._same_bits &= torch.equal(reference, candidate)
            same = int((reference == candidate).sum())
            self._answers, self._same = self._answers + reference.numel(), self._same + same
            self._as_good += same

    def found(self) -> Accuracy:
        """Of all that was added."""
        errors = [one.error for one in self._sums.values()]
        largest = [one.largest_error for one in self._sums.values()]
        worst = math.inf if any(not math.isfinite(error) for error in errors) else max(errors, default=0.0)
        return Accuracy(
            error=worst,
            largest_error=max(largest, default=0.0),
            agreement=self._as_good / self._answers if self._answers else None,
            same_answer=self._same / self._answers if self._answers else None,
            divergence=self._divergence / self._scored if self._scored else None,
            answers=self._answers,
            same_bits=self._same_bits,
        )

    def _add_numbers(self, path: str, reference: Tensor, candidate: Tensor, *, scores: bool) -> None:
        self._same_bits &= torch.allclose(reference, candidate, rtol=0, atol=0, equal_nan=True)
        usable = reference.isfinite()  # where fp32 itself masks by -inf, or fails, nothing can be compared
        self._sums.setdefault(path, _Sums()).add(reference[usable], candidate[usable])
        if not scores or reference.dim() == 0 or reference.shape[-1] < 2:
            return
        ours, theirs = (one.reshape(-1, one.shape[-1]) for one in (reference, candidate))
        whole = ours.isfinite().any(-1) & ~ours.isnan().any(-1)
        ours, theirs = ours[whole], theirs[whole]
        if not len(ours):
            return
        best, chosen = ours.argmax(-1), theirs.nan_to_num(nan=-math.inf).argmax(-1)
        lost = (ours.gather(-1, best[:, None]) - ours.gather(-1, chosen[:, None]))[:, 0]
        self._answers += len(ours)
        self._same += int((best == chosen).sum())
        self._as_good += int((lost <= TIE_NATS).sum())
        p, q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        terms = torch.where(p > -math.inf, p.exp() * (p - q), 0.0)
        self._divergence += max(0.0, float(terms.sum()))
        self._scored += len(ours)


@dataclass
class _Sums:
    """Of one output: enough for the two standard deviations."""

    count: int = 0
    reference: float = 0.0
    reference_squared: float = 0.0
    difference_squared: float = 0.0
    largest: float = 0.0

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        if not reference.numel():
            return
        ours, difference = reference.double(), candidate.double() - reference.double()
        self.count += ours.numel()
        self.reference += float(ours.sum())
        self.reference_squared += float(ours.square().sum())
        self.difference_squared += float(difference.square().sum())
        self.largest = max(self.largest, float(difference.abs().nan_to_num(nan=math.inf).max()))

    @property
    def _spread(self) -> float:
        """Standard deviation of the reference; its size where it hardly varies."""
        mean = self.reference / max(self.count, 1)
        mean_square = self.reference_squared / max(self.count, 1)
        variance = mean_square - mean**2
        return math.sqrt(variance if variance > 1e-12 * mean_square else mean_square)

    @property
    def error(self) -> float:
        # Around 0, not around its mean: an offset of all outputs is an error too.
        return _over(math.sqrt(self.difference_squared / max(self.count, 1)), self._spread)

    @property
    def largest_error(self) -> float:
        return _over(self.largest, self._spread)


def _over(difference: float, spread: float) -> float:
    if difference == 0:
        return 0.0
    return difference / spread if spread > 0 and math.isfinite(difference) else math.inf


def scores_of(paths: Sequence[str], shapes: Sequence[Sequence[int]], vocabulary: int | None) -> tuple[bool, str]:
    """Whether a model's outputs for one item are scores, and why: this is a guess.

    paths, shapes: of its floating-point outputs without the batch. Outputs that are called logits are; so is a bare
    vector (of classes), and a bare matrix whose rows are as long as the vocabulary.
    """
    if any("logits" in path for path in paths):
        return True, "outputs called logits are scores of answers"
    if list(paths) == ["output"]:
        (shape,) = shapes
        if len(shape) == 1 and shape[0] >= 2:
            return True, f"an output [{shape[0]}] is treated as the scores of {shape[0]} classes (scores=False if not)"
        if len(shape) == 2 and shape[1] == vocabulary:
            return True, f"an output [tokens, {vocabulary}] holds the scores of the vocabulary"
    return False, "the outputs are treated as numbers, not as scores of answers (scores=True if they are)"
