"""Prompts as users have them (texts, lists of ids, tensors) as lists of ids, each checked before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flatout.errors import UsageError


def read_prompts(prompts: Any, *, tokenizer: Any, vocabulary: int, max_tokens: int) -> list[list[int]]:
    """Token ids of every prompt.

    prompts: a text, a list of ids or a whole-number tensor [tokens] is one prompt; a list of those, or a tensor
    [prompts, tokens], are several. Texts need a tokenizer (anything with `encode`). UsageError for a prompt that is
    empty, fills the model's longest sequence, holds an id outside of the vocabulary, or is of another type.
    """
    several = _several(prompts)
    if not several:
        raise UsageError("there are no prompts", limit="at least one is needed", remedy='pass ["..."] or [[1, 2, 3]]')
    return [_checked(index, _ids(index, one, tokenizer), vocabulary, max_tokens) for index, one in enumerate(several)]


def _several(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.dim() == 1 else list(prompts)
    if not isinstance(prompts, Iterable):
        raise _wrong_type("the prompts are", prompts)
    held = list(prompts)
    alone = held and all(_is_id(one) for one in held)
    return [held] if alone else held


def _is_id(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _ids(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            limit = "without a tokenizer a prompt is a list of token ids"
            raise UsageError(f"prompt {index} is a text", limit=limit, remedy="pass tokenizer=...")
        found = tokenizer.encode(prompt)
        return list(getattr(found, "ids", found))  # the tokenizers library wraps them
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype is torch.bool:
            what = f"prompt {index} is {prompt.dtype} {list(prompt.shape)}"
            raise UsageError(what, limit="token ids are whole numbers [tokens]", remedy="cut padding off each prompt")
        return [int(one) for one in prompt.tolist()]
    if not isinstance(prompt, Sequence) or not all(_is_id(one) for one in prompt):
        raise _wrong_type(f"prompt {index} is", prompt)
    return [operator.index(one) for one in prompt]


def _checked(index: int, ids: list[int], vocabulary: int, max_tokens: int) -> list[int]:
    if not ids:
        remedy = "begin with the model's first token (often called bos)"
        raise UsageError(f"prompt {index} is empty", limit="a text goes on from at least one token", remedy=remedy)
    if len(ids) >= max_tokens:
        limit = f"the model reads {max_tokens}, and one must be left to generate"
        raise UsageError(f"prompt {index} has {len(ids)} tokens", limit=limit, remedy="cut it at the front")
    for place, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            what = f"prompt {index} holds token {token} at place {place}"
            limit = f"the model's ids are 0 to {vocabulary - 1}"
            raise UsageError(what, limit=limit, remedy="use the tokenizer that belongs to the model")
    return ids


def _wrong_type(subject: str, value: Any) -> UsageError:
    kinds = "a text, a list of token ids or a whole-number tensor"
    return UsageError(f"{subject} of type {type(value).__name__}", limit=f"a prompt is {kinds}")
