"""What stands beside the bar."""

from __future__ import annotations

import pytest
import torch

from flatout.train import progress


def test_the_memory_is_that_of_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 5 if device == torch.device("cuda:1") else 0)
    assert progress._memory_bytes(torch.device("cuda:1")) == 5
    assert progress._memory_bytes(torch.device("cpu")) > 1 << 20
