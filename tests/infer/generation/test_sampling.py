"""Choosing the next token: as transformers does, drawn exactly, and the same whoever shares the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flatout.errors import UsageError
from flatout.infer.generation.sampling import (
    Sampling,
    Uniforms,
    Use,
    _first_above,
    _nucleus,
    adjusted,
    draw,
    fresh_seed,
    greedy_tokens,
    next_tokens,
    no_usable_logits,
    probabilities,
    unusable,
)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def uniforms(seed: int, prompts: Sequence[int], length: int, use: Use = "draws") -> torch.Tensor:
    """fp64 [prompts, length]"""
    return torch.stack([Uniforms(seed, prompt, length).numbers(use, length) for prompt in prompts])


def penalised(logits: torch.Tensor, sampling: Sampling, history: torch.Tensor) -> torch.Tensor:
    """All columns of the history count."""
    return adjusted(logits, sampling, history, torch.full((len(history),), history.shape[1]))


def random_tokens(rows: int, length: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"temperature": -0.5}, "temperature is -0.5; it must be a number of at least 0; pass 0 for greedy"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 1, "top_k": 0}, "top_k is 0; it must be a whole number of at least 1; leave it out"),
        ({"temperature": 1, "top_k": 2.0}, "top_k is 2.0"),
        ({"temperature": 1, "top_p": 0.0}, "top_p is 0.0; it must be a number above 0 and at most 1"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1, "min_p": -0.1}, "min_p is -0.1"),
        ({"temperature": 1, "min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number above 0; 1.0 is none"),
        ({"no_repeat_ngram": 0}, "no_repeat_ngram is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, f"seed is {1 << 63}"),
        ({"top_k": 5}, "top_k is 5 with temperature 0"),
        ({"min_p": 0.1}, "pass temperature=1.0 to sample, or leave min_p out"),
        ({"seed": np.float32(1.5)}, "seed is 1.5"),
        ({"seed": torch.tensor(True)}, "seed is True"),
        ({"temperature": torch.ones(2)}, "temperature is tensor([1., 1.])"),
    ],
)
def test_what_cannot_be_used_is_named(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Sampling(**choice)


def test_limits_themselves_are_allowed() -> None:
    Sampling(temperature=1, top_k=1, top_p=1.0, min_p=0.0, no_repeat_ngram=1, seed=(1 << 63) - 1)
    assert Sampling().greedy
    assert not Sampling().adjusts
    assert Sampling(no_repeat_ngram=2).adjusts


def transformers_scores(logits: torch.Tensor, sampling: Sampling, history: torch.Tensor) -> torch.Tensor:
    """What transformers' own processors make of the logits, in the order in which its generate applies them."""
    library = pytest.importorskip("transformers.generation.logits_process")
    chain: list[Any] = []
    if sampling.repetition_penalty != 1:
        chain.append(library.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram:
        chain.append(library.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram))
    if not sampling.greedy:
        chain.append(library.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chain.append(library.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p:
        chain.append(library.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(library.MinPLogitsWarper(sampling.min_p))
    scores = logits.clone()
    for processor in chain:
        scores = processor(history, scores)
    return scores


@pytest.mark.parametrize("vocabulary", [11, 500])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 60])
@pytest.mark.parametrize(
    "choice",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"no_repeat_ngram": 1},
        {"no_repeat_ngram": 2},
        {"no_repeat_ngram": 3},
        {"repetition_penalty": 1.2, "no_repeat_ngram": 4},
    ],
)
def test_penalties_equal_transformers(choice: dict[str, Any], length: int, vocabulary: int) -> None:
    pytest.importorskip("transformers")
    sampling = Sampling(**choice)
    logits, history = random_logits(4, vocabulary), random_tokens(4, length, min(vocabulary, 9))
    before = logits.clone()
    ours = penalised(logits, sampling, history)
    assert torch.equal(logits, before)
    if length:  # transformers cannot penalise an empty row either way: there is nothing to do
        assert torch.equal(ours, transformers_scores(logits, sampling, history))
    else:
        assert ours is logits


