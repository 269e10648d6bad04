"""The step and the batches that a function of the user makes for a plan.

def make(plan):                                  # train.py
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return flatout.TrainStep(model, optimizer, loss_fn, plan), flatout.batches(data, 64, plan, seed=0)

step, batches = training_of("train.py:make", flatout.Plan(parallel="ddp"))
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch

from flatout.errors import FlatoutError, UsageError, describe_error
from flatout.infer.model_source import load_object
from flatout.infer.user_lines import user_line
from flatout.plan import Plan
from flatout.train.step import TrainStep

SEED = 0
"""All generators are set to it before the file is read, and before the function is called: every process makes the
same."""
LIMIT = "it is called with a plan, and returns a TrainStep made with it and its batches"
REMEDY = "return flatout.TrainStep(model, optimizer, loss_fn, plan), flatout.batches(data, 64, plan)"


def training_of(spec: str, plan: Plan) -> tuple[TrainStep, Iterable[object]]:
    """What the function that `spec` names ('train.py:make', 'package.module:make') makes for `plan`.

    Runs the user's code. UsageError: there is no such function, it fails (with the user's line), or it returns
    something else.
    """
    _seed_generators()  # data are often made where the file is read
    function = load_object(spec, "training")
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise UsageError(f"{spec} is {type(function).__name__}", limit=LIMIT, remedy=REMEDY)
    _seed_generators()
    made = _called(cast("Callable[[Plan], object]", function), spec, plan)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], TrainStep):
        raise UsageError(f"{spec} returned {_named(made)}", limit=LIMIT, remedy=REMEDY)
    step, batches = made
    if not hasattr(batches, "__iter__") or isinstance(batches, torch.Tensor | dict | str | bytes):
        raise UsageError(f"{spec} returned {type(batches).__name__} as batches", limit=LIMIT, remedy=REMEDY)
    for name in ("parallel", "tensor_ranks"):
        if getattr(step.plan, name) == getattr(plan, name):
            continue
        raise UsageError(
            f"the step of {spec} has {name} = {getattr(step.plan, name)!r}",
            limit=f"it was called with a plan whose {name} is {getattr(plan, name)!r}",
            remedy="make the step with the plan that the function is called with",
        )
    return step, batches


def endless(batches: Iterable[object], spec: str) -> Iterator[object]:
    """One pass after the other. UsageError where a pass has no batch, as a second one through a generator."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise UsageError(
                f"the batches of {spec} have come to an end",
                limit="they are gone through again and again while steps are timed",
                remedy="return something that can be gone through again, such as flatout.batches(...) or a list",
            )


def _seed_generators() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _called(function: Callable[[Plan], object], spec: str, plan: Plan) -> object:
    try:
        return function(plan)
    except FlatoutError:
        raise
    except (Exception, SystemExit) as error:
        where = user_line(error)
        raise UsageError(f"{spec} failed: {describe_error(error)}", limit=f"at {where}" if where else LIMIT) from error


def _named(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return type(made).__name__
