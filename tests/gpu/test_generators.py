"""What is read from the state of a GPU's generator."""

from __future__ import annotations

import pytest
import torch

from flatout.script.reference import generator_digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_seeding_it_is_not_drawing_from_it() -> None:
    torch.cuda.init()
    torch.manual_seed(1)
    before = generator_digest()
    torch.cuda.manual_seed_all(2)
    assert generator_digest() == before
    torch.rand(3, device="cuda")
    assert generator_digest() != before
