"""Levers that change what is learned, each in another way. None of them may be accepted at what it claims.

`FAULTS` holds (name, how, scripts on which it does something). Each claims 'reduced', the claim that is easiest to
pass; the proof tries 'within rounding' before that, so one run tells about both. `NOT_DETECTABLE` says beforehand
which of them are within what a claim allows, and why.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.proof.faults import (
    after,
    always,
    as_they_arise,
    at,
    batches,
    biases,
    clipped,
    coarse,
    constant_rate,
    drawing,
    dropped_batch,
    every,
    few_bits,
    first,
    half_repeated,
    in_bf16,
    inputs,
    largest,
    last,
    loss_scaled,
    momentum_lost,
    noise,
    numpy_number,
    off,
    output,
    poisoned,
    previous,
    pulled,
    python_number,
    rate,
    remembered,
    repeated_batch,
    rolled,
    rough_data,
    scaled,
    second_moment_lost,
    setting,
    stale,
    state,
    swapped_batches,
    torch_number,
    twice,
    uncleared,
    underflow,
    undone,
    updates,
    when,
    without,
    wrong_labels,
    young,
)
from benchmarks.proof.planted import Context, Planted, after_step

ALL = (
    "mlp_epochs",
    "numpy_batches",
    "cnn_schedule",
    "lstm_text",
    "gpt_accumulated",
    "bf16_already",
    "short",
    "two_optimizers",
)
WITHOUT_OPTIMIZER = "own_updates"
CARRIED_STATE = "carried_state"
"""Its model returns a tuple, and its inputs are indices."""
ONE_OUTPUT = (*ALL, WITHOUT_OPTIMIZER)
EVERY = (*ONE_OUTPUT, CARRIED_STATE)
"""`ALL` are those with an optimizer, through which most faults reach the training."""
LOADERS = ("mlp_epochs", "cnn_schedule", "bf16_already", "two_optimizers", WITHOUT_OPTIMIZER)
DECAYED = ("numpy_batches", "gpt_accumulated", "cnn_schedule", "bf16_already", "short")
ADAPTIVE = ("mlp_epochs", "numpy_batches", "lstm_text", "gpt_accumulated", "two_optimizers")
DROPOUT = ("mlp_epochs", "gpt_accumulated", "two_optimizers", WITHOUT_OPTIMIZER)
MOMENTUM = ("cnn_schedule", "bf16_already", *ADAPTIVE)
BATCHED = tuple(script for script in EVERY if script != "short")
"""The short script has the same batch in every step."""
PLAIN_STEP = ("cnn_schedule", "bf16_already")
BY_HAND = (WITHOUT_OPTIMIZER, CARRIED_STATE)
"""Adam and RMSprop divide by the gradient's size: there a scaled gradient changes nothing."""


