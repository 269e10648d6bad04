"""Guesses from the text, and their judgement: the distribution of the text is the model's, whatever was guessed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flatout.infer.generation.sampling import Sampling, Uniforms, Use, draw, next_tokens, probabilities
from flatout.infer.generation.speculation import RUNS, Lookup, accept, accept_equal

VOCABULARY = 6
NOTHING = -1


def uniforms(seed: int, rows: int, length: int, use: Use = "draws") -> torch.Tensor:
    """fp64 [rows, length]"""
    return torch.stack([Uniforms(seed, row, length).numbers(use, length) for row in range(rows)])


def guesses_by_looking_everywhere(tokens: list[int], limit: int) -> list[int]:
    for size in RUNS:
        starts = [at for at in range(size, len(tokens)) if tokens[at - size : at] == tokens[len(tokens) - size :]]
        if starts:
            text = list(tokens)
            for offset in range(limit):  # one at a time, so that a run may continue into what was just guessed
                text.append(text[starts[-1] + offset])
            return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=30),
    more=st.lists(st.integers(0, 3), max_size=10),
    limit=st.integers(1, 9),
)
def test_lookup_guesses_what_looking_everywhere_guesses(tokens: list[int], more: list[int], limit: int) -> None:
    lookup = Lookup(tokens)
    assert lookup.propose(limit) == guesses_by_looking_everywhere(tokens, limit)
    for token in more:
        lookup.extend([token])
    assert lookup.propose(limit) == guesses_by_looking_everywhere(tokens + more, limit)


def test_lookup_prefers_the_longest_run_then_the_latest() -> None:
    assert Lookup([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]).propose(1) == [9]
    assert Lookup([2, 3, 9, 7, 2, 3, 8, 1, 2, 3]).propose(1) == [8]
    assert Lookup([1, 2, 1, 2, 1]).propose(5) == [2, 1, 2, 1, 2]
    assert Lookup([1, 2, 3]).propose(4) == Lookup().propose(4) == []


def test_a_lookup_costs_microseconds_however_long_the_text() -> None:
    lookup = Lookup(torch.randint(50_000, (50_000,), generator=torch.Generator().manual_seed(0)).tolist())
    start = time.thread_time()
    for token in range(2_000):
        lookup.extend([token])
        lookup.propose(8)
    assert (time.thread_time() - start) / 2_000 < 100e-6  # about 2 us; far above, for a busy machine


def table(seed: int, sampling: Sampling, spread: float = 1.5) -> torch.Tensor:
    """A model whose next token depends on the last: probabilities [last, next]."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    return probabilities(logits, sampling)


def draft(model: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Guesses of a draft model after token 0: (tokens [rows, k], what each was drawn from [rows, k, vocabulary])."""
    last = torch.zeros(len(uniforms), dtype=torch.int64)
    tokens, drawn_from = [], []
    for column in uniforms.T:
        drawn_from.append(model[last])
        last = draw(drawn_from[-1], column)
        tokens.append(last)
    return torch.stack(tokens, 1), torch.stack(drawn_from, 1)


def target_along(model: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    """What the model would draw from at each position, given the guesses before: [rows, k + 1, vocabulary]."""
    start = torch.zeros(len(proposed), 1, dtype=torch.int64)
    return model[torch.cat([start, proposed.clamp(min=0)], 1)]


def text_of(proposed: torch.Tensor, accepted: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[rows, k + 1]: the tokens that each row gained, NOTHING behind them."""
    columns = torch.arange(proposed.shape[1] + 1)
    text = torch.cat([proposed, proposed[:, :1]], 1).where(columns < accepted[:, None], NOTHING)
    return text.scatter(1, accepted[:, None], last[:, None])


def assert_follows(text: torch.Tensor, model: torch.Tensor) -> None:
    """Each token of the texts is distributed as the model says, given the one before it: chi-square."""
    before = torch.cat([torch.zeros(len(text), 1, dtype=torch.int64), text[:, :-1]], 1)
    for position in range(text.shape[1]):
        for last in range(VOCABULARY):
            here = text[(before[:, position] == last) & (text[:, position] != NOTHING), position]
            seen, possible = torch.bincount(here, minlength=VOCABULARY), model[last] > 0
            assert int(seen[~possible].sum()) == 0
            if len(here) > 200 and int(possible.sum()) > 1:
                expected = model[last][possible].double()
                expected = expected / expected.sum() * len(here)
                assert stats.chisquare(seen[possible].numpy(), expected.numpy()).pvalue > 1e-3


TRUNCATIONS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "min_p": 0.1}]


