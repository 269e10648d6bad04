"""Models that keep a state: recurrent ones, ours and anybody's, and encoder-decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.errors import PlanError, UsageError
from flatout.infer.generation.stepping import dimensions_of
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import CharacterGenerator, CharacterGeneratorConfig, Seq2SeqConfig, Seq2SeqTransformer
from flatout.plan import Plan

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8]]
SIZE = 23


def lively(network: Any, seed: int = 2) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7, generator=generator)
    return network.eval()


def ours(cell: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": SIZE, "embedding_width": 8, "hidden_width": 12, "layers": 2}
    return lively(CharacterGenerator(CharacterGeneratorConfig(cell=cell, **sizes)))


class Gru(nn.Module):
    """As tutorials have it: forward(tokens, hidden) -> (logits, hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gru, self.head = nn.Embedding(SIZE, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, SIZE)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: Tensor, hidden: Any = None) -> Any:
        self.shapes.append(tuple(tokens.shape))
        out, hidden = self.gru(self.tokens(tokens), hidden)
        return self.head(out), hidden


class Counting(Gru):
    """Its state counts the tokens too: texts of like counts may share a batch."""

    def forward(self, tokens: Tensor, state: Any = None) -> Any:
        hidden, count = (None, 0) if state is None else (state["hidden"], state["count"])
        logits, hidden = super().forward(tokens, hidden)
        return logits, {"hidden": hidden, "count": count + tokens.shape[1]}


class Alone(Gru):
    """The state of one text, without a dimension for several."""

    def forward(self, tokens: Tensor, hidden: Any = None) -> Any:
        logits, hidden = super().forward(tokens, None if hidden is None else hidden[:, None])
        return logits, hidden[:, 0]


class Forgetful(Gru):
    def advance(self, tokens: Tensor, hidden: Any = None) -> Any:
        return self.forward(tokens)


