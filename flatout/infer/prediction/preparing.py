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
    if plan.fold_batch_norm and not fold:
        runner.placed.notes.append("batch norms were not folded: the outputs before and after could not be compared")
    if not runner.placed.is_copy:
        return
    folded = plan.fold_batch_norm is True and fold and _fold(runner, samples)
    _round_and_pack(runner, plan, samples, folded)
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


def _fold(runner: Runner, samples: Sequence[Sample]) -> bool:
    """Whether batch norms were folded. A difference to the model as it was undoes it."""
    placed = runner.placed
    sample = _usable(runner, samples)
    if sample is None:
        placed.notes.append("batch norms were not folded: no input was found that the model takes")
        return False
    try:
        count, said, output = fold_batch_norms(placed.model, lambda: runner.run([sample], "alone"))
        before = runner.leaves(output)
        reason = Agreement(placed.rate).why_not(_run(runner, sample), before) if count else ""
    except Exception as error:
        _remake(runner, sample, folded=False)
        placed.notes.append(f"batch norms were not folded: {Failed.by(0, error).what}")
        return False
    if reason:
        _remake(runner, sample, folded=False)
        count, said = 0, f"folded, {reason}"
    placed.notes.append(f"{count} batch norms folded into convolutions" + (f"; {said}" if said else ""))
    return not reason


def _round_and_pack(runner: Runner, plan: Plan, samples: Sequence[Sample], folded: bool) -> None:
    plain: list[nn.Linear] = []
    swap_linears(runner.placed.model, plain.append)
    sample = _usable(runner, samples) if plain else None
    rounded = plan.weights is not None or plan.activations is not None
    said = ""
    if sample is not None:
        said = _changed(runner, plan, sample, rounded, folded)
    elif plain and rounded:  # of other changes nothing shows that they would be right
        said = round_and_pack(runner.placed, plan)
    runner.placed.notes += [said] if said else []


def _changed(runner: Runner, plan: Plan, sample: Sample, rounded: bool, folded: bool) -> str:
    """What was done, in words: to all layers, else to those whose weights the model does not read itself, else to none.

    rounded: to fewer bits, by so much as the plan asks for; whether that is near enough is for its maker to say.
    """
    before = _run(runner, sample)

    def why_not() -> str:
        try:
            after = _run(runner, sample)
        except Exception as error:
            return f"the model fails ({Failed.by(0, error).what})"
        return "" if rounded else Agreement(runner.placed.rate).why_not(after, before)

    said = round_and_pack(runner.placed, plan)
    reason = why_not() if said else ""
    if not reason:
        return said
    _remake(runner, sample, folded)
    readers = read_by_others(runner.placed.model, lambda: _run(runner, sample))
    if readers:
        said = round_and_pack(runner.placed, plan, readers) or "no linear layer is changed"
        if not why_not():
            return f"{said}; {len(readers)} left, whose weights the model reads itself"
        _remake(runner, sample, folded)
    return f"linear layers are left as they are: changed, {reason}"


def _remake(runner: Runner, sample: Sample, folded: bool) -> None:
    """The copy anew; its batch norms are folded where that was found right."""
    assert runner.placed.remake is not None, "it is only given up when all is done"
    runner.placed.model = runner.placed.remake()
    if folded:
        fold_batch_norms(runner.placed.model, lambda: runner.run([sample], "alone"))
