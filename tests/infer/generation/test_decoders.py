"""Both ways to run a decoder, against what the model itself computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.errors import PlanError, UsageError
from flatout.infer.generation.cache import KeyValueCache, Span
from flatout.infer.generation.decoder import Decoder, Linear, Storage, storage_of_head
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.native_decoder import NativeDecoder, packed
from flatout.infer.generation.torch_decoder import TorchDecoder
from flatout.kernels.native import native
from flatout.precision.quantize import INT4_GROUP, quantize_groups_int4, quantize_rows_int8
from tests.infer.generation.tiny import FAMILIES, VOCABULARY, logits, model, prompts
from tests.kernels.unpacking import unpacked
from tests.precision.dequantized import dequantize_groups_int4, dequantize_rows_int8

ENGINES = [NativeDecoder, TorchDecoder]
TOLERANCES: list[tuple[Any, Storage, float]] = [
    (NativeDecoder, "bf16", 0.02),
    (NativeDecoder, "int8", 1e-3),
    (NativeDecoder, "int4", 1e-3),
    (TorchDecoder, "bf16", 0.06),
    (TorchDecoder, "int8", 0.06),
    (TorchDecoder, "int4", 0.06),
]


def _engine(kind: Any, network: Any, storage: Storage, *, slots: int = 3, length: int = 100) -> Any:
    if kind is NativeDecoder and native().library is None:
        pytest.skip(native().reason)
    decoder = read_decoder(network)
    return kind(decoder, storage=storage).with_cache(
        KeyValueCache(decoder, slots=slots, length=length, dtype=torch.float32)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ENGINES)
def test_logits_are_the_models_own(family: str, kind: Any) -> None:
    """Ragged prompts together, then single tokens, then several tokens at once, as for guesses."""
    network = model(family)
    texts = [one * 4 for one in prompts(3, 20)]
    cuts = [min(len(text) - 4, cut) for text, cut in zip(texts, (40, 3, 1), strict=True)]
    expected = [logits(network, text) for text in texts]
    engine = _engine(kind, network, "fp32")
    scale = max(float(one.abs().max()) for one in expected)

    def check(found: torch.Tensor, wanted: list[torch.Tensor]) -> None:
        assert (found - torch.stack(wanted)).abs().max() < 2e-5 * scale

    read = [token for text, cut in zip(texts, cuts, strict=True) for token in text[:cut]]
    spans = [Span(slot=slot, start=0, length=cut) for slot, cut in enumerate(cuts)]
    check(engine.advance(torch.tensor(read), spans), [one[cut - 1] for one, cut in zip(expected, cuts, strict=True)])
    read = [text[cut] for text, cut in zip(texts, cuts, strict=True)]
    spans = [Span(slot=slot, start=cut) for slot, cut in enumerate(cuts)]
    check(engine.advance(torch.tensor(read), spans), [one[cut] for one, cut in zip(expected, cuts, strict=True)])
    read = [*texts[0][cuts[0] + 1 : cuts[0] + 4], *texts[2][cuts[2] + 1 : cuts[2] + 3]]
    spans = [Span(slot=0, start=cuts[0] + 1, length=3), Span(slot=2, start=cuts[2] + 1, length=2)]
    wanted = [*expected[0][cuts[0] + 1 : cuts[0] + 4], *expected[2][cuts[2] + 1 : cuts[2] + 3]]
    check(engine.advance(torch.tensor(read), spans, every=True), wanted)


@pytest.mark.parametrize(("kind", "storage", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("family", ["own GPT-2", "gpt2"])
def test_fewer_bits_are_those_of_the_weights_alone(family: str, kind: Any, storage: Storage, tolerance: float) -> None:
    """Against a model in fp32 whose weights are what the few bits stand for: what else differs is our arithmetic."""
    network = model(family)
    text = prompts(1)[0][:30] * 3
    engine = _engine(kind, network, storage)
    found = engine.advance(torch.tensor(text), [Span(slot=1, start=0, length=len(text))], every=True)
    held = TorchDecoder(_held(read_decoder(network), storage, kind), storage="fp32")
    reference = held.with_cache(KeyValueCache(held.decoder, slots=1, length=100, dtype=torch.float32))
    expected = reference.advance(torch.tensor(text), [Span(slot=0, start=0, length=len(text))], every=True)
    error = float((found - expected).std() / expected.std())
    assert error < tolerance, f"{storage}: {error}"


def _held(decoder: Decoder, storage: Storage, kind: Any) -> Decoder:
    """The decoder with each matrix as `storage` holds it. The kernel rounds by itself: of two scales that are equally
    good it may take the other one."""

    def held(linear: Linear | None, form: Storage) -> Linear | None:
        if linear is None:
            return None
        if kind is NativeDecoder:
            weight = unpacked(packed(linear, form))
        elif form == "bf16":
            weight = linear.weight().bfloat16().float()
        elif form == "int8" or linear.inputs % INT4_GROUP:
            weight = dequantize_rows_int8(*quantize_rows_int8(linear.weight()))
        else:
            values, scales = quantize_groups_int4(linear.weight())
            weight = dequantize_groups_int4(values, scales.bfloat16().float())
        return replace(linear, weights=(weight,), biases=(linear.bias(),))

    blocks = [
        replace(block, **{name: held(getattr(block, name), storage) for name in ("qkv", "out", "up", "gate", "down")})
        for block in decoder.blocks
    ]
    head = held(decoder.head, storage_of_head(storage))
    assert head is not None
    return replace(decoder, blocks=tuple(blocks), head=head)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_long_prompt_in_one_pass_and_token_by_token(kind: Any) -> None:
    network = model("own GPT-2")
    text = [token % VOCABULARY for token in range(90)]
    whole = _engine(kind, network, "fp32")
    found = whole.advance(torch.tensor(text), [Span(slot=0, start=0, length=90)])
    single = _engine(kind, network, "fp32")
    for place, token in enumerate(text):
        last = single.advance(torch.tensor([token]), [Span(slot=0, start=place)])
    torch.testing.assert_close(found, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_slot_is_used_again_without_being_cleared(kind: Any) -> None:
    network = model("own GPT-2")
    engine = _engine(kind, network, "fp32")
    engine.advance(torch.arange(60), [Span(slot=1, start=0, length=60)])
    found = engine.advance(torch.tensor([4, 5]), [Span(slot=1, start=0, length=2)])
    torch.testing.assert_close(found[0], logits(network, [4, 5])[-1], rtol=1e-4, atol=1e-4)


def test_the_native_pass_is_bit_identical_in_any_company() -> None:
    network = model("own GPT-2")
    texts = prompts(3, 20)
    for storage in ("fp32", "bf16", "int8", "int4"):
        together = _engine(NativeDecoder, network, storage)
        spans = [Span(slot=slot, start=0, length=len(text)) for slot, text in enumerate(texts)]
        found = together.advance(torch.tensor([token for text in texts for token in text]), spans)
        for row, text in enumerate(texts):
            alone = _engine(NativeDecoder, network, storage)
            one = alone.advance(torch.tensor(text), [Span(slot=0, start=0, length=len(text))])
            assert torch.equal(one[0], found[row]), storage


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_reading_the_weights_keeps_no_graph(kind: str) -> None:
    """It would hold the shape of each weight's gradient, and ranks that then share the layers cut the weights."""
    decoder = read_decoder(model(kind))
    weights = [*decoder.head.weights, *(one for block in decoder.blocks for one in block.qkv.weights)]
    assert all(one.grad_fn is None for one in weights)