def by_whole_texts(network: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            found = network(torch.tensor([tokens]))
        tokens.append(int((found[0] if isinstance(found, tuple) else found)[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("make", [lambda: ours("lstm"), lambda: ours("rnn"), Gru, Counting, Alone])
@pytest.mark.parametrize("slots", [None, 2])
def test_every_prompt_has_its_own_text(make: Any, slots: int | None) -> None:
    network = lively(make())
    made = TokenGenerator(network, slots=slots).generate(PROMPTS, max_new_tokens=7)
    assert made.tokens == [by_whole_texts(network, prompt, 7) for prompt in PROMPTS]
    assert len({tuple(one) for one in made.tokens}) > 1
    assert "the model's own forward pass, by its state after each token" in made.engine
    assert ("one text at a time" in made.engine) == isinstance(network, Alone)


def test_each_token_is_read_once_and_texts_share_steps() -> None:
    network = lively(Gru())
    generator = TokenGenerator(network)
    network.shapes.clear()
    generator.generate(PROMPTS, max_new_tokens=3)
    assert network.shapes == [(1, 1), (2, 3), (1, 5), (4, 1), (4, 1)]
    network.shapes.clear()
    TokenGenerator(network, slots=2).generate([[1], [2], [3]], max_new_tokens=3, stop=None)
    assert network.shapes[-1] == (1, 1)


def test_sampling_does_not_depend_on_the_others() -> None:
    network = ours("lstm")
    generator = TokenGenerator(network)
    settings: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "top_k": 12, "seed": 3}
    settings["repetition_penalty"] = 1.2
    made = generator.generate(PROMPTS, **settings)
    assert made.tokens == TokenGenerator(network, slots=1).generate(PROMPTS, **settings).tokens
    assert [piece.tokens for piece in generator.stream(PROMPTS[:1], **settings)] == [(one,) for one in made.tokens[0]]


def test_a_state_that_does_not_carry_a_text_on_is_refused() -> None:
    with pytest.raises(UsageError, match="from the state after 4 tokens on, the logits differ"):
        TokenGenerator(lively(Forgetful()))


def test_dimensions() -> None:
    one, two = torch.zeros(3, 1, 4), torch.zeros(3, 2, 4)
    assert dimensions_of((one, None, 5), (two, None, 5)) == [1, None, None]
    assert dimensions_of((one, 5), (two, 6)) is None
    assert dimensions_of(one, one) is None
    assert dimensions_of([one], (two,)) is None
    assert dimensions_of(torch.zeros(1, 1), torch.zeros(2, 2)) is None


# encoder-decoders

SOURCES = [[5, 6, 7, 8, 9], [10, 11], [12] * 9, [20, 21, 22, 4]]


def seq2seq() -> Any:
    sizes: dict[str, Any] = {"width": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "max_tokens": 16}
    return lively(Seq2SeqTransformer(Seq2SeqConfig(vocab_size=SIZE, **sizes)), 0)


def test_steps_of_our_transformer_are_its_forward_pass() -> None:
    network = seq2seq().double()  # rounding of its large logits is not what is tested
    source, target = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.randint(SIZE, (2, 6))
    valid = torch.tensor([3, 2])
    with torch.no_grad():
        state = network.begin(source, valid)
        first, state = network.advance(target[:, :2], state)
        second, state = network.advance(target[:, 2:5], state)
        third, _ = network.advance(target[:, 5:], state)
        torch.testing.assert_close(torch.cat((first, second, third), 1), network(source, target, valid))
        unpadded, _ = network.advance(target[:1], network.begin(source[:1]))
        torch.testing.assert_close(unpadded, network(source[:1], target[:1]))
    with pytest.raises(UsageError, match="target holds sequences of 20 tokens"):
        network.advance(torch.zeros(2, 20, dtype=torch.int64), network.begin(source))


@pytest.mark.parametrize("slots", [None, 2])
def test_our_transformer(slots: int | None) -> None:
    network = seq2seq()
    generator = TokenGenerator(network, slots=slots)
    made = generator.generate(SOURCES, max_new_tokens=6, decoder_start_token_id=3)
    for source, tokens in zip(SOURCES, made.tokens, strict=True):
        target = [3]
        for _ in range(6):
            with torch.no_grad():
                target.append(int(network(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax()))
        assert tokens == target[1:]
    assert made.prompt_tokens == sum(map(len, SOURCES))
    assert made.engine == "the model's own decoder with its cache; each source is encoded once"
    longest = generator.generate([[1] * 16], max_new_tokens=40, decoder_start_token_id=3)
    assert (len(longest.tokens[0]), longest.reasons) == (16, ["context"])  # and read the first token
    with pytest.raises(UsageError, match="prompt 0 has 17 tokens; the model reads prompts of at most 16"):
        generator.generate([[1] * 17], decoder_start_token_id=3)


@pytest.mark.parametrize("start", [None, SIZE, True])
def test_a_decoder_needs_a_first_token(start: Any) -> None:
    with pytest.raises(UsageError, match=rf"decoder_start_token_id is {start}; .* pass decoder_start_token_id"):
        TokenGenerator(seq2seq()).generate(SOURCES, decoder_start_token_id=start)


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=SIZE,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return lively(transformers.T5ForConditionalGeneration(config), 4)


def bart() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=SIZE,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=48,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return lively(transformers.BartForConditionalGeneration(config), 0)


def theirs(network: Any, source: list[int], count: int) -> list[int]:
    """The tokens of transformers' own generate, without what stopped them."""
    ids = torch.tensor([source])
    with torch.no_grad():
        made = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)[0, 1:].tolist()
    return made[:-1] if made and made[-1] == network.generation_config.eos_token_id else made


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2, "forced_bos_token_id": 7},
    {"forced_eos_token_id": 9, "suppress_tokens": [4, 6]},
    {"min_new_tokens": 5, "no_repeat_ngram_size": 1},
    {"min_length": 6, "bad_words_ids": [[10], [12, 13]], "no_repeat_ngram_size": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(one) or "none")
@pytest.mark.parametrize("make", [t5, bart])
def test_token_for_token_what_transformers_makes_of_it(make: Any, settings: dict[str, Any]) -> None:
    network = make()
    network.generation_config.update(**settings)
    encoded: list[int] = []
    expected = [theirs(network, source, 9) for source in SOURCES]
    generator = TokenGenerator(network)
    handle = network.get_encoder().register_forward_hook(lambda module, given, made: encoded.append(1))
    generator = TokenGenerator(network)
    encoded.clear()
    assert generator.generate(SOURCES, max_new_tokens=9).tokens == expected
    assert len(encoded) == 1
    handle.remove()
    assert TokenGenerator(network, slots=2).generate(SOURCES, max_new_tokens=9).tokens == expected
    assert len({tuple(one) for one in expected}) > 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_beams": 4}, "num_beams = 4"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty = 1.2"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size = 2"),
    ],
)
def test_settings_that_cannot_be_carried_out(settings: dict[str, Any], told: str) -> None:
    network = t5()
    network.generation_config.update(**settings)
    with pytest.raises(UsageError, match=f"the model's generation_config has {told}"):
        flatout.generate(network, SOURCES)


def test_padded_sources_are_those_without_padding() -> None:
    network = t5()
    padded = [[*source, *[0] * (9 - len(source))] for source in SOURCES]
    plain = flatout.generate(network, SOURCES, max_new_tokens=5).tokens
    assert flatout.generate(network, torch.tensor(padded), max_new_tokens=5).tokens == plain


def test_what_guesses_or_rounds_is_refused() -> None:
    network = t5()
    with pytest.raises(PlanError, match=r"weights is 'int4'; .* it is an encoder-decoder"):
        TokenGenerator(network, Plan(weights="int4"))
    with pytest.raises(PlanError, match="guessing ahead"):
        TokenGenerator(network, Plan(speculation="lookup"))


def test_sources_that_are_no_tokens() -> None:
    network = t5()
    network.main_input_name = "input_features"
    with pytest.raises(UsageError, match="the T5ForConditionalGeneration reads input_features"):
        TokenGenerator(network)
