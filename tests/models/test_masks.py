"""The future does not change the past, and padding changes nothing that is real."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.errors import UsageError
from flatout.models import Bert, BertMaskedLM
from flatout.models.attention import CrossAttention, SelfAttention, causal_key_mask, key_mask
from tests.models.small import VOCABULARY, bert_config, classifier, generator, gpt2, seq2seq, tokens, transformer

LENGTHS = torch.tensor([9, 4, 1, 7])
REAL = torch.arange(9) < LENGTHS[:, None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def other_padding(batch: Tensor) -> Tensor:
    return torch.where(REAL, batch, (batch + 11) % VOCABULARY)


@pytest.mark.parametrize("make", [gpt2, transformer, generator])
def test_later_tokens_do_not_change_earlier_outputs(make: Any) -> None:
    model, first = make().eval(), tokens(3, 12)
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 5) % VOCABULARY
    close(model(second)[:, :7], model(first)[:, :7])
    assert not torch.allclose(model(second)[:, 7:], model(first)[:, 7:])
    close(model(first[:, :7]), model(first)[:, :7])


def test_the_target_of_a_translation_is_causal_too() -> None:
    model, source, first = seq2seq().eval(), tokens(3, 5), tokens(3, 9)
    second = first.clone()
    second[:, 4:] = (second[:, 4:] + 5) % VOCABULARY
    close(model(source, second)[:, :4], model(source, first)[:, :4])
    assert not torch.allclose(model(source, second)[:, 4:], model(source, first)[:, 4:])


def test_without_causality_all_tokens_count() -> None:
    model, first = transformer(causal=False).eval(), tokens(2, 6)
    second = first.clone()
    second[:, -1] = (second[:, -1] + 5) % VOCABULARY
    assert not torch.allclose(model(second)[:, 0], model(first)[:, 0])


@pytest.mark.parametrize("valid", [LENGTHS, LENGTHS.int(), REAL], ids=["lengths", "int32", "mask"])
@pytest.mark.parametrize("make", [lambda: BertMaskedLM(bert_config()), lambda: transformer(causal=False), transformer])
def test_padding_changes_nothing_real(make: Any, valid: Tensor) -> None:
    model, batch = make().eval(), tokens(4, 9)
    output = model(batch, valid=valid)
    close(model(other_padding(batch), valid=valid)[REAL], output[REAL])
    for row, length in enumerate(LENGTHS.tolist()):
        close(output[row, :length], model(batch[row : row + 1, :length])[0])


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_padding_does_not_change_the_class(cell: str) -> None:
    model, batch = classifier(cell).eval(), tokens(4, 9)
    output = model(batch, LENGTHS)
    close(model(other_padding(batch), LENGTHS), output)
    for row, length in enumerate(LENGTHS.tolist()):
        close(output[row], model(batch[row : row + 1, :length])[0])


@pytest.mark.parametrize("valid", [LENGTHS, REAL], ids=["lengths", "mask"])
def test_padding_of_the_source_changes_no_translation(valid: Tensor) -> None:
    model, source, target = seq2seq().eval(), tokens(4, 9), tokens(4, 6)
    output = model(source, target, valid)
    close(model(other_padding(source), target, valid), output)
    for row, length in enumerate(LENGTHS.tolist()):
        close(output[row], model(source[row : row + 1, :length], target[row : row + 1])[0])


def test_the_pooler_reads_the_first_token_of_a_padded_batch() -> None:
    model, batch = Bert(bert_config()).eval(), tokens(4, 9)
    close(model(batch, valid=LENGTHS).pooled, model(other_padding(batch), valid=REAL).pooled)


def test_padding_on_the_left_of_a_causal_model() -> None:
    model, batch, real = transformer().eval(), tokens(4, 9), REAL.flip(1)
    output = model(batch, valid=real)
    close(model(torch.where(real, batch, (batch + 11) % VOCABULARY), valid=real)[real], output[real])


@pytest.mark.parametrize(("causal", "valid"), [(False, [3, 0]), (True, [3, 0]), (False, [[1, 1, 1], [0, 0, 0]])])
def test_an_empty_sequence_spoils_nothing(causal: bool, valid: list[Any]) -> None:
    model = transformer(causal=causal)
    mask = torch.tensor(valid)
    output = model(tokens(2, 3), valid=mask.bool() if mask.ndim == 2 else mask)
    output[0].sum().backward()
    assert output.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_mask_of_one_sort_of_padding() -> None:
    assert key_mask(None, 2, 3) is None
    assert causal_key_mask(torch.tensor([3, 2]), 2, 3) is None, "padding on the right is causal's own business"
    assert key_mask(torch.tensor([3, 2]), 2, 3).tolist() == [[[[True] * 3]], [[[True, True, False]]]]  # type: ignore[union-attr]
    both = causal_key_mask(torch.tensor([[False, True]]), 1, 2)
    assert both.tolist() == [[[[True, False], [False, True]]]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "valid",
    [
        torch.ones(2, 3),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2),
        torch.tensor([1, 2, 3]),
        torch.ones(2).bool(),
    ],
)
def test_a_mask_that_could_mean_anything_is_refused(valid: Tensor) -> None:
    with pytest.raises(UsageError, match=r"valid is torch\..*lengths, whole numbers \[2\], or bool \[2, 3\]"):
        key_mask(valid, 2, 3)


def plain_attention(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """As the paper writes it, head by head."""
    pieces = []
    for head in range(3):
        part = slice(head * 8, head * 8 + 8)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(8)
        pieces.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[..., part])
    return layer.out(torch.cat(pieces, dim=-1))


def test_self_attention_is_the_papers() -> None:
    layer, x = SelfAttention(24, 3, dropout=0.0, causal=True), torch.randn(2, 5, 24)
    q, k, v = (F.linear(x, w, b) for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
    close(layer(x), plain_attention(layer, q, k, v, torch.ones(5, 5).tril().bool()))


def test_cross_attention_is_the_papers() -> None:
    layer, x, memory = CrossAttention(24, 3, dropout=0.0), torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    k, v = (F.linear(memory, w, b) for w, b in zip(layer.kv.weight.chunk(2), layer.kv.bias.chunk(2), strict=True))
    allowed = torch.arange(7) < torch.tensor([7, 3])[:, None, None]
    close(layer(x, memory, allowed[:, None]), plain_attention(layer, layer.q(x), k, v, allowed))


def test_keys_and_values_can_be_kept() -> None:
    """The seam of a cache: a token's own query against the keys and values of all before it."""
    layer, x = SelfAttention(24, 3, dropout=0.0, causal=True).eval(), torch.randn(2, 5, 24)
    queries, keys, values = layer.queries_keys_values(x)
    last = layer.attend(queries[:, :, -1:], keys, values, torch.ones(1, 5, dtype=torch.bool))
    close(last, layer(x)[:, -1:])
