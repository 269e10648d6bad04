"""What a model allows: tried on a few of the user's own samples, never assumed.

    alone        each sample by itself: what is right
    equal        only samples of one length together: always allowed
    padded       a batch gives what the samples give alone, and no bit of it changes with what stands in the padding
    packed       a row of sequences gives what they give alone, and no bit of one changes with its neighbours

The second half of each is what makes the test sharp: a leak from padding or a neighbour may be smaller than rounding
is in bf16, but it cannot leave every bit as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.nested import leaves_in
from flatout.errors import UsageError
from flatout.infer.prediction.model_batch import Batching, Runner
from flatout.infer.prediction.packing import CannotPack
from flatout.infer.prediction.samples import Sample

_ROUNDING = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.01, "int8": 0.1}
"""Largest distance of a batched output from the same alone, relative, in the Euclidean norm: sums in another order
differ by far less, a wrong position or mask by far more."""
TRIED = 3


@dataclass(frozen=True)
class Allowed:
    """Which batchings were found right, with the reasons of the others."""

    packed: bool
    padded: bool
    reasons: dict[str, str]

    def choose(self, wanted: Batching | None) -> tuple[Batching, str]:
        """What to do and why: what the plan wants if that is right, else the best that is."""
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


def try_batchings(runner: Runner, samples: Sequence[Sample], *, packing: bool) -> Allowed | None:
    """Try them on some samples of one kind; None where all are of one length. Sets `runner.token_level`."""
    chosen = _of_several_lengths(samples)
    if len(chosen) < 2:
        return None
    alone = [_outputs(runner.run([sample], "equal")) for sample in chosen]
    level, reason = _token_level(alone, chosen)
    if reason:
        return Allowed(False, False, {"padded": reason, "packed": reason})
    runner.token_level = (runner.token_level or frozenset()) | level  # another kind of sample may have told of more
    reasons = {"padded": _why_not_padded(runner, chosen, alone)}
    reasons["packed"] = _why_not_packed(runner, chosen, alone) if packing else "the plan compiles the model"
    return Allowed(not reasons["packed"], not reasons["padded"], {name: why for name, why in reasons.items() if why})


def _of_several_lengths(samples: Sequence[Sample]) -> list[Sample]:
    """Few samples of different lengths, the longest first: about the shortest, the middle and the upper quarter."""
    by_length: dict[int, Sample] = {}
    kind = samples[0].kind if samples else None
    for sample in samples:
        if sample.length is not None and sample.kind == kind:
            by_length.setdefault(sample.length, sample)
    lengths = sorted(by_length)
    if not lengths:
        return []
    places = sorted({0, len(lengths) // 2, len(lengths) * 3 // 4}, reverse=True)
    return [by_length[lengths[place]] for place in places][:TRIED]


def _outputs(output: Any) -> dict[str, Tensor]:
    found = dict(leaves_in(output, "output", lambda leaf: isinstance(leaf, Tensor)))
    for path, leaf in found.items():
        if leaf.dim() == 0:
            remedy = "wrap the model so that it returns only what belongs to samples"
            raise UsageError(f"{path} is a scalar", limit="an output has a row for each sample", remedy=remedy)
    return found


def _token_level(alone: Sequence[dict[str, Tensor]], samples: Sequence[Sample]) -> tuple[frozenset[str], str]:
    paths = set()
    for path, leaf in alone[0].items():
        shapes = [outputs[path].shape[1:] for outputs in alone]
        if all(shape == shapes[0] for shape in shapes):
            continue
        follows = all(len(shape) and shape[0] == one.length for shape, one in zip(shapes, samples, strict=True))
        if not follows or len({shape[1:] for shape in shapes}) > 1:
            return (
                frozenset(),
                f"{path} is {list(leaf.shape)} for {samples[0].length} tokens: nobody can tell its padding",
            )
        paths.add(path)
    return frozenset(paths), ""


def _why_not_padded(runner: Runner, samples: Sequence[Sample], alone: Sequence[dict[str, Tensor]]) -> str:
    other = int(next(iter(samples[0].tensors.values())).flatten()[0])
    try:
        found = _per_sample(runner, runner.run(samples, "padded"), samples)
        changed = _per_sample(runner, runner.run(samples, "padded", padding=other), samples)
    except Exception as error:  # the model is not ours: what it raises on a batch it was not made for is open
        return f"a padded batch fails: {_first_line(error)}"
    if reason := _difference(runner, found, alone):
        return f"padded, {reason}"
    if not _same_bits(found, changed):
        return "padded, the outputs depend on what stands in the padding"
    return ""


def _why_not_packed(runner: Runner, samples: Sequence[Sample], alone: Sequence[dict[str, Tensor]]) -> str:
    if len(runner.blocks) < 1:
        return "it has no repeated blocks in which tokens could be packed"
    behind = [samples[0], *(_disturbed(sample) for sample in samples[1:])]
    before = [*(_disturbed(sample) for sample in samples[:-1]), samples[-1]]
    try:
        found = _per_sample(runner, runner.run(samples, "packed"), samples)
        first = _per_sample(runner, runner.run(behind, "packed"), samples)[:1]
        last = _per_sample(runner, runner.run(before, "packed"), samples)[-1:]
    except Exception as error:
        return str(error) if isinstance(error, CannotPack) else f"a packed row fails: {_first_line(error)}"
    if reason := _difference(runner, found, alone):
        return f"packed, {reason}"
    if not _same_bits([found[0], found[-1]], [*first, *last]):
        return "packed, a sequence's output depends on its neighbours"
    return ""


def _disturbed(sample: Sample) -> Sample:
    """The same shapes with other content, each value one that the sample has or is next to."""

    def other(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor * 0.5 + 0.25
        if tensor.dtype is torch.bool:
            return tensor
        mirrored = tensor.max() + tensor.min() - tensor
        if torch.equal(mirrored, tensor):
            return tensor - 1 if int(tensor.min()) > 0 else tensor + 1
        return mirrored

    first, *rest = sample.tensors
    tensors = {first: other(sample.tensors[first]), **{name: sample.tensors[name] for name in rest}}
    return Sample(sample.index, tensors, sample.length, sample.kind)


def _per_sample(runner: Runner, output: Any, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
    rows = runner.cut(output, samples, padded=True)
    return [dict(leaves_in(row, "output", lambda leaf: isinstance(leaf, Tensor))) for row in rows]


def _difference(runner: Runner, found: Sequence[dict[str, Tensor]], alone: Sequence[dict[str, Tensor]]) -> str:
    limit = _ROUNDING[runner.placed.rate]
    for ours, right in zip(found, alone, strict=True):
        for path, leaf in ours.items():
            expected = right[path][0].to("cpu", leaf.dtype)
            if leaf.shape != expected.shape:
                return f"{path} of a sample is {list(leaf.shape)}, alone {list(expected.shape)}"
            if not leaf.is_floating_point():
                if not torch.equal(leaf, expected):
                    return f"{path} differs from the same sample alone"
                continue
            distance = float((leaf - expected).norm() / expected.norm().clamp(min=1e-12))
            if not distance <= limit and not _both_nan(leaf, expected):
                return f"{path} differs from the same sample alone by {distance:.1%} (rounding: {limit:.1%})"
    return ""


def _both_nan(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-2, equal_nan=True))


def _same_bits(a: Sequence[dict[str, Tensor]], b: Sequence[dict[str, Tensor]]) -> bool:
    return all(
        torch.allclose(one[path], other[path], rtol=0, atol=0, equal_nan=True)
        for one, other in zip(a, b, strict=True)
        for path in one
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
