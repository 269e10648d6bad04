"""What a run records of its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.levers.subject import Subject
from flatout.script.numerics import NumericsRecorder, nudge_weights


def watched(*, optimizer: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(dtype)
    subject = Subject()
    subject.modules.add(model)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer:
        subject.optimizers.add(made)
    return SimpleNamespace(subject=subject, at_backward=[], before_optimizer=[]), model, made


def step(watch: Any, model: torch.nn.Module, optimizer: Any, recorder: NumericsRecorder, backwards: int = 1) -> None:
    model.zero_grad()
    for scale in range(1, backwards + 1):
        loss = scale * model(torch.ones(1, 3)).sum()
        for callback in watch.at_backward:
            callback((loss,))
        loss.backward()
    if optimizer is not None:
        for callback in watch.before_optimizer:
            callback(optimizer)
        optimizer.step()
    recorder.step_ended()


def test_losses_norms_samples_and_weights() -> None:
    watch, model, optimizer = watched()
    recorder = NumericsRecorder(watch, gradient_steps=1)
    first = model(torch.ones(1, 3)).sum().item()
    for _ in range(2):
        step(watch, model, optimizer, recorder)
    answer = recorder.finish()
    assert answer["losses"][0] == first
    assert len(answer["losses"]) == 2
    assert answer["gradient_norms"] == [pytest.approx(8**0.5)] * 2  # six weights and two biases with gradient 1
    assert answer["gradient_samples"] == [[[1.0] * 6, [1.0] * 2]]
    assert answer["weight_sample"] == [v for p in model.parameters() for v in p.flatten().tolist()]
    assert (watch.at_backward, watch.before_optimizer) == ([], [])


def test_accumulation_takes_the_mean_loss_and_the_summed_gradient() -> None:
    watch, model, optimizer = watched()
    recorder = NumericsRecorder(watch, gradient_steps=1)
    first = model(torch.ones(1, 3)).sum().item()
    step(watch, model, optimizer, recorder, backwards=3)
    answer = recorder.finish()
    assert abs(answer["losses"][0] - 2 * first) < 1e-5
    assert answer["gradient_samples"][0][1] == [6.0, 6.0]


def test_without_an_optimizer() -> None:
    watch, model, _ = watched(optimizer=False)
    recorder = NumericsRecorder(watch, gradient_steps=1)
    step(watch, model, None, recorder)
    assert recorder.finish()["gradient_norms"] == [pytest.approx(8**0.5)]


def test_the_digest_sees_one_bit_and_no_layout() -> None:
    digests = []
    for change in (0.0, 0.0, 2.0**-22):
        watch, model, _ = watched()
        with torch.no_grad():
            model.weight[0, 0] = 1.0 + change
            if len(digests) == 1:
                model.weight.data = model.weight.data.t().contiguous().t()
        digests.append(NumericsRecorder(watch, gradient_steps=1).finish()["weight_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_a_nudge_is_one_rounding_error_in_any_format_and_repeats() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        moved = []
        for _ in range(2):
            watch, model, _ = watched(dtype=dtype)
            before = model.weight.detach().clone()
            nudge_weights(watch.subject)
            moved.append(model.weight.detach())
        assert torch.equal(moved[0], moved[1])
        relative = ((moved[0] - before) / before).abs().double() / torch.finfo(dtype).eps
        assert relative.min() > 0.4
        assert relative.max() < 2.1
