"""What is read from the state of a GPU's generator."""

from __future__ import annotations

import pytest
import torch

import flatout
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_goes_on_with_the_same_numbers_on_another_gpu() -> None:
    model = torch.nn.Linear(4, 4).to("cuda:1")
    torch.rand(5, device="cuda:1")
    state = flatout.capture(model=model)
    expected = torch.rand(5, device="cuda:1").cpu()
    flatout.restore(state, model=model.to("cuda:0"))
    assert torch.equal(torch.rand(5, device="cuda:0").cpu(), expected)
    flatout.restore(state, model=model.to("cuda:1"))
    assert torch.equal(torch.rand(5, device="cuda:1").cpu(), expected)
