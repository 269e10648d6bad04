"""The README's recipe, stopped at any step: the weights are to the bit those of a run that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.data.batches import batches
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.loss import supervised
from flatout.train.step import TrainStep

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(4))
TOTAL = 17


def parts() -> tuple[TrainStep, Any, Any]:
    """Dropout, shuffling, a schedule, fp16 whose scale grows until it overflows, an EMA."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=TOTAL)
    step = TrainStep(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        Plan(precision="fp16", micro_batches=2),
        scheduler=scheduler,
    )
    scaler: Any = step._update.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**17, "growth_interval": 2})
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return step, batches((X, X[:, :3].argmax(1)), 8, seed=5), average


def train(until: int, step: TrainStep, source: Any, average: Any) -> None:
    while step.steps < until:
        for batch in source:
            step(batch)
            average.update_parameters(step.model)
            if step.steps == until:
                break


def everything(step: TrainStep, average: Any) -> list[Any]:
    tensors = [*step.model.parameters(), *average.parameters()]
    assert step.scheduler is not None
    return [
        torch.cat([one.detach().flatten() for one in tensors]).tolist(),
        step.state_dict(),
        step.scheduler.last_epoch,
    ]


def test_the_recipe_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = parts()
    train(TOTAL, *whole)
    expected = everything(whole[0], whole[2])
    assert expected[1]["skipped"] > 0
    checkpoints = Checkpoints(tmp_path)
    for until in (2, 7, 12, TOTAL):
        torch.manual_seed(until)  # what a new process would have
        step, source, average = parts()
        if (loaded := checkpoints.load()) is not None:
            restore(loaded, step, source, ema=average)
        train(until, step, source, average)
        checkpoints.save(capture(step, source, ema=average), step=step.steps)
    assert everything(step, average) == expected


def test_the_keywords_still_work(tmp_path: Path) -> None:
    step, source, _ = parts()
    state = capture(
        model=step.model,
        optimizer=step.optimizer,
        scheduler=step.scheduler,
        data=source,
        plan=step.plan,
        extra={"a": 1},
    )
    assert list(state) == ["model", "optimizer", "scheduler", "data", "plan", "extra", "generators"]
    restore(state, model=step.model, optimizer=step.optimizer, scheduler=step.scheduler, data=source)


def test_a_step_brings_what_belongs_to_it() -> None:
    step, source, average = parts()
    state = capture(step, source, ema=average)
    assert list(state) == ["model", "optimizer", "scheduler", "step", "data", "objects", "plan", "generators"]
    with pytest.raises(UsageError, match="optimizer is given as well as step; the step holds its own"):
        capture(step, source, optimizer=step.optimizer)
    with pytest.raises(UsageError, match="2 unexpected: data, objects"):
        restore(state, step)
    scaled = capture(step, source, scaler=torch.amp.GradScaler("cpu"), ema=average)
    with pytest.raises(UsageError, match="1 unexpected: scaler"):
        restore(scaled, step, source, ema=average)
    plain = TrainStep(step.model, step.optimizer, step.loss_fn)
    with pytest.raises(UsageError, match="1 unexpected: scheduler"):
        restore(state, plain, source, ema=average)
    with pytest.raises(UsageError, match="1 missing: step"):
        restore(capture(model=step.model, optimizer=step.optimizer, scheduler=step.scheduler), step)


def test_a_slip_in_a_name_is_no_object() -> None:
    step, source, average = parts()
    with pytest.raises(UsageError, match=r"no section 'optimiser'; .*did you mean optimizer\?"):
        capture(model=step.model, optimiser=step.optimizer)
    with pytest.raises(UsageError, match=r"did you mean model\?"):
        restore({}, models=[step.model])
    assert set(capture(ema_model=average, sampler=source)["objects"]) == {"ema_model", "sampler"}


def test_a_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    step, source, average = parts()
    Checkpoints(tmp_path).save(capture(step, source, ema=average), step=0)
    assert not restore(tmp_path, step, source, ema=average)
    assert not restore(str(next(tmp_path.iterdir())), model=step.model, generators=False)
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*empty"):
        restore(tmp_path / "empty", model=step.model)
