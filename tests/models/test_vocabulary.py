"""A padded vocabulary gives what an unpadded one gives: outputs, losses, gradients, training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatout.errors import UsageError
from flatout.models import BertMaskedLM
from flatout.models.vocabulary import TokenEmbedding, padded_size
from tests.models.small import VOCABULARY, bert_config, gpt2, seq2seq, tokens, transformer

FAMILIES: dict[str, Any] = {
    "gpt2": gpt2,
    "gpt2_untied": lambda **changes: gpt2(tied=False, **changes),
    "bert": lambda **changes: BertMaskedLM(bert_config(**changes)),
    "bert_untied": lambda **changes: BertMaskedLM(bert_config(tied=False, **changes)),
    "transformer": transformer,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """The same weights with 64 rows of vocabulary and with 37."""
    padded, exact = FAMILIES[family](), FAMILIES[family](vocab_multiple=1)
    with torch.no_grad():
        for (name, p), (same_name, e) in zip(padded.named_parameters(), exact.named_parameters(), strict=True):
            assert name == same_name
            e.copy_(p[: len(e)])
    return padded, exact


def paddings(model: nn.Module) -> list[torch.Tensor]:
    return [p[VOCABULARY:] for p in model.parameters() if p.shape[0] == 64]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_the_exact_vocabulary(family: str) -> None:
    models = pair(family)
    batch, targets = tokens(4, 9), tokens(4, 9)
    assert paddings(models[0])
    losses: list[list[float]] = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert not any(padding.any() for padding in paddings(models[0])), "padding must stay zero"


def test_padding_never_wins() -> None:
    """Its logits would be 0, so let all others be negative."""
    model = gpt2(tied=False).eval()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.head.weight[:VOCABULARY].fill_(-1.0)
        logits = model(tokens(2, 3))
    assert logits.shape[-1] == VOCABULARY
    assert (logits < 0).all()


def test_cutting_costs_no_copy() -> None:
    model, batch = gpt2(), tokens(2, 3)
    logits = model(batch)
    assert logits.stride() == (3 * 64, 64, 1)
    assert logits.flatten(0, 1).data_ptr() == logits.data_ptr()


def test_a_token_in_the_padding_is_an_error() -> None:
    with pytest.raises(IndexError):
        gpt2()(torch.tensor([[VOCABULARY]]))


@pytest.mark.parametrize(("size", "multiple", "rows"), [(50257, 64, 50304), (64, 64, 64), (1, 64, 64), (37, 1, 37)])
def test_padded_size(size: int, multiple: int, rows: int) -> None:
    assert padded_size(size, multiple) == rows
    assert TokenEmbedding(size, 4, multiple=multiple).weight.shape == (rows, 4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(1, 17, dtype=torch.int64), "sequences of 17 tokens; the model has 16 positions; cut them"),
        (torch.zeros(1, 0, dtype=torch.int64), "sequences of 0 tokens; it must hold at least 1"),
        (torch.zeros(5, dtype=torch.int64), r"torch.int64 \[5\]; it must be int64 or int32 \[batch, tokens\]; add the"),
        (torch.zeros(1, 5), r"torch.float32 \[1, 5\]; it must be int64 or int32"),
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "bert", "transformer"])
def test_tokens_that_no_model_can_take(family: str, batch: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FAMILIES[family]()(batch)


def test_an_error_says_which_side_is_too_long() -> None:
    with pytest.raises(UsageError, match="target holds sequences of 20 tokens"):
        seq2seq()(tokens(1, 5), tokens(1, 20))
    with pytest.raises(UsageError, match="source holds sequences of 20 tokens"):
        seq2seq()(tokens(1, 20), tokens(1, 5))
    with pytest.raises(UsageError, match="source has 2 sequences and target 3"):
        seq2seq()(tokens(2, 5), tokens(3, 5))
