"""Prompts in any form (texts, lists of ids, tensors, padded batches) as lists of ids, checked before the run.

Padding is never text. An attention mask says what is padding. Where there is none, a batch of equal lengths that
begins or ends in pad tokens was padded, as transformers takes it; unless the pad token also ends texts: then only a
mask can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch

from flatout.arguments import described
from flatout.errors import UsageError
from flatout.infer.generation.token_ids import whole_number
from flatout.infer.tokenizer_source import Tokenizer, encode_of

_OF_A_TOKENIZER = frozenset({"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "length"})
"""What a tokenizer of transformers returns; only the first two say anything about a text."""


def read_prompts(
    prompts: object,
    *,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    max_tokens: int | None,
    attention_mask: object = None,
    pad_token: int | None = None,
    end_tokens: Sequence[int] = (),
) -> list[list[int]]:
    """Token ids of every prompt, without padding.

    prompts: a text, a list of ids or a whole-number tensor [tokens] is one prompt; a list of those, or a tensor
    [prompts, tokens], are several; so is what a tokenizer of transformers returns, a mapping with input_ids and
    attention_mask. Texts need a tokenizer (anything with `encode`). attention_mask: 1 = text, 0 = padding, in the
    shape of the ids; padding stands before or behind a text. max_tokens: the most that the model reads (None = no limit
    is known). UsageError for a prompt that is empty, longer than that, holds an id outside of the vocabulary, or is of
    another type.
    """
    if isinstance(prompts, Mapping):
        prompts, attention_mask = _of_tokenizer(prompts, attention_mask)
    several = _several(prompts)
    if not several:
        raise UsageError("there are no prompts", limit="at least one is needed", remedy='pass ["..."] or [[1, 2, 3]]')
    ids = [_ids(index, one, tokenizer) for index, one in enumerate(several)]
    if attention_mask is not None:
        ids = _unmasked(ids, attention_mask)
    elif _may_be_padded(prompts, several, ids, pad_token):
        assert pad_token is not None
        ids = _without_pads(ids, pad_token, end_tokens)
    return [_checked(index, one, vocabulary, max_tokens) for index, one in enumerate(ids)]


def _of_tokenizer(found: Mapping[str, object], mask: object) -> tuple[object, object]:
    if "input_ids" not in found:
        what = f"the prompts are a mapping with {', '.join(map(repr, found)) or 'nothing'}"
        raise UsageError(what, limit="it needs input_ids, as a tokenizer returns them")
    others = [name for name in found if name not in _OF_A_TOKENIZER]
    if others:
        what = f"the prompts hold {others[0]!r}"
        limit = "generation here reads input_ids and attention_mask"
        raise UsageError(what, limit=limit, remedy=f"leave {others[0]!r} out, or use the model's own generate()")
    return found["input_ids"], found.get("attention_mask") if mask is None else mask


def _several(prompts: object) -> list[object]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, torch.Tensor) and prompts.dim() > 0:
        return [prompts] if prompts.dim() == 1 else list(prompts)
    number = getattr(prompts, "ndim", 1) == 0  # a tensor or array with the methods of an iterable
    if number or not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise _wrong_type("the prompts are", prompts)
    held = list(prompts)
    alone = held and all(_is_id(one) for one in held)
    return [held] if alone else held


def _is_id(value: object) -> bool:
    return whole_number(value) is not None and (not isinstance(value, torch.Tensor) or value.dim() == 0)


def _ids(index: int, prompt: object, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            limit = "without a tokenizer a prompt is a list of token ids"
            raise UsageError(f"prompt {index} is a text", limit=limit, remedy="pass tokenizer=...")
        return encode_of(tokenizer)(prompt)
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype is torch.bool:
            what = f"prompt {index} is {prompt.dtype} {list(prompt.shape)}"
            raise UsageError(what, limit="token ids are whole numbers [tokens]", remedy="pass a tokenizer's input_ids")
        return [int(one) for one in prompt.tolist()]
    if not _is_row(prompt) or not all(_is_id(one) and not isinstance(one, bool) for one in prompt):
        raise _wrong_type(f"prompt {index} is", prompt, _first_that_is_no_id(prompt))
    return [number for one in prompt if (number := whole_number(one)) is not None]


def _first_that_is_no_id(prompt: object) -> str:
    if not _is_row(prompt):
        return ""
    place, one = next((i, one) for i, one in enumerate(prompt) if not _is_id(one) or isinstance(one, bool))
    return f"its entry {place} is {described(one)}, and token ids are whole numbers"


def _is_row(prompt: object) -> TypeGuard[Sequence[object]]:
    """A list, a tuple, or an array of numpy; bytes are no token ids."""
    if isinstance(prompt, bytes | bytearray):
        return False
    return isinstance(prompt, Sequence) or (hasattr(prompt, "__array__") and getattr(prompt, "ndim", 0) == 1)


def _unmasked(ids: list[list[int]], mask: object) -> list[list[int]]:
    rows = mask.tolist() if hasattr(mask, "tolist") else mask
    if isinstance(rows, Sequence) and rows and all(_is_id(one) for one in rows):
        rows = [rows]
    if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) for row in rows):
        raise UsageError(f"attention_mask is of type {type(mask).__name__}", limit="it is 1 or 0 for each token")
    shapes = [len(row) for row in rows], [len(one) for one in ids]
    if shapes[0] != shapes[1]:
        what = f"attention_mask has rows of {shapes[0]} tokens"
        limit = f"the prompts have {shapes[1]}"
        raise UsageError(what, limit=limit, remedy="pass the mask that the tokenizer returned")
    return [_kept(index, one, row) for index, (one, row) in enumerate(zip(ids, rows, strict=True))]


def _kept(index: int, ids: list[int], mask: Sequence[int]) -> list[int]:
    places = [place for place, one in enumerate(mask) if one == 1]
    wrong = [one for one in mask if one not in (0, 1)]
    if wrong:
        what = f"the attention_mask of prompt {index} holds {wrong[0]!r}"
        raise UsageError(what, limit="it is 1 or 0 for each token")
    if not places:
        raise UsageError(f"prompt {index} is all padding", limit="a prompt needs at least one token")
    if places[-1] - places[0] + 1 != len(places):
        gap = next(place for place in range(places[0], places[-1]) if place not in places)
        what = f"the attention_mask of prompt {index} is 0 at place {gap}, within the text"
        raise UsageError(what, limit="padding stands before or behind a text", remedy="use the model's own generate()")
    return ids[places[0] : places[-1] + 1]


def _may_be_padded(prompts: object, several: Sequence[object], ids: list[list[int]], pad_token: int | None) -> bool:
    """Ids of equal lengths: ragged ones, and texts, are not padded."""
    if pad_token is None or len({len(one) for one in ids}) != 1 or any(isinstance(one, str) for one in several):
        return False
    return isinstance(prompts, torch.Tensor) or len(ids) > 1


def _without_pads(ids: list[list[int]], pad: int, ends: Sequence[int]) -> list[list[int]]:
    before = [_leading(one, pad) for one in ids]
    behind = [_leading(one[::-1], pad) for one in ids]
    if pad not in ends:
        for index, (one, count) in enumerate(zip(ids, before, strict=True)):
            if count == len(one):
                limit = f"token {pad} is the model's padding; a prompt needs at least one token"
                raise UsageError(f"prompt {index} is all padding", limit=limit, remedy="pass attention_mask=...")
        return [one[first : len(one) - last] for one, first, last in zip(ids, before, behind, strict=True)]
    if len(ids) > 1 and (any(behind) or len(set(before)) > 1 or max(before) > 1):
        index = next(place for place, counts in enumerate(zip(before, behind, strict=True)) if max(counts))
        what = f"prompt {index} begins or ends with token {pad}, which pads and also ends texts"
        limit = "only an attention mask says which of the two it is"
        raise UsageError(what, limit=limit, remedy="pass attention_mask=..., or the prompts without padding as lists")
    return ids


def _leading(ids: Sequence[int], pad: int) -> int:
    return next((place for place, one in enumerate(ids) if one != pad), len(ids))


def _checked(index: int, ids: list[int], vocabulary: int, most: int | None) -> list[int]:
    if not ids:
        remedy = "begin with the model's first token (often called bos)"
        raise UsageError(f"prompt {index} is empty", limit="a prompt needs at least one token", remedy=remedy)
    if most is not None and len(ids) > most:
        limit = f"the model reads prompts of at most {most} tokens"
        raise UsageError(f"prompt {index} has {len(ids)} tokens", limit=limit, remedy="truncate it on the left")
    for place, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            what = f"prompt {index} holds token {token} at place {place}"
            limit = f"the model's ids are 0 to {vocabulary - 1}"
            raise UsageError(what, limit=limit, remedy="use the tokenizer that belongs to the model")
    return ids


def _wrong_type(subject: str, value: object, why: str = "") -> UsageError:
    kinds = "a text, a list of token ids or a whole-number tensor"
    return UsageError(f"{subject} of type {type(value).__name__}", limit=f"a prompt is {kinds}", remedy=why)