@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.9, "top_k": 7},
        {"temperature": 1.0, "top_k": 10_000},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2, "no_repeat_ngram": 2},
    ],
)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_probabilities_equal_transformers(choice: dict[str, Any], spread: float) -> None:
    pytest.importorskip("transformers")
    sampling = Sampling(**choice)
    logits, history = random_logits(6, 300, seed=3, spread=spread), random_tokens(6, 40, 20)
    ours = probabilities(penalised(logits, sampling, history), sampling)
    theirs = torch.softmax(transformers_scores(logits, sampling, history), -1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.sum(-1), torch.ones(6))


@pytest.mark.parametrize("garbage", [-1, 0, 7])
@pytest.mark.parametrize("choice", [{"repetition_penalty": 1.4}, {"no_repeat_ngram": 1}, {"no_repeat_ngram": 3}])
def test_a_ragged_history_counts_as_far_as_it_goes(choice: dict[str, Any], garbage: int) -> None:
    sampling = Sampling(**choice)
    lengths = [0, 1, 2, 5, 30]
    history, logits = random_tokens(5, 30, 6), random_logits(5, 12)
    for row, length in enumerate(lengths):
        history[row, length:] = garbage
    together = adjusted(logits, sampling, history, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = penalised(logits[row : row + 1], sampling, history[row : row + 1, :length])
        assert torch.equal(together[row : row + 1], alone)


def test_every_token_may_be_banned_and_that_is_found() -> None:
    logits = penalised(torch.zeros(1, 3), Sampling(no_repeat_ngram=1), torch.tensor([[0, 1, 2]]))
    assert unusable(logits).tolist() == [True]


def test_equals_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for choice in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}):
        kept = probabilities(logits, Sampling(temperature=1.0, **choice))
        torch.testing.assert_close(kept, torch.tensor([[0, 1, 1, 1, 0]]) / 3)


@pytest.mark.parametrize(("top_p", "least"), [(0.1, 0.5), (0.5, 0.5), (0.51, 0.25), (0.75, 0.25), (0.9, 0.125)])
def test_what_reaches_the_share_exactly_is_enough(top_p: float, least: float) -> None:
    assert float(_nucleus(torch.tensor([[0.125, 0.5, 0.125, 0.25]]), top_p)) == least


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_the_lowest_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(3, 50, spread=1e4)
    cold = probabilities(logits, Sampling(temperature=temperature, top_p=0.9))
    assert torch.equal(cold, probabilities(logits, Sampling()))


def test_bf16_logits_and_extremes() -> None:
    logits = torch.tensor([[3e38, -3e38, -math.inf, 0.0]])
    assert probabilities(logits, Sampling(temperature=0.1)).tolist() == [[1, 0, 0, 0]]
    assert probabilities(logits.bfloat16(), Sampling(temperature=1.0)).dtype == torch.float32


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert greedy_tokens(logits).tolist() == [1, 0]
    assert next_tokens(logits, Sampling()).tolist() == [1, 0]
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0)), min_size=1, max_size=40).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 2**-53])),
    scale=st.sampled_from([1.0, 1e-6, 3.0]),
)
def test_the_impossible_is_never_drawn(weights: list[float], uniform: float, scale: float) -> None:
    probs = torch.tensor([weights]) * scale
    if not probs.sum() > 0:  # below what fp32 can hold
        return
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    token = int(draw(probs, uniforms))
    assert probs[0, token] > 0
    sums = probs.double().cumsum(-1)
    assert int(_first_above(sums, uniforms[:, None] * sums[:, -1:], probs > 0)) == token
    below = float(sums[0, token - 1]) if token else 0.0
    assert below <= uniform * float(sums[0, -1]) < float(sums[0, token])


