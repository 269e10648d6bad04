"""Losses and weights that are inf or NaN: told by their step, and never saved over what was good."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import batches
from flatout.errors import NumericsError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.fit import fit
from flatout.train.loss import supervised
from flatout.train.nonfinite import LossWatch
from flatout.train.readings import STEPS_PER_READING
from flatout.train.step import TrainStep

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


def training(plan: Plan | None = None, loss_fn: Any = None) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return TrainStep(model, optimizer, loss_fn or supervised(nn.CrossEntropyLoss()), plan)


def poisoned() -> torch.Tensor:
    x = X.clone()
    x[17] = float("nan")
    return x


def test_nan_weights_never_take_the_place_of_good_checkpoints(tmp_path: Path) -> None:
    step = training()
    fit(step, batches((X, Y), 10), epochs=3, checkpoints=tmp_path)
    before = sorted(one.name for one in tmp_path.iterdir())
    told = r"weights are not finite \(weight\); the loss was not finite at step 1[3-6]"
    with pytest.warns(UserWarning, match=r"the loss of step 1\d is nan"), pytest.raises(NumericsError, match=told):
        fit(step, batches((poisoned(), Y), 10), epochs=8, checkpoints=tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == before
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    assert loaded.step == 12
    assert loaded.state["model"]["weight"].isfinite().all()


@pytest.mark.parametrize("plan", [Plan(nonfinite="skip"), Plan(precision="fp16")], ids=lambda plan: str(plan.choices()))
def test_steps_that_the_plan_leaves_out_end_nothing(tmp_path: Path, plan: Plan) -> None:
    found = fit(training(plan), batches((poisoned(), Y), 10), epochs=2, checkpoints=tmp_path)
    assert (found.steps, found.skipped, found.nonfinite_losses) == (8, 2, 0)


def test_without_checkpoints_the_run_ends_all_the_same() -> None:
    with pytest.warns(UserWarning, match="is nan"), pytest.raises(NumericsError, match="weights are not finite"):
        fit(training(), batches((poisoned(), Y), 10), epochs=2)


def test_nothing_is_saved_while_no_loss_is_finite(tmp_path: Path) -> None:
    """The weights stay finite: all targets are ignored, torch's loss of nothing is NaN, and its gradient 0."""
    step = training()
    fit(step, batches((X, Y), 10), epochs=1, checkpoints=tmp_path)
    with (
        pytest.warns(UserWarning, match="the loss of step 5 is nan"),
        pytest.warns(UserWarning, match="step 8 was not saved: no loss since the last save was finite"),
    ):
        found = fit(step, batches((X, torch.full_like(Y, -100)), 10), epochs=2, checkpoints=tmp_path)
    assert found.nonfinite_losses == 4
    assert [one.name for one in tmp_path.iterdir()] == ["000001-step-4"]


def test_one_bad_batch_does_not_keep_an_epoch_from_being_saved(tmp_path: Path) -> None:
    y = Y.clone()
    y[:10] = -100
    with pytest.warns(UserWarning, match="the loss of step 1 is nan"):
        fit(training(), batches((X, y), 10, shuffle=False), epochs=1, checkpoints=tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["000001-step-4"]


def test_a_step_of_nan_weights_is_not_captured() -> None:
    step = training()
    with torch.no_grad():
        step.model.bias[2] = float("inf")
    with pytest.raises(NumericsError, match=r"not finite \(bias\); training cannot recover"):
        capture(step)
    assert "model" in capture(model=step.model)


def test_a_loop_of_ones_own_is_warned_once_by_step_number() -> None:
    step = training()

    def loop() -> None:
        for k in range(2 * STEPS_PER_READING):
            step((X if k < 2 else poisoned(), Y))

    with pytest.warns(UserWarning, match=r"the loss of step 3 is nan.*Plan\(nonfinite='raise'\)") as told:
        loop()
    assert len(told) == 1
    assert step.nonfinite_losses == 2 * STEPS_PER_READING - 2


def test_the_watch_waits_for_nothing_and_forgets_nothing() -> None:
    watch = LossWatch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch.add(0, torch.tensor(float("inf")))
        watch.add(1, torch.tensor(1.0))
        assert (watch.count, told) == (0, [])
        watch.look()
    assert (watch.count, watch.first, len(told)) == (1, 0, 1)
    assert not watch.none_finite_since()
    watch.begin()
    assert not watch.none_finite_since()  # no step


class WithNorm(nn.Module):
    """A norm, and a buffer of its own that is replaced in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.seen = self.seen + x.sum()
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("out_of_memory", [None, "exact", "raise"])
@pytest.mark.parametrize("plan", [Plan(nonfinite="skip"), Plan(precision="fp16")], ids=lambda plan: str(plan.choices()))
def test_a_skipped_step_leaves_no_trace_in_buffers(plan: Plan, out_of_memory: Any) -> None:
    def trained(data: list[Any]) -> TrainStep:
        torch.manual_seed(0)
        model = WithNorm()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = TrainStep(
            model, optimizer, supervised(nn.CrossEntropyLoss()), replace(plan, out_of_memory=out_of_memory)
        )
        for batch in data:
            step(batch)
        return step

    good, bad = [(X[at : at + 10], Y[at : at + 10]) for at in (0, 20)], (poisoned()[10:20], Y[10:20])
    clean = {name: value for name, value in trained(good).model.state_dict().items() if name != "last"}
    for data in ([good[0], bad, good[1]], [bad, *good]):
        step = trained(data)
        assert step.skipped == 1
        for name, value in step.model.named_buffers():
            assert torch.equal(value, clean[name]), name
    assert evaluate(step, [good[0]])["loss"] < 10.0


def test_a_raised_step_leaves_no_trace_in_buffers() -> None:
    model = WithNorm()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), Plan(nonfinite="raise"))
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(NumericsError, match="as they were before that step"):
        step((poisoned()[10:20], Y[10:20]))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("plan", [Plan(nonfinite="skip"), Plan(precision="fp16")], ids=lambda plan: str(plan.choices()))
def test_a_first_step_that_is_skipped_is_no_wrong_order_of_schedules(plan: Plan) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan, scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((poisoned()[10:20], Y[10:20]))
        step((X, Y))
    assert (step.skipped, scheduler.last_epoch) == (1, 2)
