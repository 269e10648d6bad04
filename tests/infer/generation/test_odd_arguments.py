"""Generation with settings at their ends, with tokenizers and models that are out of the ordinary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.errors import UsageError
from flatout.infer.generation.sampling import Sampling, Uniforms, probabilities
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import GPT2, CharacterGenerator, CharacterGeneratorConfig, GPT2Config
from flatout.precision.outputs import difference
from tests.infer.generation.tiny import model, prompts


class Letters:
    """a is 1, b is 2."""

    def encode(self, text: str) -> Any:
        return [{"a": 1, "b": 2}[letter] for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join({1: "a", 2: "b"}[one] for one in ids)


class Giving:
    """What an encoder gives that is no list of ids."""

    def __init__(self, found: object) -> None:
        self.found = found

    def encode(self, text: str) -> Any:
        return self.found

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Wrapped(nn.Module):
    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.inner, self.config = model("own GPT-2"), config

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.inner(tokens)
        return out


def test_the_highest_temperature_leaves_what_is_banned_banned() -> None:
    found = probabilities(torch.tensor([[0.0, 9.0, -torch.inf]]), Sampling(temperature=1e308))
    assert found.tolist() == [[0.5, 0.5, 0.0]]


def test_numbers_are_made_as_far_as_a_text_goes() -> None:
    """Of a text without an end in sight they would fill the memory."""
    endless = Uniforms(7, 3, 1 << 62)
    assert endless.numbers("draws", 300).shape == (300,)
    first = endless.numbers("proposals", 5)
    assert torch.equal(first, Uniforms(7, 3, len(first)).numbers("proposals", len(first)))
    torch.manual_seed(0)
    network = CharacterGenerator(CharacterGeneratorConfig(vocab_size=4, embedding_width=4, hidden_width=8)).eval()
    made = flatout.generate(
        network, [[1]], max_new_tokens=10**20, temperature=1.0, seed=1, repetition_penalty=1.1, stop=[2]
    )
    assert made.reasons == ["stop"]


def test_bad_words_in_tensors_and_arrays() -> None:
    generator = TokenGenerator(model("own GPT-2"))
    words = [[1, 2], [3, 4]]
    found = [
        generator.generate(prompts(2), max_new_tokens=4, bad_words_ids=one).tokens
        for one in (words, np.array(words), torch.tensor(words))
    ]
    assert found[0] == found[1] == found[2]


def test_a_tokenizers_own_errors_are_named() -> None:
    with pytest.raises(UsageError, match="the tokenizer cannot encode 'abc': KeyError: 'c'"):
        flatout.generate(model("own GPT-2"), "abc", tokenizer=Letters())
    with pytest.raises(UsageError, match=r"the tokenizer cannot decode the ids \[.*suppress_tokens"):
        flatout.generate(model("own GPT-2"), "ab", tokenizer=Letters(), max_new_tokens=8)


@pytest.mark.parametrize("found", [None, ["a"], [1.0], torch.tensor([[1, 2]])], ids=["none", "text", "float", "batch"])
def test_what_are_no_ids_is_named(found: object) -> None:
    with pytest.raises(UsageError, match=r"the tokenizer (cannot encode|encodes) 'ab'.*gives token ids"):
        flatout.generate(model("own GPT-2"), "ab", tokenizer=Giving(found))
    assert flatout.generate(model("own GPT-2"), "ab", tokenizer=Giving(torch.tensor([1, 2]))).prompt_tokens == 2


def test_texts_of_an_iterator_are_not_taken_for_padded_ids() -> None:
    ends = SimpleNamespace(encode=lambda text: [1, int(text), 2], decode=str, pad_token_id=2)
    generator = TokenGenerator(model("own GPT-2"), tokenizer=ends)
    assert generator.generate((text for text in ("3", "4")), max_new_tokens=2).prompt_tokens == 6


@pytest.mark.parametrize(
    "end", [lambda one: np.int64(one), lambda one: torch.tensor(one), lambda one: [one]], ids=["numpy", "torch", "list"]
)
def test_end_tokens_as_configs_have_them(end: Any) -> None:
    text = flatout.generate(Wrapped(), [[1, 2, 3]], max_new_tokens=4).tokens[0]
    for config in (SimpleNamespace(eos_token_id=end(text[1])), {"eos_token_id": end(text[1])}):
        made = flatout.generate(Wrapped(config), [[1, 2, 3]], max_new_tokens=4)
        assert made.reasons == ["eos"]
        assert made.tokens == [text[: text.index(text[1])]]


def test_settings_that_are_no_settings_are_named() -> None:
    with pytest.raises(UsageError, match="the model's eos_token_id is '</s>'; an end token is its id"):
        flatout.generate(Wrapped(SimpleNamespace(eos_token_id="</s>")), [[1]])
    network = model("own GPT-2")
    network.generation_config = {"temperature": 0.7}
    with pytest.raises(UsageError, match=r"generation_config is a dict; .* GenerationConfig of transformers"):
        flatout.generate(network, [[1]])


def test_a_state_that_the_next_text_overwrites_is_refused() -> None:
    class OneBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.cell, self.head = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 11)
            self.kept = torch.zeros(1, 8)

        def advance(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if state is None:
                self.kept.zero_()
            logits = []
            for place in range(tokens.shape[1]):
                self.kept.copy_(self.cell(self.words(tokens[:, place]) * 4, self.kept))
                logits.append(self.head(self.kept))
            return torch.stack(logits, 1), self.kept

        def forward(self, tokens: Tensor) -> Tensor:
            return self.advance(tokens)[0]

    with pytest.raises(UsageError, match=r"return a state .* in memory of its own"):
        flatout.generate(OneBuffer().eval(), [[1, 2], [3]])


def test_a_model_that_draws_random_numbers_says_so() -> None:
    class Drawing(Wrapped):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner(tokens), 0.5)

    assert "two results for one text" in flatout.generate(Drawing().eval(), [[1, 2]], max_new_tokens=2).engine
    assert "two results" not in flatout.generate(Wrapped(), [[1, 2]], max_new_tokens=2).engine


def test_threads_that_prepare_one_model_in_training() -> None:
    """One must not put dropout back on under the other's pass."""
    for _ in range(4):
        network = GPT2(GPT2Config(vocab_size=65, max_tokens=64, width=48, heads=3, layers=2, dropout=0.5)).train()
        with ThreadPoolExecutor(6) as pool:
            made = [pool.submit(flatout.generate, network, [[1, 2]], max_new_tokens=2) for _ in range(6)]
        assert len({tuple(one.result().tokens[0]) for one in made}) == 1
        assert all(module.training for module in network.modules())


def test_sparse_weights_are_watched_too() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 8), nn.Parameter(torch.eye(11, 8).to_sparse())

        def forward(self, tokens: Tensor) -> Tensor:
            scores = torch.sparse.mm(self.head, self.words(tokens).flatten(0, 1).T)
            logits: Tensor = scores.T.unflatten(0, tokens.shape)
            return logits

    assert len(flatout.generate(Sparse(), [[1, 2]], max_new_tokens=3).tokens[0]) == 3


@pytest.mark.filterwarnings("error")
def test_a_vocabulary_of_one() -> None:
    assert difference(torch.ones(1), torch.ones(1)) == 0.0