def test_the_ends_of_a_large_vocabulary() -> None:
    probs = torch.rand(2, 50_257, generator=torch.Generator().manual_seed(0))
    probs[:, :100] = 0
    probs[:, -100:] = 0
    assert draw(probs, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [100, 50_156]


def test_sums_that_fall_as_a_gpus_may() -> None:
    sums = torch.tensor([[0.2, 0.5, 0.4999, 0.5001, 0.9998, 0.9999]], dtype=torch.float64)
    possible = torch.tensor([[True, True, False, True, True, False]])
    for target, token in [(0.0, 0), (0.2, 1), (0.49999, 1), (0.5, 3), (0.99985, 4), (0.9999, 4)]:
        assert int(_first_above(sums, torch.tensor([[target]], dtype=torch.float64), possible)) == token


@pytest.mark.parametrize("choice", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2, "top_k": 6}])
def test_draws_follow_the_probabilities(choice: dict[str, Any]) -> None:
    count = 20_000
    sampling = Sampling(temperature=1.1, **choice)
    logits = random_logits(1, 9, seed=5, spread=1.0)
    drawn = uniforms(11, [4], count)[0]
    tokens = next_tokens(logits.expand(count, -1), sampling, drawn)
    expected = probabilities(logits, sampling)[0].double()
    seen = torch.bincount(tokens, minlength=9)
    possible = expected > 0
    assert seen[~possible].sum() == 0
    share = (expected[possible] / expected[possible].sum() * count).numpy()
    assert stats.chisquare(seen[possible].numpy(), share).pvalue > 0.01


def test_a_prompt_draws_the_same_alone_and_in_any_company() -> None:
    vocabulary, steps = 200, 12
    logits = random_logits(steps * 5, vocabulary).view(steps, 5, vocabulary)
    sampling = Sampling(temperature=1.0, top_p=0.95)

    def texts(prompts: list[int], length: int) -> dict[int, list[int]]:
        draws = uniforms(3, prompts, length)
        steps_of = [next_tokens(logits[step, prompts], sampling, draws[:, step]) for step in range(steps)]
        return {prompt: [int(tokens[row]) for tokens in steps_of] for row, prompt in enumerate(prompts)}

    together = texts([0, 1, 2, 3, 4], steps)
    assert texts([3], 100) == {3: together[3]}
    assert texts([4, 1], steps) == {4: together[4], 1: together[1]}


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox-4x64-10 as Salmon et al. define it, in Python's integers."""
    mask = (1 << 64) - 1
    low, high = key
    a, b, c, d = counter
    for _ in range(10):
        first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (second >> 64) ^ b ^ low, second & mask, (first >> 64) ^ d ^ high, first & mask
        low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
    return [a, b, c, d]


def test_the_reference_generator_gives_the_authors_numbers() -> None:
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox((0, 0), (0, 0, 0, 0)) == zeros  # Random123's known answers


@pytest.mark.parametrize(("seed", "prompt"), [(0, 0), (7, 2), ((1 << 63) - 1, 100_000)])
def test_uniforms_are_the_published_generators(seed: int, prompt: int) -> None:
    uses: tuple[Use, ...] = ("draws", "acceptances", "proposals")
    for number, use in enumerate(uses):
        bits = [word for block in (1, 2, 3) for word in philox((seed, number), (block, 0, prompt, 0))][:9]
        assert uniforms(seed, [prompt], 9, use)[0].tolist() == [(word >> 11) / 2**53 for word in bits]


def test_a_fresh_seed_moves_nobodys_generator() -> None:
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    assert fresh_seed() != fresh_seed()
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


def test_streams_and_prompts_are_independent() -> None:
    uses: tuple[Use, ...] = ("draws", "acceptances", "proposals")
    tables = [uniforms(0, range(40), 500, use) for use in uses]
    columns = [table.flatten().numpy() for table in tables] + [tables[0].roll(1, 0).flatten().numpy()]
    assert float(np.abs(np.corrcoef(columns) - np.eye(4)).max()) < 0.025
    assert all(stats.kstest(column, "uniform").pvalue > 0.01 for column in columns)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_found_and_named(value: float) -> None:
    logits = torch.zeros(3, 4)
    assert not unusable(logits).any()
    logits[1, 2] = value
    assert unusable(logits).tolist() == [False, True, False]
    told = str(no_usable_logits(41, 9))
    assert told.startswith(
        "the logits for generated token 9 of prompt 41 are NaN, +inf or all -inf; a next token needs"
    )
    assert "no_repeat_ngram, suppress_tokens and bad_words_ids" in told


def test_a_banned_token_is_no_flaw() -> None:
    assert not unusable(torch.tensor([[-math.inf, 0.0]])).any()
