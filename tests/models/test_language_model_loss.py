"""A language model's loss in chunks is its loss, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.models import GPT2, GPT2Config, TransformerConfig, TransformerLM
from flatout.train.loss import LanguageModelLoss


@pytest.mark.parametrize(("make", "config"), [(GPT2, GPT2Config), (TransformerLM, TransformerConfig)])
def test_the_loss_in_chunks_is_the_loss(make: Any, config: Any) -> None:
    torch.manual_seed(0)
    model = make(config(vocab_size=50, width=32, heads=2, layers=1, max_tokens=16)).eval()
    tokens, targets = torch.randint(0, 50, (3, 9)), torch.randint(0, 50, (3, 9))
    targets[0, 4:] = -100
    losses = [loss(model, (tokens, targets)) for loss in (LanguageModelLoss(), LanguageModelLoss().chunked(600))]
    logits = model(tokens).flatten(0, 1)
    losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten()))
    gradients = [torch.autograd.grad(loss, model.parameters()) for loss in losses]
    for loss, gradient in zip(losses[:2], gradients[:2], strict=True):
        torch.testing.assert_close(loss, losses[2])
        torch.testing.assert_close(gradient, gradients[2])
    assert LanguageModelLoss().count_terms((tokens, targets)) == 22