@pytest.mark.parametrize("choice", TRUNCATIONS)
@pytest.mark.parametrize("likeness", ["another", "like", "same"])
@pytest.mark.first_case
def test_a_drafts_guesses_leave_the_models_distribution(choice: dict[str, Any], likeness: str) -> None:
    rows, guesses = 12_000, 3
    sampling = Sampling(temperature=1.0, **choice)
    model = table(0, sampling)
    other = table(1, Sampling(temperature=1.0))
    drafter = {"another": other, "like": 0.7 * model + 0.3 * other, "same": model}[likeness]
    drawn = uniforms(5, rows, guesses, "proposals")
    proposed, drawn_from = draft(drafter, drawn)
    accepted, last = accept(
        target_along(model, proposed),
        proposed,
        drawn_from,
        draws=uniforms(5, rows, guesses + 1),
        acceptances=uniforms(5, rows, guesses, "acceptances"),
    )
    assert_follows(text_of(proposed, accepted, last), model)
    expected = float(torch.minimum(model[0], drafter[0]).sum())  # the greatest share that any way of accepting can have
    assert float((accepted > 0).double().mean()) == pytest.approx(expected, abs=0.02)
    if likeness == "same":
        assert int(accepted.min()) == guesses


@pytest.mark.parametrize("choice", TRUNCATIONS)
def test_guesses_without_chance_leave_the_models_distribution(choice: dict[str, Any]) -> None:
    rows, guesses = 12_000, 3
    model = table(2, Sampling(temperature=1.0, **choice))
    generator = torch.Generator().manual_seed(0)
    proposed = torch.randint(VOCABULARY, (rows, guesses), generator=generator)
    draws = uniforms(6, rows, guesses + 1)
    own = draw(target_along(model, proposed).flatten(0, 1), draws.flatten()).view(draws.shape)
    accepted, last = accept_equal(own, proposed)
    assert_follows(text_of(proposed, accepted, last), model)
    for token in range(VOCABULARY):  # p(x), which is min(1, p / q) where q is 1 at x
        share = float((accepted[proposed[:, 0] == token] > 0).double().mean())
        assert share == pytest.approx(float(model[0, token]), abs=0.04)


@pytest.mark.parametrize("choice", [{}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}])
@settings(max_examples=25)
@given(data=st.data())
def test_the_text_is_that_without_guessing(choice: dict[str, Any], data: st.DataObject) -> None:
    """Token for token, greedy or drawn, however many tokens were guessed when and how well."""
    length, sampling = 12, Sampling(**choice)
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    draws = Uniforms(1, 4, length).numbers("draws", length)[None]
    plain = [0]
    for position in range(length):
        plain += next_tokens(logits[plain[-1:]], sampling, draws[:, position]).tolist()
    text = [0]
    while len(text) <= length:
        wild = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
        proposed = plain[len(text) :][: data.draw(st.integers(0, 4))] + wild
        places = torch.arange(len(text) - 1, len(text) + len(proposed)).clamp(max=draws.shape[1] - 1)
        uniforms = draws[0, places]
        own = next_tokens(logits[[text[-1], *proposed]], sampling, uniforms)
        accepted, last = accept_equal(own, torch.tensor(proposed, dtype=torch.int64))
        text += [*proposed[: int(accepted)], int(last)]
    assert text[: length + 1] == plain


@pytest.mark.parametrize("made", [1, 2])
def test_few_guesses_of_rows_together_and_alone(made: int) -> None:
    rows = 4_000
    model, drafter = table(4, Sampling(temperature=1.0)), table(5, Sampling(temperature=1.0))
    draws, judges = uniforms(8, rows, made + 1), uniforms(8, rows, made, "acceptances")
    proposed, drawn_from = draft(drafter, uniforms(8, rows, made, "proposals"))
    target = target_along(model, proposed)
    accepted, last = accept(target, proposed, drawn_from, draws=draws, acceptances=judges)
    assert bool((accepted <= made).all())
    assert_follows(text_of(proposed, accepted, last), model)
    alone = accept(target[7], proposed[7], drawn_from[7], draws=draws[7], acceptances=judges[7])
    assert (int(alone[0]), int(alone[1])) == (int(accepted[7]), int(last[7]))


def test_greedy_judgement() -> None:
    own = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    proposed = torch.tensor([[5, 6], [5, 0], [0, 6]])
    accepted, last = accept_equal(own, proposed)
    assert accepted.tolist() == [2, 1, 0]
    assert last.tolist() == [7, 6, 5]
    none = torch.empty(3, 0, dtype=torch.int64)
    assert accept_equal(own[:, :1], none)[1].tolist() == [5] * 3


def test_refusal_by_rounding_alone_still_draws_what_is_possible() -> None:
    target = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    drawn_from = torch.tensor([[0.25, 0.7500001, 0.0]])
    accepted, last = accept(
        target,
        torch.tensor([1]),
        drawn_from,
        draws=torch.tensor([0.9, 0.5], dtype=torch.float64),
        acceptances=torch.tensor([1 - 2**-53], dtype=torch.float64),
    )
    assert (int(accepted), int(last)) == (0, 1)
