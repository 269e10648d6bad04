"""One generator used by several at a time, in turns or in threads: each gets the text that it would have alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import pytest

import flatout
from flatout.infer.generation.prepared import MOST_FREE
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.kernels.native import Native
from flatout.plan import Plan
from tests.infer.generation.tiny import model, prompts


@pytest.fixture(scope="module", params=["native", "torch"])
def generator(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            none = Native(library=None, reason="it is a test")
            patch.setattr("flatout.infer.generation.prepared.native", lambda: none)
        yield TokenGenerator(model("own GPT-2"), slots=2)


def test_two_streams_in_turns(generator: Any) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.8, "seed": 3}
    several = [prompts(3), prompts(5)[2:]]
    alone = [generator.generate(one, **settings).tokens for one in several]
    got: list[list[list[int]]] = [[[] for _ in one] for one in several]
    for pieces in zip_longest(*(generator.stream(one, **settings) for one in several)):
        for texts, piece in zip(got, pieces, strict=True):
            if piece is not None:
                texts[piece.prompt] += piece.tokens
    assert got == alone


def test_a_text_within_a_stream(generator: Any) -> None:
    alone = [generator.generate([one], max_new_tokens=12).tokens[0] for one in prompts(2)]
    outer: list[int] = []
    for piece in generator.stream([prompts(2)[0]], max_new_tokens=12):
        outer += piece.tokens
        assert generator.generate([prompts(2)[1]], max_new_tokens=12).tokens[0] == alone[1]
    assert outer == alone[0]


def test_threads(generator: Any) -> None:
    """Runs of unlike lengths and settings, so that caches of unlike sizes change hands."""
    jobs: list[tuple[list[list[int]], dict[str, Any]]] = [
        (
            prompts(1 + number % 5),
            {"max_new_tokens": 4 + 9 * (number % 3), "temperature": 0.7 * (number % 2), "seed": number},
        )
        for number in range(16)
    ]
    alone = [generator.generate(texts, **settings).tokens for texts, settings in jobs]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: generator.generate(job[0], **job[1]).tokens, jobs))
    assert found == alone
    assert len(generator._prepared._free) <= MOST_FREE


def test_threads_of_the_function_and_with_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.infer.generation.speculation.Throttle.choose", lambda self: 4)
    network, draft = model("own GPT-2"), model("own Transformer")
    expected = [flatout.generate(network, [one], max_new_tokens=12).tokens for one in prompts(6)]
    plan = Plan(speculation="lookup")
    with ThreadPoolExecutor(4) as pool:
        looked = list(pool.map(lambda one: flatout.generate(network, [one], max_new_tokens=12, plan=plan), prompts(6)))
        drafted = list(
            pool.map(lambda one: flatout.generate(network, [one], max_new_tokens=12, draft=draft), prompts(6))
        )
    assert [one.tokens for one in looked] == expected
    assert [one.tokens for one in drafted] == expected


def test_a_stream_that_is_left_gives_its_cache_back() -> None:
    generator = TokenGenerator(model("own GPT-2"))
    generator._prepared._free.clear()
    for _ in range(3):
        stream = generator.stream([[1, 2, 3]], max_new_tokens=20)
        next(stream)
        stream.close()
    assert len(generator._prepared._free) == 1
    generator.stream([[1, 2, 3]])  # never begun: it takes none
    assert len(generator._prepared._free) == 1


def test_a_tokenizer_is_used_by_one_thread_at_a_time() -> None:
    inside: list[int] = []

    class Letters:
        def encode(self, text: str) -> list[int]:
            inside.append(1)
            assert len(inside) == 1, "two threads encode at once"
            ids = [ord(letter) - 65 for letter in text * 50][: len(text)]
            inside.pop()
            return ids

        def decode(self, tokens: list[int]) -> str:
            return "".join(chr(65 + token) for token in tokens)

    generator = TokenGenerator(model("own GPT-2"), tokenizer=Letters())
    expected = generator.generate("HELLO", max_new_tokens=6).texts
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: generator.generate("HELLO", max_new_tokens=6).texts, range(12)))
    assert found == [expected] * 12