def test_steps_of_one_token_are_replayed_over_tensors_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA graphs: captured once for each number of rows, it reads the tensors of its capture alone."""
    captures = []

    def captured(step: Any, device: torch.device) -> Any:
        captures.append(step)
        result = step()

        def replay() -> torch.Tensor:
            result.copy_(step())
            return result

        return replay

    monkeypatch.setattr("flatout.infer.generation.torch_decoder.captured", captured)
    network = model("llama")
    texts = prompts(3, 20)
    engine = _engine(TorchDecoder, network, "fp32", length=64)
    engine._of.captures = True
    for slot, text in enumerate(texts):
        engine.advance(torch.tensor(text), [Span(slot=slot, start=0, length=len(text))])
    grown = [list(text) for text in texts]
    for step in range(6):
        rows = [0, 1, 2] if step < 3 else [2, 0]  # a text ended, and the others stand in another order
        tokens = [7 + step + row for row in rows]
        spans = [Span(slot=row, start=len(grown[row])) for row in rows]
        found = engine.advance(torch.tensor(tokens), spans)
        for place, row in enumerate(rows):
            grown[row].append(tokens[place])
            torch.testing.assert_close(found[place], logits(network, grown[row])[-1], rtol=1e-3, atol=1e-4)
    assert len(captures) == 2


class _Unknown(nn.Module):
    pass


def test_a_model_of_no_known_family_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"the model is a _Unknown of .*; generation with a cache knows GPT2 .* generate\(\)"
    ):
        read_decoder(_Unknown())


def test_an_option_that_changes_the_computation_is_refused() -> None:
    network = model("gpt2")
    network.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(UsageError, match="scale_attn_by_inverse_layer_idx is True"):
        read_decoder(network)


def test_a_model_that_is_not_causal_is_refused() -> None:
    from flatout.models import TransformerConfig, TransformerLM

    network = TransformerLM(TransformerConfig(vocab_size=8, max_tokens=8, width=8, heads=2, layers=1, causal=False))
    with pytest.raises(UsageError, match="not causal"):
        read_decoder(network)


@pytest.mark.parametrize(
    ("span", "told"),
    [
        (Span(slot=3, start=0), "slot 3; the cache has slots 0 to 2"),
        (Span(slot=0, start=112), "1 tokens from position 112; the cache holds positions 0 to 111"),
        (Span(slot=0, start=-1), "1 tokens from position -1"),
    ],
)
def test_places_outside_of_the_cache_are_refused(span: Span, told: str) -> None:
    engine = _engine(NativeDecoder, model("own GPT-2"), "fp32")
    with pytest.raises(UsageError, match=told):
        engine.advance(torch.tensor([1]), [span])


def test_a_cache_longer_than_the_model_reads() -> None:
    decoder = read_decoder(model("own GPT-2"))
    with pytest.raises(UsageError, match="a cache of 129 tokens; the model reads at most 128"):
        KeyValueCache(decoder, slots=1, length=129, dtype=torch.float32)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_few_bits_are_refused_where_no_kernel_reads_them(bits: Any) -> None:
    decoder = read_decoder(model("own GPT-2"))
    with pytest.raises(PlanError, match=rf"weights is '{bits}' on meta; .* widen the whole matrix first"):
        TorchDecoder(decoder, storage=bits, device="meta")
