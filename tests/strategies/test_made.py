"""The user's function: what it may return, and what is said of anything else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from flatout import Plan, TrainStep
from flatout.errors import PlanError, UsageError
from flatout.strategies.facts import planned_for
from flatout.strategies.made import endless, training_of

HEAD = """
import torch, flatout
from torch import nn
def step_of(plan):
    model = nn.Linear(3, 2)
    return flatout.TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), flatout.supervised(nn.CrossEntropyLoss()), plan
    )
DATA = torch.randn(8, 3), torch.randint(0, 2, (8,))
"""


def made(folder: Path, body: str, plan: Plan | None = None) -> tuple[TrainStep, object]:
    file = folder / f"net_{abs(hash(body))}.py"
    file.write_text(HEAD + body)
    return training_of(f"{file}:make", plan or Plan())


def test_step_and_batches_are_made_for_the_plan_from_one_seed(tmp_path: Path) -> None:
    body = "def make(plan):\n    return step_of(plan), flatout.batches(DATA, 4, plan, seed=0)\n"
    step, batches = made(tmp_path, body, Plan(parallel="ddp"))
    assert step.plan.parallel == "ddp"
    again, _ = made(tmp_path, body)
    for one, other in zip(step.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    drawn = list(itertools.islice(endless(batches, "net.py:make"), 5))  # type: ignore[arg-type]  # an epoch has two
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("make = 3", "is int; it is called with a plan, and returns a TrainStep"),
        ("make = nn.Linear(2, 2)", "is Linear; it is called with a plan"),
        ("def make(plan):\n    return step_of(plan)", "returned TrainStep; "),
        ("def make(plan):\n    return nn.Linear(2, 2), [1]", r"returned \(Linear, list\); "),
        ("def make(plan):\n    return step_of(plan), 3", "returned int as batches; "),
        ("def make(plan):\n    return step_of(plan), DATA[0]", "returned Tensor as batches; "),
        ("def make(plan):\n    return step_of(None), [DATA]", "has parallel = None; it was called with .* is 'ddp'"),
        (
            "def make(plan):\n    return 1 / 0",
            r"failed: ZeroDivisionError: division by zero; at .*, line 11: return 1 / 0",
        ),
        ("def make(plan):\n    raise SystemExit(0)", "failed: SystemExit: 0; at "),
        ("def other(plan):\n    pass", "make"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(tmp_path, body, Plan(parallel="ddp"))


def test_what_the_step_refuses_is_said_as_it_is(tmp_path: Path) -> None:
    body = "def make(plan):\n    return flatout.TrainStep(3, None, None, plan), [DATA]"
    with pytest.raises(UsageError, match=r"model is 3; it is a torch\.nn\.Module"):
        made(tmp_path, body)


def test_a_generator_that_is_used_up_is_named() -> None:
    stream = endless((number for number in range(2)), "net.py:make")
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(UsageError, match=r"the batches of net.py:make have come to an end.*flatout.batches"):
        next(stream)


def test_a_pipeline_gets_as_many_parts_as_its_batch_allows() -> None:
    assert planned_for(Plan(), "pipeline", 2, 64).micro_batches == 8
    assert planned_for(Plan(), "pipeline", 2, 5).micro_batches == 4
    assert planned_for(Plan(micro_batches=6), "pipeline", 2, 64).micro_batches == 6
    assert planned_for(Plan(precision="bf16"), "fsdp", 2, 64).choices() == {"precision": "bf16", "parallel": "fsdp"}
    loading = Plan(loader_workers=2, threads=2)
    assert planned_for(loading, "ddp", 2, 64, 1).choices() == {"loader_workers": 2, "parallel": "ddp"}
    assert planned_for(loading, "ddp", 2, 64, 2).threads == 2
    with pytest.raises(PlanError):
        planned_for(Plan(optimizer_in_backward=True), "pipeline", 2, 64)
