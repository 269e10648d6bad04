"""The steps that a forecast follows, on fake tensors or on small real ones: `TrainStep`'s own, under the plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.data.nested import tensors_in
from flatout.plan import Plan
from flatout.plan_choices import declared
from flatout.train.step import TrainStep
from flatout.train.training import Training

if TYPE_CHECKING:
    from flatout.memory.tracking import Tracker

STEPS = 2
"""The first makes the optimizer's state, the second has it from the start."""


def carried_out(plan: Plan) -> Plan:
    """What a fake run can do and memory depends on. fp16 runs as bf16, which is as large and asks for no value."""
    plan = plan.without(*(name for name in plan.choices() if not declared()[name].in_forecasts))
    return replace(plan, precision="bf16") if plan.precision == "fp16" else plan


def never_captured(optimizer: Any) -> None:
    """Say so to a copied optimizer: torch forgets it in a copy, and asks Adafactor for a setting that it lacks."""
    optimizer._warned_capturable_if_run_uncaptured = True


def take_steps(tracker: Tracker, training: Training, closing: contextlib.ExitStack) -> None:
    """Two steps of a training that nobody else uses, each tensor named as what it is. Its plan: `carried_out`.

    `closing` closes the TrainStep: not while it is still followed, because what that takes is no part of a step.
    """
    model, batch, state = training.model, training.batch, training.optimizer.state
    tracker.model = model
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    tracker.hold(_weights(model), "weights")
    tracker.hold((one for _, one in tensors_in(batch)), "inputs")
    tracker.hold((one for of_one in state.values() for _, one in tensors_in(of_one)), "optimizer")
    step = TrainStep(model, training.optimizer, training.loss_fn, training.plan)
    closing.callback(step.close)
    tracker.hold(_weights(model), "weights")  # a lever may have laid them out anew
    for number in range(STEPS):
        tracker.step = number
        step(batch)


def _weights(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()
