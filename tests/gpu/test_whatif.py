"""A step on a GPU is followed as one on a CPU is."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

import flatout
from flatout.models import GPT2, GPT2Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_model_on_either_device_is_predicted_alike() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        model = GPT2(GPT2Config(vocab_size=64, max_tokens=16, width=32, heads=4, layers=2)).to(device)
        tokens = torch.randint(64, (4, 17)).to(device)
        step = flatout.TrainStep(
            model,
            torch.optim.AdamW(model.parameters()),
            lambda model, batch: functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
        )
        found[device] = flatout.whatif(step, tokens, devices=["h100", "cpu"])
    seconds = [found[device]["h100"].step_seconds for device in ("cpu", "cuda")]
    off = 1.0 if "STAND_IN" in os.environ else 0.3  # which computes attention in many operators
    assert seconds[1] == pytest.approx(seconds[0], rel=off)
    assert found["cpu"]["cpu"].step_seconds
    assert "the model is on cuda" in found["cuda"]["cpu"].reason
