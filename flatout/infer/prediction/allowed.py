"""Which kinds of batches a model supports: tested on a few of the user's own samples, never assumed.

    alone        each sample by itself: the reference
    equal        a batch of one shape gives what the samples give alone, at any place, and no bit of a sample's output
                 changes with its neighbours
    padded       the same for samples of unlike lengths, the shortest beside the longest, at two amounts of padding,
                 and no bit of it changes with what stands in the padding
    packed       the same for a row of sequences, and no bit of one changes with its neighbours

The second half of each makes the test sharp: a leak from padding or a neighbour may be smaller than bf16 rounding, but
it cannot leave every bit unchanged. The result holds for the lengths that were tested; beyond them it is tested again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor

from flatout.errors import describe_error
from flatout.infer.prediction.agreement import Agreement, Outputs, same_bits
from flatout.infer.prediction.model_batch import Batching, Runner, find_layout
from flatout.infer.prediction.packing import CannotPack
from flatout.infer.prediction.samples import Noise, Sample, disturbed, shortened

BEYOND = 2
"""Lengths beyond the tested range by this factor are tested again."""
TRIES = 4
"""Failing samples that are skipped."""
SHORTENED = 8
"""The first eighth of the longest sample is tested with it, if the user has none as short."""


@dataclass(frozen=True)
class Allowed:
    """Which kinds of batches are correct, with reasons for the others."""

    equal: bool
    packed: bool = False
    padded: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    shortest: int = 0
    """Tokens of the shortest and of the longest sample that was tried; 0: of one length only."""
    longest: int = 0

    def covers(self, lengths: Sequence[int]) -> bool:
        """Are these lengths (sorted) near enough to those that were tried? Where nothing was found right they are."""
        if not self.equal or lengths[0] == lengths[-1]:
            return True
        if not self.longest:
            return False
        if not (self.padded or self.packed):
            return True
        return lengths[-1] <= BEYOND * self.longest and BEYOND * lengths[0] >= self.shortest

    def choose(self, wanted: Batching | None) -> tuple[Batching, str]:
        """What to do and why: what the plan wants if that is right, else the best that is."""
        if not self.equal:
            return "alone", self.reasons["equal"]
        best: Batching = "packed" if self.packed else "padded" if self.padded else "equal"
        if wanted is None or wanted == "equal":
            chosen = wanted or best
        else:
            right = self.packed if wanted == "packed" else self.padded
            chosen = wanted if right else "padded" if wanted == "packed" and self.padded else "equal"
        first = wanted or "packed"
        reason = self.reasons.get(first, "") if chosen != first else ""
        if chosen == "equal" and first == "packed" and "padded" in self.reasons:
            reason = f"{reason}; {self.reasons['padded']}"
        return chosen, reason

    def only_alone(self, reason: str) -> Allowed:
        """After a batch was found wrong."""
        return replace(self, equal=False, packed=False, padded=False, reasons={"equal": reason})


@dataclass
class Trial:
    """Tries batchings of one kind of sample. `agreement` learns how much the model rounds."""

    runner: Runner
    agreement: Agreement
    most_tokens: int
    """Of a batch: longer samples never meet a neighbour."""

    def equal(self, samples: Sequence[Sample]) -> Allowed | None:
        """Batches of one shape; sets the runner's layout. None where none of the samples could be run."""
        for sample, neighbour in _with_a_neighbour(samples)[:TRIES]:
            try:
                self.runner.run([sample], "alone")
            except Exception:  # a bad input: its batch will say so
                continue
            reason = self._why_not_equal(sample, neighbour)
            return Allowed(equal=not reason, reasons={"equal": reason} if reason else {})
        return None

    def ragged(self, known: Allowed, samples: Sequence[Sample], *, packing: bool) -> Allowed:
        """Samples of unlike lengths, for which `known` holds so far."""
        chosen, alone = self._of_several_lengths(samples)
        if len(chosen) < 2:
            return known
        self.agreement.learn(alone)
        lengths = [sample.tokens for sample in chosen]
        tried = replace(known, shortest=min(lengths), longest=max(lengths))
        level, reason = _token_level(alone, chosen)
        if reason:
            return replace(tried, packed=False, padded=False, reasons={"padded": reason, "packed": reason})
        self.runner.token_level = (self.runner.token_level or frozenset()) | level  # another kind may have added more
        reasons = {"padded": self._why_not_padded(chosen, alone)}
        reasons["packed"] = self._why_not_packed(chosen, alone) if packing else "the plan compiles the model"
        why = {name: reason for name, reason in reasons.items() if reason}
        return replace(tried, packed=not reasons["packed"], padded=not reasons["padded"], reasons=why)

    def layout(self, sample: Sample, other: Sample | None = None) -> str:
        """Sets the runner's layout, from the sample alone and in a batch; why it has none."""
        one, several = self._raw([sample]), self._raw([sample, *[other or sample] * 2])
        self.runner.layout, reason = find_layout(one, several, 3)
        return reason

    # samples

    def _that_run(self, candidates: Sequence[Sample]) -> Iterator[tuple[Sample, Outputs]]:
        """Those that the model takes, with their outputs alone."""
        for one in candidates[:TRIES]:
            try:
                yield one, self.runner.alone(one)
            except Exception:  # a bad input: its batch will say so
                continue

    def _of_several_lengths(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Outputs]]:
        """The longest, the shortest, one between them, and one that is shorter still; the longest first."""
        by_length = {sample.length: sample for sample in samples if sample.tokens < self.most_tokens}
        ordered = [by_length[length] for length in sorted(by_length, key=lambda length: length or 0)]
        if len(ordered) < 2:
            return [], []
        longest = next(self._that_run(ordered[::-1]), None)
        shortest = next(self._that_run(ordered), None)
        if longest is None or shortest is None or longest[0].length == shortest[0].length:
            return [], []
        found = [longest, shortest]
        most, least = longest[0].tokens, shortest[0].tokens
        if 3 * most <= self.most_tokens and len(ordered) > 2:
            found += self._that_run([ordered[len(ordered) // 2]])
        if (length := max(1, most // SHORTENED)) < least:
            found += self._that_run([shortened(longest[0], length)])
        distinct = {one.tokens: (one, alone) for one, alone in found}
        kept = [distinct[length] for length in sorted(distinct, reverse=True)]
        return [one for one, _ in kept], [alone for _, alone in kept]

    # trying

    def _why_not_equal(self, sample: Sample, neighbour: Sample | None) -> str:
        louder, quieter = disturbed(sample, 4.0), disturbed(sample, 0.25)
        first = neighbour or louder
        try:
            if reason := self.layout(sample, first):
                return reason
            alone = self.runner.alone(sample)
            found = self._together([sample, first, first], "equal")
            moved = self._together([first, first, sample], "equal")
            try:
                others = [self._together([sample, *pair], "equal") for pair in ((louder, quieter), (quieter, louder))]
            except Exception:  # the model refuses what is not the user's: then only theirs is tried
                others = [self._together([sample, sample, first], "equal")]
        except Exception as error:  # the model is not ours: what it raises on a batch it was not made for is open
            return f"a batch fails: {describe_error(error)}"
        self.agreement.learn([alone, *found])
        if not all(same_bits(found[:1], one[:1]) for one in others):
            return "in a batch a sample's output depends on its neighbours"
        self.agreement.measured(found[0], alone)
        reason = self._difference([found[0], moved[-1]], [alone, alone])
        return f"in a batch, {reason}" if reason else ""

    def _why_not_padded(self, samples: Sequence[Sample], alone: Sequence[Outputs]) -> str:
        try:
            found = self._together(samples, "padded")
            changed = [self._together(samples, "padded", padding=Noise(self.runner.calling, seed)) for seed in (1, 2)]
        except Exception as error:
            return f"a padded batch fails: {describe_error(error)}"
        if reason := self._difference(found, alone):
            return f"padded, {reason}"
        if not all(same_bits(found, one) for one in changed):
            return "padded, the outputs depend on the content of the padding"
        try:
            noise, more = Noise(self.runner.calling, 3), self._more_than(samples[0].tokens)
            wider = self._together(samples, "padded", tokens=more, padding=noise)
        except Exception:  # the model may take no longer inputs
            return ""
        reason = self._difference(wider, alone)
        return f"padded further, {reason}" if reason else ""

    def _why_not_packed(self, samples: Sequence[Sample], alone: Sequence[Outputs]) -> str:
        if len(self.runner.blocks) < 1:
            return "it has no repeated blocks in which tokens could be packed"
        others = [disturbed(sample, 4.0) for sample in samples]
        try:
            found = self._together(samples, "packed")
            first = self._together([samples[0], *others[1:]], "packed")[0]
            last = self._together([*others[:-1], samples[-1]], "packed")[-1]
        except Exception as error:
            return str(error) if isinstance(error, CannotPack) else f"a packed row fails: {describe_error(error)}"
        if reason := self._difference(found, alone):
            return f"packed, {reason}"
        if not same_bits([found[0], found[-1]], [first, last]):
            return "packed, a sequence's output depends on its neighbours"
        return ""

    def _together(
        self, samples: Sequence[Sample], how: Batching, *, tokens: int | None = None, padding: Noise | None = None
    ) -> list[dict[str, object]]:
        output = self.runner.run(samples, how, tokens=tokens, padding=padding)
        return self.runner.outputs(output, samples, padded=how != "equal")

    def _raw(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        return self.runner.leaves(self.runner.run(samples, "equal"))

    def _difference(self, found: Sequence[Outputs], alone: Sequence[Outputs]) -> str:
        reasons = (self.agreement.why_not(ours, right) for ours, right in zip(found, alone, strict=True))
        return next((reason for reason in reasons if reason), "")

    def _more_than(self, tokens: int) -> int:
        more = 2 * tokens if 2 * tokens <= max(64, self.most_tokens) else tokens + tokens // 4 + 1
        longest = self.runner.calling.longest
        return more if longest is None else max(tokens, min(more, longest))


def _with_a_neighbour(samples: Sequence[Sample]) -> list[tuple[Sample, Sample | None]]:
    """(sample, another of its shape or None): short ones first, those that have another before those that have none."""
    by_shape: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        by_shape.setdefault(sample.shape, []).append(sample)
    groups = sorted(by_shape.values(), key=lambda group: (len(group) == 1, group[0].tokens))
    pairs: list[tuple[Sample, Sample | None]] = []
    for group in groups:
        pairs += [*pairwise(group[:3])] or [(group[0], None)]
    return pairs


def _token_level(alone: Sequence[Outputs], samples: Sequence[Sample]) -> tuple[frozenset[str], str]:
    paths = set()
    for path in alone[0]:
        leaves = [leaf for outputs in alone if isinstance(leaf := outputs.get(path), Tensor)]
        if not leaves:
            continue
        if len(leaves) < len(alone):
            return frozenset(), f"{path} is not returned for every length"
        shapes = [leaf.shape for leaf in leaves]
        if all(shape == shapes[0] for shape in shapes):
            continue
        follows = all(len(shape) and shape[0] == one.length for shape, one in zip(shapes, samples, strict=True))
        if not follows or len({shape[1:] for shape in shapes}) > 1:
            shown = f"{path} is {list(shapes[0])} for {samples[0].length} tokens"
            return frozenset(), f"{shown}: its padding cannot be identified"
        paths.add(path)
    return frozenset(paths), ""
