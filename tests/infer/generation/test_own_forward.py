"""Models that are run by their own forward pass: any that gives logits, by the whole text each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.errors import PlanError, UsageError
from flatout.infer.generation import whole_texts
from flatout.infer.generation.own_forward import FULL_CLOSENESS, HALF_CLOSENESS, OwnForward, longest_text
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import Bert, BertConfig, BertMaskedLM, RecurrentClassifier, RecurrentClassifierConfig
from flatout.plan import Plan
from tests.infer.generation.tiny import greedy, model, prompts

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8]]
SIZE = 23


class Causal(nn.Module):
    """Each token's logits from the running mean of the embeddings before it, and its own."""

    def __init__(self, *, longest: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.tokens, self.places = nn.Embedding(SIZE, 16), nn.Embedding(longest, 16)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, SIZE)
        for one in self.parameters():
            nn.init.normal_(one, std=0.6, generator=generator)
        self.dropout = nn.Dropout(0.5)
        self.calls: list[tuple[int, ...]] = []

    def hidden(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return torch.cat((x, self.seen(x, places)), dim=-1)

    def seen(self, x: Tensor, places: Tensor) -> Tensor:
        return x.cumsum(1) / (places + 1)[:, None]

    def forward(self, tokens: Tensor) -> Any:
        self.calls.append(tuple(tokens.shape))
        return self.head(self.dropout(self.mix(self.hidden(tokens)).tanh()))


class SeesAll(Causal):
    def seen(self, x: Tensor, places: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class LastAlone(Causal):
    """As nanoGPT: logits of the last token, and no loss."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens)[:, [-1]], None


class Scored(Causal):
    """Something beside the logits that is no state."""

    def forward(self, tokens: Tensor) -> Any:
        logits = super().forward(tokens)
        return logits, logits.softmax(-1)


class Named(Causal):
    def forward(self, tokens: Tensor) -> Any:
        return {"logits": super().forward(tokens)}


def own_text(network: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            found = network(torch.tensor([tokens]))
        logits = found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", [Causal, SeesAll, LastAlone, Scored, Named])
@pytest.mark.parametrize("slots", [None, 2])
def test_ragged_prompts_have_each_its_own_text(kind: Any, slots: int | None) -> None:
    network = kind().eval()
    made = TokenGenerator(network, slots=slots).generate(PROMPTS, max_new_tokens=7)
    assert made.tokens == [own_text(network, prompt, 7) for prompt in PROMPTS]
    assert len({tuple(one) for one in made.tokens}) > 1
    assert f"over the whole text for each token, without a cache, because the model is a {kind.__name__}" in made.engine
    assert ("one text at a time" in made.engine) == (kind in (SeesAll, LastAlone))
    assert made.storage == "fp32"
    assert (made.decode_share.share, made.prefill_share.share) == (None, None)
    assert "not counted" in made.summary()


def test_what_stands_beside_the_logits_is_said() -> None:
    reason = TokenGenerator(Scored().eval()).engine_reason
    assert "what it returns besides its logits is not a state: the model fails on tokens" in reason


def test_large_logits_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Causal().eval()
    expected = TokenGenerator(network).generate(PROMPTS, max_new_tokens=4).tokens
    monkeypatch.setattr(whole_texts, "LOGITS_BYTES", 4 * 6 * SIZE * 2)
    generator = TokenGenerator(network)
    network.calls.clear()
    assert generator.generate(PROMPTS, max_new_tokens=4).tokens == expected
    assert max(rows for rows, _ in network.calls) == 2


def test_drawing_stops_streams_and_rules_are_those_of_every_engine() -> None:
    network = Causal().eval()
    generator = TokenGenerator(network)
    settings: dict[str, Any] = {"temperature": 1.2, "top_k": 15, "top_p": 0.95, "min_p": 0.01, "seed": 11}
    settings |= {"repetition_penalty": 1.3, "no_repeat_ngram": 3}
    made = generator.generate(PROMPTS, max_new_tokens=12, **settings)
    alone = [generator.generate([prompt], max_new_tokens=12, **settings).tokens[0] for prompt in PROMPTS[:1]]
    assert made.tokens[0] == alone[0]
    assert made.tokens == TokenGenerator(network, slots=1).generate(PROMPTS, max_new_tokens=12, **settings).tokens
    pieces: list[list[int]] = [[] for _ in PROMPTS]
    for piece in generator.stream(PROMPTS, max_new_tokens=12, **settings):
        pieces[piece.prompt] += piece.tokens
    assert pieces == made.tokens
    stop = made.tokens[0][4]
    cut = generator.generate(PROMPTS, max_new_tokens=12, stop=[stop], **settings)
    assert (cut.tokens[0], cut.reasons[0]) == (made.tokens[0][: made.tokens[0].index(stop)], "stop")
    ruled = generator.generate(PROMPTS, max_new_tokens=3, suppress_tokens=range(10), forced_eos_token_id=17)
    assert all(tokens[-1] == 17 and min(tokens[:-1]) >= 10 for tokens in ruled.tokens)


def test_dropout_is_off_and_the_mode_is_left_as_it_was() -> None:
    network = Causal().train()
    network.dropout.eval()
    network.dropout.train()
    made = TokenGenerator(network).generate([[1, 2]], max_new_tokens=5)
    assert network.training
    assert network.dropout.training
    assert made.tokens == [own_text(network.eval(), [1, 2], 5)]
    assert all(one.grad is None for one in network.parameters())


def test_the_longest_text_by_the_config_and_by_failing() -> None:
    network = Causal(longest=8).eval()
    with pytest.raises(UsageError, match=r"the model fails on tokens \[1, 9\]: IndexError.*smaller max_new_tokens"):
        TokenGenerator(network).generate([[1, 2]], max_new_tokens=20)
    network.config = {"block_size": 8}  # type: ignore[assignment]
    made = TokenGenerator(network).generate([[1, 2]], max_new_tokens=20)
    assert (len(made.tokens[0]), made.reasons) == (7, ["context"])  # it read 8


def test_relative_positions_end_at_no_length() -> None:
    class Configured:
        def __init__(self, **config: int) -> None:
            self.config = config

    assert longest_text(Configured(n_positions=512)) == 512
    assert longest_text(Configured(n_positions=512, relative_attention_num_buckets=32)) is None  # T5


def test_precisions() -> None:
    network = Causal().eval()
    half = TokenGenerator(network, Plan(precision="bf16"))
    assert half.generate([[1]], max_new_tokens=2).storage == "bf16"
    network.bfloat16()
    assert TokenGenerator(network).generate(PROMPTS, max_new_tokens=2).storage == "bf16"
    told = r"the plan's precision is 'fp32'; the weights are bf16, and the model is run .*model.float\(\)"
    with pytest.raises(PlanError, match=told):
        TokenGenerator(network, Plan(precision="fp32"))


def test_a_model_without_weights() -> None:
    class Next(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.one_hot((tokens + 1) % SIZE, SIZE).float()

    assert flatout.generate(Next(), [[3], [5, 21]], max_new_tokens=3).tokens == [[4, 5, 6], [22, 0, 1]]


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (lambda: nn.Linear(4, 2), r"the model fails on tokens \[1, 1\]: RuntimeError"),
        (lambda: nn.Embedding(9, 4), None),
        (
            lambda: RecurrentClassifier(RecurrentClassifierConfig(vocab_size=9, classes=3)),
            r"the RecurrentClassifier gives torch.float32 \[1, 3\] for tokens \[1, 1\]; generating needs",
        ),
        (
            lambda: Bert(BertConfig(vocab_size=9, width=8, heads=2, layers=1)),
            "the Bert gives",
        ),
    ],
)
def test_what_gives_no_logits_is_named(network: Any, told: str | None) -> None:
    if told is None:  # four numbers a token are logits of a vocabulary of four
        assert len(flatout.generate(network(), [[1]], max_new_tokens=2).tokens[0]) == 2
        return
    with pytest.raises(UsageError, match=told):
        TokenGenerator(network().eval())


def test_what_cannot_be_done_is_refused_by_name() -> None:
    network = Causal().eval()
    with pytest.raises(PlanError, match=r"weights is 'int8'; fewer bits .* run by its own .*: the model is a Causal"):
        TokenGenerator(network, Plan(weights="int8"))
    with pytest.raises(PlanError, match=r"guessing ahead, and the model is run by .* leave out speculation and draft"):
        TokenGenerator(network, Plan(speculation="lookup"))
    with pytest.raises(PlanError, match=r"guessing ahead, and the draft is run by .* use a draft that is"):
        TokenGenerator(model("own GPT-2"), draft=network)
    with pytest.raises(UsageError, match="decoder_start_token_id is 3; it is for encoder-decoders"):
        flatout.generate(network, [[1]], decoder_start_token_id=3)
    with pytest.raises(UsageError, match="the Causal has no decoder here; its weights are not read"):
        _ = TokenGenerator(network).decoder


def test_weights_that_change_within_a_text_end_it() -> None:
    network = Causal().eval()
    stream = TokenGenerator(network).stream([[1]], max_new_tokens=5)
    next(stream)
    with torch.no_grad():
        network.head.weight.mul_(2)
    with pytest.raises(UsageError, match="the model's weights changed while a text was made"):
        list(stream)


def test_a_model_of_transformers_without_a_fast_path() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=211,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=96,
        initializer_range=0.3,
        eos_token_id=5,
        bos_token_id=0,
    )
    network = transformers.GPTNeoXForCausalLM(config).eval()
    network.generation_config.repetition_penalty = 1.2
    texts = prompts(3, 20)
    made = flatout.generate(network, texts, max_new_tokens=8)
    assert "because the model is a GPTNeoXForCausalLM of transformers" in made.engine
    assert "one text at a time" not in made.engine
    for prompt, tokens in zip(texts, made.tokens, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            theirs = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
        assert theirs[0, len(prompt) :].tolist()[: len(tokens)] == tokens
    assert flatout.generate(network, texts[:1], max_new_tokens=4, repetition_penalty=1.0).tokens == [
        greedy(network, texts[0], 4)
    ]


@pytest.mark.parametrize("family", ["BERT", "XLNet"])
def test_a_model_of_transformers_whose_tokens_see_later_ones_is_refused(family: str) -> None:
    """Its own `generate` asks it in another way, or it has none."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": SIZE, "initializer_range": 0.5}
    if family == "BERT":
        sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        network = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    else:
        network = transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, **sizes)
        )
    with pytest.raises(UsageError, match="tokens see those after them"):
        flatout.generate(network, PROMPTS, max_new_tokens=2)


def test_a_masked_language_model_is_refused() -> None:
    network = BertMaskedLM(BertConfig(vocab_size=8, max_tokens=8, width=8, heads=2, layers=1))
    with pytest.raises(UsageError, match="BertMaskedLM is not causal"):
        flatout.generate(network, [[1]])


def test_another_model_whose_tokens_see_later_ones_says_so() -> None:
    assert "tokens see those after them" in TokenGenerator(SeesAll()).engine_reason
    assert "see those after" not in TokenGenerator(Causal()).engine_reason


def test_products_in_fewer_bits_may_differ_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = OwnForward(Causal().eval(), Plan(), "it is a test")
    assert run.closeness == FULL_CLOSENESS
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert run.closeness == HALF_CLOSENESS
