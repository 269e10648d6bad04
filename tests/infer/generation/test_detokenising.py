"""Text from tokens as they come: what was given never changes, and joined it is the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.infer.generation.detokenising import MOST_BEFORE, MOST_WAITING, UNKNOWN, Detokeniser

PIECES = [
    b"a",
    b" ",
    b"the ",
    b".",
    b"\xf0\x9f",
    b"\x98",
    b"\x80",
    "ü".encode(),
    b"\xc3",
    b"\xbc",
    b"x\xe2\x82",
    b"\xac",
]


def decode_bytes(tokens: list[int]) -> str:
    """As a byte-level BPE does: each token is some bytes, whether or not they are whole characters."""
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def decode_words(tokens: list[int]) -> str:
    """As SentencePiece does: a word's space stands before it, but not at the start of a text."""
    return "".join(["▁the", "▁cat", "s", "▁", "!"][token] for token in tokens).replace("▁", " ").removeprefix(" ")


def decode_fallback(tokens: list[int]) -> str:
    """As Llama's does: byte tokens in a row are a text together, or each of them U+FFFD if they are none."""
    text, run = "", b""
    for token in [*tokens, -1]:
        if token >= 256 or token == -1:
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += UNKNOWN * len(run)
            run = b""
            text += chr(token - 256) if token >= 0 else ""
        else:
            run += bytes([token])
    return text


def streamed(decode: Callable[[list[int]], str], tokens: list[int], before: tuple[int, ...] = ()) -> list[str]:
    text = Detokeniser(decode, before)
    return [*(text.feed(token) for token in tokens), text.flush()]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
def test_bytes_in_any_order(tokens: list[int]) -> None:
    pieces = streamed(decode_bytes, tokens)
    assert "".join(pieces) == decode_bytes(tokens)
    for count in range(len(tokens) + 1):
        so_far = "".join(pieces[:count])
        assert so_far == decode_bytes(tokens[:count]).rstrip(UNKNOWN)  # all that is certain, and no more


@given(st.lists(st.integers(0, 4), max_size=20), st.lists(st.integers(0, 4), max_size=12))
def test_words_with_spaces_before_them(tokens: list[int], prompt: list[int]) -> None:
    assert "".join(streamed(decode_words, tokens)) == decode_words(tokens)
    whole, lead = decode_words(prompt + tokens), decode_words(prompt)
    if len(prompt) <= MOST_BEFORE:
        assert "".join(streamed(decode_words, tokens, tuple(prompt))) == whole[len(lead) :]


@given(st.text(alphabet="aé€😀", max_size=20), st.lists(st.booleans(), min_size=20, max_size=20))
def test_characters_that_fall_back_to_bytes(text: str, spelled: list[bool]) -> None:
    tokens: list[int] = []
    for character, as_bytes in zip(text, spelled, strict=False):
        tokens += list(character.encode()) if as_bytes else [256 + ord(character)]
    pieces = streamed(decode_fallback, tokens)
    assert "".join(pieces) == text
    assert all(UNKNOWN not in piece for piece in pieces)


def test_nothing_comes_within_a_character() -> None:
    text = Detokeniser(lambda tokens: bytes(tokens).decode(errors="replace"))
    seen = [(text.feed(byte), text.whole) for byte in "a😀b".encode()]
    assert seen == [("a", True), ("", False), ("", False), ("", False), ("😀", True), ("b", True)]


def test_a_text_cut_within_a_character_shows_it_at_the_end() -> None:
    assert streamed(lambda tokens: bytes(tokens).decode(errors="replace"), list("né".encode()[:2])) == [
        "n",
        "",
        UNKNOWN,
    ]
    assert streamed(decode_bytes, []) == [""]


def test_a_prompt_may_end_within_a_character() -> None:
    prompt, *rest = "😀".encode()
    assert streamed(lambda tokens: bytes(tokens).decode(errors="replace"), rest, (prompt,)) == ["", "", "😀", ""]


@pytest.mark.parametrize("token", [0, 1])
def test_decoding_stays_cheap(token: int) -> None:
    """Whatever comes: tokens without text and bytes without sense, a thousand of them."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return "".join(["", UNKNOWN, "a"][token] for token in tokens)

    tokens = [2, 2, *[token] * 1000, 2]
    assert "".join(streamed(decode, tokens)).replace(UNKNOWN, "") == "aaa"
    assert longest <= MOST_WAITING + MOST_BEFORE + 1


def test_real_tokenisers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = "Grüße, 世界 😀! It's the naïve test.\n\n  Ends."
    model = tokenizers.models.BPE(unk_token=None)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["It is the test. The test ends."], trainer)
    tokens = tokenizer.encode(text).ids
    pieces = streamed(tokenizer.decode, tokens)
    assert "".join(pieces) == text
    assert all(UNKNOWN not in piece for piece in pieces)
