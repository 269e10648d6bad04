"""What a model allows is found by trying: real models that can be packed, and planted ones that must not be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatout.infer.prediction.agreement import Agreement
from flatout.infer.prediction.allowed import Allowed, Trial
from flatout.infer.prediction.calling import calling_of
from flatout.infer.prediction.model_batch import Runner
from flatout.infer.prediction.placed import place, round_and_pack
from flatout.infer.prediction.samples import read_sample
from flatout.levers.compile import repeated_blocks
from flatout.models import GPT2, Bert, BertConfig, BertMaskedLM, GPT2Config
from flatout.plan import Plan

LENGTHS = (3, 9, 5, 20, 9)
WORDS = 50


def tried(model: nn.Module, plan: Plan | None = None) -> Allowed:
    plan = plan or Plan()
    placed = place(model, plan)
    round_and_pack(placed, plan)
    runner = Runner(placed, calling_of(placed.model), repeated_blocks(placed.model))
    generator = torch.Generator().manual_seed(0)
    samples = [
        read_sample(number, torch.randint(3, WORDS, (length,), generator=generator), runner.calling)
        for number, length in enumerate(LENGTHS)
    ]
    with torch.no_grad():
        trial = Trial(runner, Agreement(placed.rate), 2048)
        allowed = trial.equal(samples)
        assert allowed is not None
        return trial.ragged(allowed, samples, packing=True)


def bert() -> nn.Module:
    torch.manual_seed(0)
    return Bert(BertConfig(vocab_size=WORDS, max_tokens=32, width=64, heads=4, layers=2))


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(precision="bf16"), Plan(precision="bf16", weights="int8", activations="int8")]
)
@pytest.mark.parametrize(
    "make",
    [
        bert,
        lambda: BertMaskedLM(BertConfig(vocab_size=WORDS, max_tokens=32, width=64, heads=4, layers=2)),
        lambda: GPT2(GPT2Config(vocab_size=WORDS, max_tokens=32, width=64, heads=4, layers=2)),
    ],
)
def test_our_models_need_no_padding(make: Any, plan: Plan) -> None:
    allowed = tried(make(), plan)
    assert allowed.packed, allowed.reasons
    assert allowed.choose(None) == ("packed", "")


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 34,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("name", ["Bert", "BertForSequenceClassification", "Roberta", "DistilBert", "GPT2", "Llama"])
def test_hugging_face_models_need_no_padding(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES
    if name == "DistilBert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": WORDS}
    elif name == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{name.partition('For')[0]}Config")(**sizes)
        model = getattr(transformers, name if "For" in name else f"{name}Model")(config)
        allowed = tried(model)
    assert allowed.packed, allowed.reasons
    assert allowed.padded, allowed.reasons


def test_outputs_that_cannot_be_cut_are_not_batched() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, output_hidden_states=True)
    allowed = tried(transformers.BertModel(config))
    assert (allowed.packed, allowed.padded) == (False, True)
    config = transformers.BertConfig(**SIZES, output_attentions=True, attn_implementation="eager")
    allowed = tried(transformers.BertModel(config))
    assert (allowed.packed, allowed.padded) == (False, False)
    assert "its padding cannot be identified" in allowed.reasons["padded"]


def test_attention_by_hand_cannot_be_packed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, attn_implementation="eager")
    allowed = tried(transformers.BertModel(config))
    how, reason = allowed.choose("packed")
    assert how == "padded"
    assert "packed" in reason


class Block(nn.Module):
    """Attention through torch's kernel, and a flaw."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw, self.out = flaw, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.flaw == "shifts":  # every token takes a little of the one before it
            x = x + 1e-5 * F.pad(x, (0, 0, 1, -1))
        if self.flaw == "shifts more":
            x = x + 1e-2 * F.pad(x, (0, 0, 1, -1))
        if self.flaw == "means":
            x = x + x.mean(dim=1, keepdim=True)
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return x + self.out(F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2))


class Flawed(nn.Module):
    def __init__(self, flaw: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.flaw, self.words = flaw, nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block(flaw) for _ in range(2))

    def forward(self, tokens: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens)
        mask = None if valid is None or self.flaw == "no mask" else valid[:, None, None, :]
        for block in self.blocks if self.flaw != "backwards" else reversed(self.blocks):
            x = block(x, mask)
        return x


@pytest.mark.parametrize(
    ("flaw", "packed", "padded", "word"),
    [
        ("none", True, True, ""),
        ("no mask", True, False, "padded"),
        ("shifts", False, True, "neighbours"),
        ("means", False, False, "differs"),
        ("backwards", False, True, "order"),
    ],
)
def test_planted_flaws_are_found(flaw: str, packed: bool, padded: bool, word: str) -> None:
    allowed = tried(Flawed(flaw))
    assert (allowed.packed, allowed.padded) == (packed, padded), allowed.reasons
    assert word in " ".join(allowed.reasons.values())
    assert allowed.choose(None)[0] == ("packed" if packed else "padded" if padded else "equal")


def test_a_leak_within_the_rounding_of_bf16_is_found() -> None:
    allowed = tried(Flawed("shifts more"), Plan(precision="bf16"))
    assert "neighbours" in allowed.reasons["packed"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, (state, _) = self.lstm(self.words(tokens))
        return outputs, state[0]


def test_a_recurrent_model_gets_equal_lengths_only() -> None:
    allowed = tried(Recurrent())
    how, reason = allowed.choose(None)
    assert how == "equal"
    assert "no repeated blocks" in reason
    assert "output[1] differs" in reason


def test_one_length_tells_nothing_of_others() -> None:
    runner = Runner(place(bert(), Plan()), calling_of(bert()))
    samples = [read_sample(n, torch.ones(4, dtype=torch.int64), runner.calling) for n in range(3)]
    with torch.no_grad():
        trial = Trial(runner, Agreement("fp32"), 2048)
        allowed = trial.ragged(Allowed(equal=True), samples, packing=True)
    assert (allowed.padded, allowed.packed) == (False, False)
    assert allowed.covers([4, 4])
    assert not allowed.covers([4, 5])
