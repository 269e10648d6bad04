"""A step's curve: nothing of the user's changes, nothing runs that may not fit, what cannot be measured is said."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.data.nested import repeat_batch
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.sizing.curve import BatchCurve
from flatout.sizing.largest_batch import largest_batch
from flatout.sizing.step_curve import batch_curve

pytestmark = pytest.mark.usefixtures("few_rounds")
LOSS = flatout.supervised(nn.CrossEntropyLoss())
BATCH = (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,)))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 10)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def step_of(model: nn.Module, plan: flatout.Plan | None = None, loss_fn: Any = LOSS) -> flatout.TrainStep:
    return flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn, plan)


def curve(step: flatout.TrainStep, batch: Any = BATCH, **words: Any) -> BatchCurve:
    lines: list[str] = []
    return batch_curve(
        step, batch, **({"seconds": 600.0, "at_least": 4, "at_most": 16, "progress": lines.append} | words)
    )


def sizes(found: BatchCurve) -> list[int]:
    return [point.batch_size for point in found.points]


def test_it_is_reached_from_the_package() -> None:
    assert flatout.batch_curve is batch_curve


def test_nothing_of_the_users_is_changed() -> None:
    model = conv()
    step = step_of(model)
    step(BATCH)
    before = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(step.optimizer.state_dict())
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    data = copy.deepcopy(BATCH)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    found = curve(step)
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    assert str(step.optimizer.state_dict()) == str(moments)
    now = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(BATCH, data, strict=True))
    assert step.steps == 1
    assert found.given_batch_size == 8
    assert found.subject == "Sequential"


def test_a_loss_that_writes_into_its_batch_writes_into_a_copy() -> None:
    def in_place(model: Any, batch: Any) -> Any:
        batch.add_(1.0)
        return model(batch).square().mean()

    batch = torch.zeros(8, 64)
    curve(step_of(mlp(), loss_fn=in_place), batch)
    assert not batch.any()


def test_points_tell_speed_and_the_peak_that_was_measured() -> None:
    found = curve(step_of(mlp()))
    assert [size for size in sizes(found) if size >= 8] == [8, 16]
    peaks = [point.peak_bytes for point in found.points]
    assert None not in peaks
    assert peaks == sorted(peaks, key=lambda one: one or 0)
    assert found.peak_source.startswith("measured by following each tensor")
    for point in found.points:
        assert point.samples_per_second * point.step_seconds == pytest.approx(point.batch_size)
    given = next(point for point in found.points if point.batch_size == 8)
    assert given.peak_bytes == pytest.approx(given.forecast_bytes, rel=0.1)


def test_the_peak_is_that_of_largest_batch() -> None:
    model = mlp()
    step = step_of(model)
    found = curve(step, at_most=8)
    tried = largest_batch(flatout.TrainStep(model, step.optimizer, LOSS), BATCH, limit=1 << 30, at_most=8)
    assert found.points[-1].peak_bytes == pytest.approx(tried.peak_bytes, rel=0.02)


def test_no_size_is_run_that_is_forecast_not_to_fit() -> None:
    seen: list[int] = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return LOSS(model, batch)

    found = curve(step_of(mlp(), loss_fn=loss), limit=200_000, at_least=1, at_most=None)
    assert "is forecast to take" in found.stopped_above
    assert "and the limit is 195 KiB" in found.stopped_above
    assert all(point.peak_bytes is not None and point.peak_bytes <= 200_000 for point in found.points)
    assert found.limit_bytes == 200_000


def test_a_limit_that_not_even_one_sample_keeps_is_an_error() -> None:
    with pytest.raises(MachineError, match=r"no batch size from 1 to 8 could be run"):
        curve(step_of(mlp()), limit="20 KiB", at_least=1)


def test_a_size_that_batch_norm_refuses_is_left_out() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    found = curve(step_of(model), (BATCH[0][:2], BATCH[1][:2]), at_least=1, at_most=4)
    assert sizes(found) == [2, 4]
    assert [one.batch_size for one in found.failed] == [1]
    assert "ValueError: Expected more than 1 value per channel" in found.failed[0].reason


def test_sizes_that_a_model_asserts_against_are_left_out() -> None:
    def only_eights(model: Any, batch: Any) -> Any:
        assert len(batch[0]) % 8 == 0, f"{len(batch[0])} is no multiple of 8"
        return LOSS(model, batch)

    found = curve(step_of(mlp(), loss_fn=only_eights), at_least=1)
    assert sizes(found) == [8, 16]
    assert [one.batch_size for one in found.failed] == [2, 4]
    assert found.failed[1].reason == "AssertionError: 4 is no multiple of 8"


def test_what_the_step_raises_at_the_given_size_is_raised() -> None:
    def broken(model: Any, batch: Any) -> Any:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels") as caught:
        curve(step_of(mlp(), loss_fn=broken))
    assert "SizeFails" not in "".join(traceback.format_exception(caught.value))


def test_a_batch_of_one_sample_grows() -> None:
    found = curve(step_of(mlp()), (BATCH[0][:1], BATCH[1][:1]), at_least=1, at_most=4)
    assert sizes(found) == [1, 2, 4]
    assert found.stopped_below == "1 is the smallest"


def test_lists_of_texts_grow_with_the_batch() -> None:
    lengths: set[tuple[int, int]] = set()

    def loss(model: Any, batch: Any) -> Any:
        lengths.add((len(batch["x"]), len(batch["names"])))
        return model(batch["x"]).square().mean()

    curve(step_of(mlp(), loss_fn=loss), {"x": BATCH[0], "names": list("abcdefgh")})
    assert all(samples == names for samples, names in lengths)
    assert len(lengths) > 2


def test_micro_batches_bound_the_sizes_from_below() -> None:
    found = curve(step_of(mlp(), flatout.Plan(micro_batches=4)), at_least=1)
    assert sizes(found) == [4, 8, 16]
    assert found.stopped_below == "the plan splits a batch into micro_batches = 4"


@pytest.mark.parametrize("plan", [{"precision": "bf16"}, {"optimizer": "fused"}, {"optimizer_in_backward": True}])
def test_the_steps_plan_is_in_force(plan: dict[str, Any]) -> None:
    assert sizes(curve(step_of(mlp(), flatout.Plan(**plan)), at_least=8))[-1] == 16


def test_memory_under_a_plan_that_saves_it_is_less() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(6)]

    def peak(plan: flatout.Plan) -> int:
        step = step_of(nn.Sequential(*blocks), plan, lambda model, batch: model(batch).square().mean())
        found = curve(step, torch.randn(512, 64), at_least=512, at_most=512)
        step.close()
        assert found.points[0].peak_bytes is not None
        return found.points[0].peak_bytes

    assert peak(flatout.Plan(activation_checkpointing="block")) < 0.8 * peak(flatout.Plan())


def of_ranks() -> flatout.TrainStep:
    step = step_of(mlp())
    step.together = type("Group", (), {"size": lambda self: 2})()
    return step


def compiled() -> flatout.TrainStep:
    model = mlp()
    model._compiled_call_impl = model._call_impl
    return step_of(model)


def evaluating() -> flatout.TrainStep:
    return step_of(mlp().eval())


def on_meta() -> flatout.TrainStep:
    return step_of(mlp().to("meta"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_ranks, r"the model is trained by 2 ranks"),
        (compiled, r"the model is compiled already"),
        (evaluating, r"in evaluation mode; a step trains; call model\.train\(\) first"),
        (on_meta, r"the model is on 'meta'; memory is known on the CPU and on CUDA"),
        (lambda: mlp(), r"step is a Sequential; it is a flatout\.TrainStep"),
    ],
    ids=["ranks", "compiled", "evaluating", "meta", "a model"],
)
def test_a_step_that_cannot_be_measured_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        batch_curve(make(), BATCH)


@pytest.mark.parametrize(
    "batch",
    [None, "text", [1, 2], torch.tensor(3.0), (BATCH[0], BATCH[1][:3]), (BATCH[0][:0], BATCH[1][:0])],
    ids=["None", "text", "numbers", "no batch dimension", "ragged", "empty"],
)
def test_a_batch_without_a_number_of_samples_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError) as caught:
        batch_curve(step_of(mlp()), batch)
    assert caught.value.limit or caught.value.remedy


@pytest.mark.parametrize(
    "words",
    [
        {"at_least": 0},
        {"at_least": 9},
        {"at_most": 7},
        {"at_most": 8.5},
        {"factor": 1.0},
        {"factor": float("inf")},
        {"factor": "2"},
        {"limit": 0},
        {"limit": "much"},
        {"share": 0},
        {"share": 1.0},
        {"share": 95},
        {"seconds": 0},
    ],
    ids=str,
)
def test_a_wrong_argument_is_an_error_of_ours(words: dict[str, Any]) -> None:
    with pytest.raises(FlatoutError) as caught:
        batch_curve(step_of(mlp()), BATCH, **words)
    assert caught.value.limit or caught.value.remedy


def test_samples_are_repeated_in_their_order() -> None:
    batch = {"x": torch.arange(3), "names": ("a", "b", "c"), "scale": torch.tensor(2.0), "tag": "t"}
    grown = repeat_batch(batch, 7)
    assert grown["x"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert grown["names"] == ("a", "b", "c", "a", "b", "c", "a")
    assert (grown["scale"].item(), grown["tag"]) == (2.0, "t")
    assert repeat_batch(batch, 2)["names"] == ("a", "b")
    assert repeat_batch(batch, 3) is batch
