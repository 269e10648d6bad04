"""Padding is never read as text: padded prompts give what they give unpadded."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.errors import UsageError
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.generation.token_generator import TokenGenerator
from tests.infer.generation.tiny import END, model, prompts

PAD = 0
TEXTS = [one[:length] for one, length in zip(prompts(3, 20), (2, 5, 3), strict=True)]


@pytest.fixture(scope="module")
def generator() -> TokenGenerator:
    return TokenGenerator(model("gpt2"))


@pytest.fixture
def pad_token(generator: TokenGenerator) -> Iterator[Any]:
    """Sets the model's own."""
    config: Any = generator._model.generation_config

    def choose(token: int) -> None:
        config.pad_token_id = token

    yield choose
    config.pad_token_id = None


def padded(side: str, pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, TEXTS))
    ids, mask = torch.full((3, width), pad), torch.zeros(3, width, dtype=torch.int64)
    for row, text in enumerate(TEXTS):
        where = slice(width - len(text), None) if side == "left" else slice(len(text))
        ids[row, where], mask[row, where] = torch.tensor(text), 1
    return ids, mask


def forms(side: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    ids, mask = padded(side)
    both = {"input_ids": ids, "attention_mask": mask}
    return {
        "a mask beside": (ids, {"attention_mask": mask}),
        "a bool mask": (ids, {"attention_mask": mask.bool()}),
        "lists": (ids.tolist(), {"attention_mask": mask.tolist()}),
        "numpy": (list(ids.numpy()), {"attention_mask": np.asarray(mask)}),
        "a dict": (both, {}),
        "a dict of lists": ({name: one.tolist() for name, one in both.items()}, {}),
        "as BatchEncoding": (UserDict({**both, "token_type_ids": mask}), {}),
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", forms("left"))
def test_padded_prompts_give_what_they_give_unpadded(side: str, form: str, generator: TokenGenerator) -> None:
    expected = generator.generate(TEXTS, max_new_tokens=8)
    given, arguments = forms(side)[form]
    made = generator.generate(given, max_new_tokens=8, **arguments)
    assert (made.tokens, made.prompt_tokens) == (expected.tokens, expected.prompt_tokens)


def test_what_a_tokenizer_of_transformers_returns(generator: TokenGenerator) -> None:
    transformers = pytest.importorskip("transformers")
    ids, mask = padded("left")
    encoding = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    expected = generator.generate(TEXTS, max_new_tokens=8).tokens
    assert generator.generate(encoding, max_new_tokens=8).tokens == expected
    assert flatout.generate(generator._model, encoding, max_new_tokens=8).tokens == expected
    pieces = generator.stream(encoding, max_new_tokens=8)
    assert [token for one in pieces if one.prompt == 1 for token in one.tokens] == expected[1]


def test_left_padding_as_transformers_reads_it(generator: TokenGenerator) -> None:
    ids, mask = padded("left")
    network: Any = generator._model
    whole = network.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    for row, tokens in enumerate(generator.generate(ids, attention_mask=mask, max_new_tokens=8).tokens):
        assert whole[row, ids.shape[1] :].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_lists", [False, True])
def test_a_known_pad_token_needs_no_mask(side: str, as_lists: bool, generator: TokenGenerator, pad_token: Any) -> None:
    expected = generator.generate(TEXTS, max_new_tokens=8).tokens
    pad_token(PAD)
    ids, _ = padded(side)
    assert generator.generate(ids.tolist() if as_lists else ids, max_new_tokens=8).tokens == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pad_token_that_also_ends_texts_needs_a_mask(side: str, generator: TokenGenerator, pad_token: Any) -> None:
    pad_token(END)
    ids, mask = padded(side, END)
    with pytest.raises(UsageError, match=r"prompt 0 begins or ends with token 5, which pads .* attention_mask=\.\.\."):
        generator.generate(ids, max_new_tokens=8)
    expected = generator.generate(TEXTS, max_new_tokens=8).tokens
    assert generator.generate(ids, attention_mask=mask, max_new_tokens=8).tokens == expected
    generator.generate([[END, 9], [END, 8]], max_new_tokens=2)  # texts that begin as the model's training did
    generator.generate(torch.tensor([[END]]), max_new_tokens=2)


def test_ragged_lists_and_single_ones_are_texts_as_they_are() -> None:
    def read(given: Any) -> Any:
        return read_prompts(given, tokenizer=None, vocabulary=50, max_tokens=20, pad_token=0)

    assert read([[0, 7], [0, 0, 8]]) == [[0, 7], [0, 0, 8]]
    assert read([0, 7, 0]) == [[0, 7, 0]]
    assert read(torch.tensor([[0, 7, 0]])) == [[7]]  # a tensor may be padded to a length: as transformers takes it


@pytest.mark.parametrize(
    ("given", "mask", "told"),
    [
        ([[1, 2, 3]], [[1, 0, 1]], "the attention_mask of prompt 0 is 0 at place 1, within the text"),
        ([[1, 2], [3, 4]], [[0, 0], [1, 1]], "prompt 0 is all padding"),
        ([[1, 2], [3, 4]], [[1, 1]], r"attention_mask has rows of \[2\] tokens; the prompts have \[2, 2\]"),
        ([[1, 2]], [[1, 1, 1]], r"attention_mask has rows of \[3\] tokens; the prompts have \[2\]"),
        ([[1, 2]], [[1, 2]], "the attention_mask of prompt 0 holds 2; it is 1 or 0"),
        ([[1, 2]], 1, "attention_mask is of type int"),
        ({"attention_mask": [[1]]}, None, "a mapping with 'attention_mask'; it needs input_ids"),
        ({}, None, "a mapping with nothing; it needs input_ids"),
        ({"input_ids": [[1]], "pixel_values": 3}, None, "the prompts hold 'pixel_values'; .* leave 'pixel_values' out"),
        ({"input_ids": torch.ones(2, 3)}, None, "prompt 0 is torch.float32"),
    ],
)
def test_bad_masks_and_mappings_are_named(given: Any, mask: Any, told: str, generator: TokenGenerator) -> None:
    with pytest.raises(UsageError, match=told):
        generator.generate(given, attention_mask=mask)
