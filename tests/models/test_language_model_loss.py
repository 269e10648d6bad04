"""A language model's loss in chunks, as the plan's choice, is its loss: gradients included, and with less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout import Plan, TrainStep, forecast
from flatout.levers import chunked_loss, lazy_scores
from flatout.memory.real_run import LimitedRun
from flatout.models import GPT2, GPT2Config, TransformerConfig, TransformerLM
from flatout.train.loss import LanguageModelLoss

VOCABULARY = 150
"""The head is padded to 192 rows."""


@pytest.fixture(autouse=True)
def _small_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LEAST_CLASSES", VOCABULARY)
    monkeypatch.setattr(chunked_loss, "LEAST_SCORES_BYTES", 0)


def made(make: Any, config: Any, plan: Plan) -> TrainStep:
    torch.manual_seed(0)
    model: nn.Module = make(config(vocab_size=VOCABULARY, width=32, heads=2, layers=2, max_tokens=16)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.0), LanguageModelLoss(), plan)


def batch(targets: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, wanted = torch.randint(0, VOCABULARY, (2, 3, 9))
    if targets == "ragged":
        wanted[0, 4:] = -100
        wanted[1] = -100
    if targets == "none":
        wanted[:] = -100
    return tokens, wanted


@pytest.mark.parametrize("targets", ["all", "ragged", "none"])
@pytest.mark.parametrize("more", [{}, {"micro_batches": 3}, {"activation_checkpointing": "block"}], ids=str)
@pytest.mark.parametrize(("make", "config"), [(GPT2, GPT2Config), (TransformerLM, TransformerConfig)])
def test_the_loss_in_chunks_is_the_loss(
    make: Any, config: Any, more: Any, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, chunked = (made(make, config, Plan(loss=loss, **more)) for loss in (None, "chunked"))
    expected = plain(batch(targets))
    monkeypatch.setattr(lazy_scores.Source, "form", None)  # the scores of all are never there
    found = chunked(batch(targets))
    torch.testing.assert_close(found, expected, equal_nan=True)
    for (name, ours), theirs in zip(chunked.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True, msg=name)
    assert chunked.rolled_back == []


def test_the_number_of_terms_is_that_of_the_targets() -> None:
    assert LanguageModelLoss().count_terms(batch("ragged")) == 13


def test_a_forecast_has_the_memory_of_the_loss_in_chunks() -> None:
    peaks = []
    for loss in (None, "chunked"):
        torch.manual_seed(0)
        model = GPT2(GPT2Config(vocab_size=4090, width=16, heads=1, layers=1, max_tokens=64))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LanguageModelLoss(), Plan(loss=loss))
        data = (torch.randint(0, 4090, (8, 64)), torch.randint(0, 4090, (8, 64)))
        forecasts = forecast(step, data)
        assert forecasts.method == "fake run"
        assert forecasts.not_in_force == ()
        run = LimitedRun("cpu", 1 << 40)
        with run:
            run.hold([*model.parameters(), *data])
            for _ in range(2):
                step(data)
        peaks.append((forecasts.peak_bytes, run.peak_bytes))
        step.close()
    scores = 8 * 64 * 4096 * 4
    for before, after in zip(*peaks, strict=True):
        assert before - after > 0.9 * scores  # of three copies a chunk is left, and the gradients made with it