FAULTS: tuple[tuple[str, Callable[[], Context], tuple[str, ...]], ...] = (
    ("gradient of the first parameter zeroed", lambda: scaled(first, 0.0), ALL),
    ("gradient of the last parameter zeroed", lambda: scaled(last, 0.0), ALL),
    ("gradient of the largest parameter zeroed", lambda: scaled(largest, 0.0), ALL),
    ("gradients of biases zeroed", lambda: scaled(biases, 0.0), ALL),
    ("gradient of the first parameter inverted", lambda: scaled(first, -1.0), ALL),
    ("gradient of the last parameter inverted", lambda: scaled(last, -1.0), ALL),
    ("gradient of the first parameter halved", lambda: scaled(first, 0.5), PLAIN_STEP),
    ("gradient of the last parameter doubled", lambda: scaled(last, 2.0), PLAIN_STEP),
    ("gradients scaled by 0.8", lambda: scaled(every, 0.8), PLAIN_STEP),
    ("gradients scaled by 1.01", lambda: scaled(every, 1.01), PLAIN_STEP),
    ("gradients with noise of their own size", lambda: when(always, noise), ALL),
    ("gradients of one bit", lambda: when(always, few_bits), ALL),
    ("small gradients underflow", lambda: when(always, underflow), ALL),
    ("gradients lost from step 60 on", lambda: when(after(60), lambda p: p.grad.zero_()), ALL),
    ("gradients lost in every tenth step", lambda: when(lambda n: n % 10 == 0, lambda p: p.grad.zero_()), ALL),
    ("gradients lost in step 45", lambda: when(at(45), lambda p: p.grad.zero_()), ALL),
    ("gradients of the step before", stale, ALL),
    ("gradients not cleared", uncleared, ALL),
    ("gradients clipped to 0.02", lambda: clipped(0.02), ALL),
    ("signs instead of gradients", lambda: when(always, lambda p: p.grad.sign_()), ALL),
    ("NaN in one gradient at step 50", lambda: poisoned(50), ALL),
    ("first parameter skipped", lambda: without(first), ALL),
    ("last parameter skipped", lambda: without(last), ALL),
    ("biases skipped", lambda: without(biases), ALL),
    ("a gradient zeroed as it arises", lambda: as_they_arise(last, lambda p: p.grad.zero_()), EVERY),
    ("a gradient inverted as it arises", lambda: as_they_arise(largest, lambda p: p.grad.neg_()), EVERY),
    ("gradients of one bit as they arise", lambda: as_they_arise(every, few_bits), EVERY),
    (
        "a gradient halved as it arises",
        lambda: as_they_arise(first, lambda p: p.grad.mul_(0.5)),
        (*PLAIN_STEP, *BY_HAND),
    ),
    ("updates by hand a tenth less", lambda: updates(lambda g: g * 0.9), BY_HAND),
    ("updates by hand of bf16 and a twentieth more", lambda: updates(lambda g: g.bfloat16().float() * 1.05), BY_HAND),
    ("updates by hand doubled", lambda: updates(lambda g: g * 2), BY_HAND),
    ("updates by hand lost", lambda: updates(lambda g: g * 0), BY_HAND),
    ("weight decay lost", lambda: setting("weight_decay", lambda v: 0.0), DECAYED),
    ("weight decay doubled", lambda: setting("weight_decay", lambda v: 2 * v), DECAYED),
    ("learning rate a tenth less", lambda: rate(0.9), ALL),
    ("learning rate doubled", lambda: rate(2.0), ALL),
    ("schedule ignored", constant_rate, ("cnn_schedule",)),
    ("momentum lost at step 47", lambda: state(at(47), momentum_lost), MOMENTUM),
    ("momentum lost in every step", lambda: state(always, momentum_lost), MOMENTUM),
    ("momentum lost every 20 steps", lambda: state(lambda n: n % 20 == 0, momentum_lost), MOMENTUM),
    ("second moments halved every 10 steps", lambda: state(lambda n: n % 10 == 0, second_moment_lost), ADAPTIVE),
    ("bias correction lost", lambda: state(at(2, 3, 4, 5, 6), young), ADAPTIVE),
    ("betas changed", lambda: setting("betas", lambda v: (0.5, 0.9)), ADAPTIVE),
    ("epsilon of 1e-3", lambda: setting("eps", lambda v: 1e-3), (*ADAPTIVE, "short")),
    ("weights kept in bf16", lambda: after_step(in_bf16), ALL),
    ("weights pulled to zero", lambda: after_step(pulled), ALL),
    ("one update undone", lambda: undone(at(52)), ALL),
    ("every third update undone", lambda: undone(lambda n: n % 3 == 0), ALL),
    ("one update done twice", lambda: twice(44), ALL),
    ("outputs 1 % larger", lambda: output(lambda out: out * 1.01), ONE_OUTPUT),
    ("outputs 30 % larger", lambda: output(lambda out: out * 1.3), ONE_OUTPUT),
    ("outputs shifted", lambda: output(lambda out: out + 0.05), ("numpy_batches", "short")),
    ("outputs of three bits", lambda: output(coarse), ONE_OUTPUT),
    ("inputs of three bits", lambda: inputs(coarse), (*PLAIN_STEP, "mlp_epochs", "numpy_batches", WITHOUT_OPTIMIZER)),
    ("half of the batch twice", lambda: inputs(half_repeated), EVERY),
    ("inputs and targets out of step", lambda: inputs(rolled), EVERY),
    ("inputs of the step before", lambda: inputs(previous()), BATCHED),
    ("samples of the first 20 batches for ever", lambda: inputs(remembered(20)), BATCHED),
    ("dropout off", lambda: off("Dropout"), DROPOUT),
    ("batch norm as in evaluation", lambda: off("BatchNorm"), ("cnn_schedule",)),
    ("loss halved", lambda: loss_scaled(0.5), EVERY),
    ("loss times a thousand", lambda: loss_scaled(1000.0), EVERY),
    ("loss inverted", lambda: loss_scaled(-1.0), EVERY),
    ("a torch random number drawn in each step", lambda: drawing(always, torch_number), ALL),
    ("a torch random number drawn in step 40", lambda: drawing(at(40), torch_number), ALL),
    ("a Python random number drawn in step 40", lambda: drawing(at(40), python_number), ALL),
    ("a numpy random number drawn in each step", lambda: drawing(always, numpy_number), ALL),
    ("one batch repeated", lambda: batches(repeated_batch), LOADERS),
    ("one batch dropped", lambda: batches(dropped_batch), LOADERS),
    ("two batches in seven swapped", lambda: batches(swapped_batches), LOADERS),
    ("one label in eight wrong", lambda: batches(wrong_labels), LOADERS),
    ("data rounded to quarters", lambda: batches(rough_data), LOADERS),
)

NOT_DETECTABLE: dict[tuple[str, str], str] = {
    ("gradients scaled by 1.01", "reduced"): "a bias of 1 % is within what 16-bit products may do",
    ("outputs 1 % larger", "reduced"): "a bias of 1 % is within what 16-bit products may do",
}
"""(fault, claim) -> why it may pass."""

LEVERS = tuple(Planted(name, "reduced", make()) for name, make, _ in FAULTS)
