"""Where a text ends: the first stop that is complete, whatever overlaps, and nothing streamed that is not kept."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import UsageError
from flatout.infer.generation.detokenising import UNKNOWN
from flatout.infer.generation.stopping import Automaton, Ending, Stops, Watch, stops_from

PIECES = [b"a", b"b", b"ab", b"ba", b"", b"\xc3", b"\xa9", "é".encode(), b"a\xc3", b"\xa9b", b"bab"]


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def ending_of(watch: Watch, tokens: list[int]) -> Ending | None:
    for token in tokens:
        if watch.feed(token):
            break
    return watch.ending


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, Stops()),
        ([], Stops()),
        (5, Stops(token_ids=frozenset({5}))),
        (np.int64(5), Stops(token_ids=frozenset({5}))),
        ("b", Stops(texts=("b",), decode=decode)),
        ([5, 6], Stops(token_ids=frozenset({5, 6}))),
        ((5, 6), Stops(token_ids=frozenset({5, 6}))),
        (["b", "ab", "b"], Stops(texts=("b", "ab"), decode=decode)),
        ([[5, 6], (7,), [5, 6]], Stops(sequences=((5, 6), (7,)))),
        ([1, "b", [2, 3]], Stops(token_ids=frozenset({1}), sequences=((2, 3),), texts=("b",), decode=decode)),
    ],
)
def test_the_kinds_of_stop(stop: Any, expected: Stops) -> None:
    made = stops_from(stop, decode=decode)
    assert (made.token_ids, made.sequences, made.texts) == (expected.token_ids, expected.sequences, expected.texts)
    assert stops_from(stop, eos=[3, 4], decode=decode).eos == {3, 4}
    assert stops_from(None, eos=[3]) == Stops(eos=frozenset({3}))


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (1.5, "stop is 1.5: 1.5 is of type float; it must be a token id, a text, or a list of ids"),
        (True, "True is of type bool"),
        ({"a"}, "stop is {'a'}: {'a'} is of type set"),
        (b"end", "is of type bytes"),
        ([None], "stop is [None]: None is of type NoneType"),
        ([["a"]], "'a' is of type str"),
        ([[[1]]], "[1] is of type list"),
        (torch.tensor([1, 2]), "tensors and arrays as lists, by tolist()"),
        ("", "stop '' holds an empty str; every text contains it"),
        (["a", []], "holds an empty list"),
        (-1, "stop token -1; token ids are 0 to 99"),
        ([[3, 100]], "stop token 100; token ids are 0 to 99; pass an id of this model's vocabulary"),
    ],
)
def test_what_is_no_stop_is_named(stop: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        stops_from(stop, decode=decode, vocabulary=100)


def test_what_else_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="stop text 'end' without a tokenizer"):
        stops_from("end")
    with pytest.raises(UsageError, match="token ids are not negative"):
        stops_from(-1)


@pytest.mark.parametrize(
    ("tokens", "reason", "kept", "generated"),
    [
        ([1, 2, 0, 7], "eos", 2, 3),
        ([0], "eos", 0, 1),
        ([1, 9], "stop", 1, 2),
        ([1, 1, 1, 2, 3, 3], "stop", 1, 4),  # 1 1 2 within 1 1 1 2
        ([4, 5, 4, 5, 6], "stop", 2, 5),  # 4 5 6 after a start that failed
        ([5, 4, 5, 7, 3, 5], "stop", 1, 4),  # 4 5 7 and 5 7: the longest of those complete
        ([3, 5, 7], "stop", 1, 3),
        ([3, 8, 0], "stop", 1, 3),  # 8 0 ends in the eos token
        ([3] * 12, "length", 10, 10),
        ([3] * 9 + [0], "eos", 9, 10),  # at the limit the stop is the reason
    ],
)
def test_tokens(tokens: list[int], reason: str, kept: int, generated: int) -> None:
    stops = stops_from([9, [1, 1, 2], [4, 5, 6], [4, 5, 7], [5, 7], [8, 0]], eos=[0])
    ending = ending_of(Watch(stops, limit=10), tokens)
    assert ending == Ending(reason=reason, tokens=kept, generated=generated, characters=None)  # type: ignore[arg-type]


def test_no_stop_at_all() -> None:
    watch = Watch(Stops())
    assert ending_of(watch, [1, 2, 3]) is None
    watch.finish()
    assert watch.ending == Ending(reason="length", tokens=3, generated=3, characters=None)
    assert watch.take() == ""


def first_complete(text: list[Any], patterns: list[list[Any]]) -> tuple[int, int] | None:
    """(end, length) of the first pattern complete, the longest of several: by looking everywhere."""
    for end in range(1, len(text) + 1):
        lengths = [len(pattern) for pattern in patterns if text[max(0, end - len(pattern)) : end] == pattern]
        if lengths:
            return end, max(lengths)
    return None


patterns_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5)


@given(patterns_of, st.lists(st.integers(0, 2), max_size=30))
def test_the_automaton_finds_what_looking_everywhere_finds(patterns: list[list[int]], text: list[int]) -> None:
    automaton, node = Automaton(patterns), 0
    expected = first_complete(text, patterns)
    for end, symbol in enumerate(text, 1):
        node = automaton.step(node, symbol)
        begun = [
            size for pattern in patterns for size in range(1, len(pattern) + 1) if text[:end][-size:] == pattern[:size]
        ]
        assert automaton.depth[node] == max((size for size in begun if size <= end), default=0)
        if automaton.complete[node]:
            assert (end, automaton.complete[node]) == expected
            return
    assert expected is None


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    texts=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    sequences=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=2),
    eos=st.sampled_from([(), (10,)]),
)
def test_what_is_streamed_is_what_is_kept(
    tokens: list[int], texts: list[str], sequences: list[list[int]], eos: tuple[int, ...]
) -> None:
    watch = Watch(stops_from([*texts, *sequences], eos, decode), limit=20)
    pieces = []
    for token in tokens:
        done = watch.feed(token)
        pieces.append(watch.take())
        if done:
            break
    watch.finish()
    pieces.append(watch.take())
    assert watch.take() == ""
    ending, text = watch.ending, "".join(pieces)
    assert ending is not None
    assert ending.tokens <= ending.generated <= 20
    assert ending.characters == len(text)
    assert all(stop not in text for stop in texts)
    whole, kept = decode(tokens[: ending.generated]), decode(tokens[: ending.tokens])
    assert whole.startswith(text) or ending.reason == "eos"
    if ending.reason != "stop":
        assert text == kept
    else:
        assert text.startswith(kept.rstrip(UNKNOWN))


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    texts=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_texts_are_found_where_looking_everywhere_finds_them(tokens: list[int], texts: list[str]) -> None:
    watch = Watch(stops_from(texts, decode=decode))
    ending = ending_of(watch, tokens)
    found = first_complete(list(decode(tokens)), [list(text) for text in texts])
    if found is None:
        assert ending is None
        return
    end, length = found
    assert ending is not None
    assert ending.characters == end - length
    lengths = [len(decode(tokens[:count]).rstrip(UNKNOWN)) for count in range(len(tokens) + 1)]
    assert ending.generated == min(count for count, size in enumerate(lengths) if size >= end)
    fitting = [count for count in range(ending.generated + 1) if not decode(tokens[:count]).endswith(UNKNOWN)]
    assert ending.tokens == max(count for count in fitting if lengths[count] <= end - length)


def test_a_stop_text_over_tokens_and_split_characters() -> None:
    by_byte = Watch(stops_from("é!", decode=lambda tokens: bytes(tokens).decode(errors="replace")))
    pieces = []
    for byte in "aéé!b".encode():
        done = by_byte.feed(byte)
        pieces.append(by_byte.take())
        if done:
            break
    assert pieces == ["a", "", "", "", "é", ""]  # an é is held back until what follows it is no !
    assert by_byte.ending == Ending(reason="stop", tokens=3, generated=6, characters=2)


def test_a_sequence_begun_is_held_back_from_the_stream() -> None:
    watch = Watch(stops_from([[0, 1, 1]], decode=decode))
    taken = []
    for token in (1, 0, 1, 0, 1, 1):
        watch.feed(token)
        taken.append(watch.take())
    assert taken == ["b", "", "", "ab", "", ""]
    assert watch.ending == Ending(reason="stop", tokens=3, generated=6, characters=3)


def test_at_the_end_nothing_is_held_back() -> None:
    watch = Watch(stops_from(["abab"], [9], decode), limit=3)
    assert [(watch.feed(token), watch.take()) for token in (0, 1, 0)] == [(False, ""), (False, ""), (True, "aba")]
    watch = Watch(stops_from("aba", [4], decode))
    assert [(watch.feed(token), watch.take()) for token in (2, 4)] == [(False, ""), (True, "ab")]
    assert watch.ending == Ending(reason="eos", tokens=1, generated=2, characters=2)


def test_a_token_costs_microseconds() -> None:
    watch = Watch(stops_from([[1] * 50 + [2], [3, 1], 9], eos=[0]))
    start = time.thread_time()
    for _ in range(20_000):
        watch.feed(1)
    assert (time.thread_time() - start) / 20_000 < 20e-6  # about 0.5 us; far above, for a busy machine
