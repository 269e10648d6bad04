"""Preparation before the first results: the copy is folded, quantized and packed, and verified on a sample.

A model may read the weights of its own layers, or check their class. So a sample is run before and after: a copy that
fails, or differs by more than rounding, is made again without changing those layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.infer.left_unchanged import left_unchanged
from flatout.infer.prediction.agreement import Agreement, Outputs, same_bits
from flatout.infer.prediction.folding import fold_batch_norms
from flatout.infer.prediction.linear import Int8Linear, PackedLinear, RoundedLinear, read_by_others, swap_linears
from flatout.infer.prediction.model_batch import Runner
from flatout.infer.prediction.placed import round_and_pack
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.samples import Sample
from flatout.plan import Plan

OWN_LAYERS = (Int8Linear, PackedLinear, RoundedLinear)
"""Calling them changes nothing, and their buffers are weights: too large to copy."""
TRIES = 4
"""Failing samples that are skipped."""


def prepare(runner: Runner, plan: Plan, samples: Sequence[Sample], *, fold: bool = True) -> None:
    """Change `runner.placed.model` as the plan says. Its notes say what was done, and what was not and why.

    fold: False for a model whose outputs cannot be compared, as it gives two for one input.
    """
    if plan.fold_batch_norm and fold:
        _fold(runner, samples)
    _round_and_pack(runner, plan, samples)
    runner.placed.remake = None  # it holds the user's model


def why_depends_on_more(runner: Runner, samples: Sequence[Sample]) -> str:
    """Why the same input may have another output later: random numbers, or state from call to call. '' = it has not.

    The model, and the states of the random generators, are left as they were.
    """
    sample = _usable(runner, samples)
    if sample is None:
        return ""
    others = [one for one in samples if one is not sample][:2] or [sample]
    with left_unchanged(runner.placed.model, besides=OWN_LAYERS):
        first = runner.leaves(runner.run([sample], "alone"))
        for other in others:
            try:
                runner.run([other], "alone")
            except Exception:  # a bad input
                continue
        again = runner.leaves(runner.run([sample], "alone"))
    if same_bits([first], [again]):
        return ""
    if runner.placed.device.type == "cuda" and not Agreement(runner.placed.rate).why_not(again, first):
        return ""  # atomic additions have no fixed order
    return "the model gives two results for one input (it draws random numbers or keeps state between calls)"


def _usable(runner: Runner, samples: Sequence[Sample]) -> Sample | None:
    """One that the model takes."""
    for sample in samples[:TRIES]:
        try:
            _run(runner, sample)
        except Exception:  # a bad input: its batch will say so
            continue
        return sample
    return None


def _run(runner: Runner, sample: Sample) -> Outputs:
    with left_unchanged(runner.placed.model, besides=OWN_LAYERS), torch.no_grad():
        return runner.leaves(runner.run([sample], "alone"))


def _fold(runner: Runner, samples: Sequence[Sample]) -> None:
    placed = runner.placed
    sample = _usable(runner, samples)
    if sample is None:
        placed.notes.append("batch norms were not folded: no input was found that the model takes")
        return
    agreement = Agreement(placed.rate)

    def why_not(after: object, before: object) -> str:
        return agreement.why_not(runner.leaves(after), runner.leaves(before))

    try:
        count, reason = fold_batch_norms(placed.model, lambda: runner.run([sample], "alone"), why_not)
    except Exception as error:
        placed.model = _anew(runner)
        placed.notes.append(f"batch norms were not folded: {Failed.by(0, error).what}")
        return
    placed.notes.append(f"{count} batch norms folded into convolutions" + (f"; {reason}" if reason else ""))


def _round_and_pack(runner: Runner, plan: Plan, samples: Sequence[Sample]) -> None:
    placed = runner.placed
    plain: list[nn.Linear] = []
    swap_linears(placed.model, plain.append)
    if not plain:
        return
    sample = _usable(runner, samples)
    before = None if sample is None else _run(runner, sample)
    rounded = plan.weights is not None or plan.activations is not None
    if sample is None and not rounded:
        return  # nothing shows that it would be right
    said = round_and_pack(placed, plan)
    if sample is None or before is None or not said:
        placed.notes += [said] if said else []
        return
    reason = _why_not(runner, sample, before, rounded)
    if reason:
        said = _again(runner, plan, sample, before, rounded, reason)
    placed.notes += [said] if said else []


def _again(runner: Runner, plan: Plan, sample: Sample, before: Outputs, rounded: bool, reason: str) -> str:
    """Without the layers whose weights the model reads itself; where that does not do either, without any."""
    placed = runner.placed
    _remake(runner, plan, sample)
    readers = read_by_others(placed.model, lambda: _run(runner, sample))
    if readers:
        said = round_and_pack(placed, plan, readers)
        if not _why_not(runner, sample, before, rounded):
            return f"{said}; {len(readers)} left, whose weights the model reads itself"
        _remake(runner, plan, sample)
    return f"linear layers are left as they are: changed, {reason}"


def _remake(runner: Runner, plan: Plan, sample: Sample) -> None:
    runner.placed.model = _anew(runner)
    if plan.fold_batch_norm:
        fold_batch_norms(runner.placed.model, lambda: runner.run([sample], "alone"))


def _anew(runner: Runner) -> nn.Module:
    assert runner.placed.remake is not None, "it is only given up when all is done"
    return runner.placed.remake()


def _why_not(runner: Runner, sample: Sample, before: Outputs, rounded: bool) -> str:
    """rounded: to fewer bits, by so much as the plan asks for; whether that is near enough is for its maker to say."""
    try:
        after = _run(runner, sample)
    except Exception as error:
        return f"the model fails ({Failed.by(0, error).what})"
    return "" if rounded else Agreement(runner.placed.rate).why_not(after, before)
