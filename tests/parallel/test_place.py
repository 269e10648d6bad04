"""Where the model of a rank is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from flatout.errors import UsageError
from flatout.parallel.parallelize import _check_place


def on(*devices: str) -> Any:
    places = [torch.device(one) for one in devices]
    parameters = [type("Parameter", (), {"device": one, "is_cuda": one.type == "cuda"}) for one in places]
    return type("Model", (), {"parameters": lambda self: iter(parameters)})()


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")


@pytest.mark.usefixtures("second_gpu")
def test_a_model_on_another_ranks_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"is on cuda:0, and rank 3 has cuda:1; .*flatout\.ranks\(\)\.device"):
        _check_place(on("cuda:0"))
    for model in (on("cuda:1"), on("cuda:0", "cuda:1"), on("cpu"), on()):
        _check_place(model)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")  # ranks that share a GPU
    _check_place(on("cuda:0"))
