"""How the tokens of a pass are chosen: the rules of a text, then sampling.

The rules (tokens that may not come, or must, at certain places) are what transformers' generation_config calls
suppressed, bad and forced tokens and least lengths, applied in its order: after penalties and before temperature.

Everything is computed from where each row stands, on the device: nothing waits for it.

>>> import torch
>>> rules = TokenRules(suppress_tokens=(1,)).with_ends((2,))
>>> two, four = torch.tensor([2]), torch.tensor([4])
>>> place = Place(history=torch.tensor([[0, 0]]), lengths=two, prompts=two, limits=four)
>>> rules.applied(torch.zeros(1, 3), place).tolist()
[[0.0, -inf, 0.0]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.infer.generation.sampling import Sampling, adjusted, next_tokens, unusable
from flatout.infer.generation.token_ids import plain_number, whole_number


@dataclass(frozen=True, kw_only=True)
class Place:
    """The places in their texts that rows of logits belong to."""

    history: Tensor
    """int64 [rows, columns]: prompt and text so far, from column 0 on."""
    lengths: Tensor
    """int64 [rows]: columns that count."""
    prompts: Tensor
    """int64 [rows]: columns of the prompt."""
    limits: Tensor
    """int64 [rows]: the most tokens that are generated after it."""

    def after(self, tokens: Tensor) -> Place:
        """One token further. `history` has room for it, and is written to."""
        self.history.scatter_(1, self.lengths[:, None], tokens[:, None])
        return replace(self, lengths=self.lengths + 1)


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Names and meaning are those of transformers' generation_config."""

    min_new_tokens: int | None = None
    """No end token before this many new tokens."""
    min_length: int | None = None
    """No end token before this many tokens, prompt included; ignored if min_new_tokens is set."""
    suppress_tokens: Sequence[int] = ()
    """Never generated."""
    begin_suppress_tokens: Sequence[int] = ()
    """Not the first generated one."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Runs of tokens that are never completed."""
    forced_bos_token_id: int | None = None
    """The token after a prompt of one token."""
    forced_eos_token_id: int | Sequence[int] | None = None
    """The last token that the length allows."""
    ends: tuple[int, ...] = field(default=(), init=False)
    """End tokens of the model: see `with_ends`."""

    def __post_init__(self) -> None:
        for name in ("min_new_tokens", "min_length"):
            value = plain_number(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise UsageError(f"{name} is {value!r}", limit="it is a whole number of at least 0")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        words = self.bad_words_ids
        words = words.tolist() if isinstance(words, np.ndarray | Tensor) else words or ()
        if not isinstance(words, list | tuple):
            raise UsageError(f"bad_words_ids is {words!r}", limit="it is a list of lists of token ids")
        object.__setattr__(self, "bad_words_ids", tuple(_ids("bad_words_ids", one) for one in words))
        if not all(self.bad_words_ids):
            raise UsageError("bad_words_ids holds an empty list", limit="every text contains it", remedy="leave it out")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else _ids(name, value))

    def with_ends(self, ends: Iterable[int]) -> TokenRules:
        """The same for a model with these end tokens; single end tokens among the bad words are no such."""
        ends = tuple(ends)
        words = tuple(one for one in self.bad_words_ids if len(one) > 1 or one[0] not in ends)
        made = replace(self, bad_words_ids=words)
        object.__setattr__(made, "ends", ends)
        return made

    def check(self, vocabulary: int) -> None:
        """UsageError for a token that the model does not have."""
        for one in fields(self):
            value = getattr(self, one.name)
            for token in _flat(value) if one.name not in ("min_new_tokens", "min_length", "ends") else ():
                if token >= vocabulary:
                    limit = f"the model's ids are 0 to {vocabulary - 1}"
                    raise UsageError(f"{one.name} holds token {token}", limit=limit, remedy="leave it out")

    @property
    def any(self) -> bool:
        """Whether any rule can change logits."""
        least = bool(self.ends) and bool(self.min_new_tokens or self.min_length)
        forced = self.forced_bos_token_id is not None or self.forced_eos_token_id is not None
        return least or forced or bool(self.suppress_tokens or self.begin_suppress_tokens or self.bad_words_ids)

    def applied(self, logits: Tensor, place: Place) -> Tensor:
        """fp32 [rows, vocabulary] with -inf where a token may not come; the logits given are not written to."""
        made = place.lengths - place.prompts
        for length in sorted({len(word) for word in self.bad_words_ids}):
            logits = _without_words(logits, [word for word in self.bad_words_ids if len(word) == length], place)
        if self.ends and (self.min_new_tokens or self.min_length):
            early = place.lengths < (self.min_length or 0)
            early = made < self.min_new_tokens if self.min_new_tokens is not None else early
            logits = _banned(logits, early, self.ends)
        if self.forced_bos_token_id is not None:
            logits = _forced(logits, place.lengths == 1, _flat(self.forced_bos_token_id))
        if self.forced_eos_token_id is not None:
            logits = _forced(logits, made == place.limits - 1, _flat(self.forced_eos_token_id))
        if self.suppress_tokens:
            logits = _banned(logits, torch.ones_like(made, dtype=torch.bool), self.suppress_tokens)
        if self.begin_suppress_tokens:
            first = torch.zeros_like(made)
            if self.forced_bos_token_id is not None:  # it comes first then, and the rule is for what follows it
                first = (place.prompts == 1).to(made.dtype)
            logits = _banned(logits, made == first, self.begin_suppress_tokens)
        return logits


def _banned(logits: Tensor, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """-inf for these tokens in these rows, bool [rows]."""
    where = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    where[list(tokens)] = True
    return logits.masked_fill(rows[:, None] & where, -math.inf)


def _forced(logits: Tensor, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """0 for these tokens in these rows and -inf for all others."""
    only = torch.full_like(logits[:1], -math.inf)
    only[:, list(tokens)] = 0.0
    return torch.where(rows[:, None], only, logits)


def _without_words(logits: Tensor, words: Sequence[Sequence[int]], place: Place) -> Tensor:
    """-inf for the last token of each of these words, all of one length, where a text ends in the others."""
    known = torch.tensor(words, device=logits.device)  # [words, length]
    before = known.shape[1] - 1
    places = place.lengths[:, None] - before + torch.arange(before, device=logits.device)
    ends = place.history.gather(1, places.clamp(min=0))  # [rows, length - 1]
    matches = (ends[:, None] == known[:, :-1]).all(-1) & (place.lengths >= before)[:, None]  # [rows, words]
    # The least of a logit and +inf is the logit: where no word would be completed, nothing changes.
    bans = torch.where(matches, -math.inf, math.inf).to(logits.dtype)
    return logits.scatter_reduce(1, known[:, -1].expand(len(logits), -1), bans, "amin")


def _ids(name: str, value: object) -> tuple[int, ...]:
    """One id or several as a tuple."""
    if value is None:
        return ()
    ids = []
    for one in value if isinstance(value, Iterable) else [value]:
        token = whole_number(one)
        if token is None:
            raise UsageError(f"{name} is {value!r}", limit="it holds token ids, whole numbers")
        if token < 0:
            raise UsageError(f"{name} is {value!r}", limit="token ids are not negative")
        ids.append(token)
    return tuple(ids)


def _flat(value: object) -> list[int]:
    """The ids of a field, which `_ids` made a tuple of."""
    if not isinstance(value, tuple):
        return []
    return [token for one in value for token in (one if isinstance(one, tuple) else (one,))]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How next tokens are chosen, the same for all texts of a run."""

    sampling: Sampling
    rules: TokenRules

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on more than the logits, so that `adjusted` needs to know the texts."""
        return self.sampling.adjusts or self.rules.any

    def adjusted(self, logits: Tensor, place: Place) -> Tensor:
        """The logits that the choice is made from; see `sampling.adjusted` and `TokenRules`."""
        logits = adjusted(logits, self.sampling, place.history, place.lengths)
        return self.rules.applied(logits, place) if self.rules.any else logits


def place_of(
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    limits: Sequence[int],
    *,
    device: torch.device,
    ahead: int = 0,
) -> Place:
    """Of rows with these texts so far, prompts of so many tokens and limits, with room for `ahead` more tokens."""
    width = max(len(text) for text in texts) + ahead
    padded = [[*text, *([0] * (width - len(text)))] for text in texts]
    numbers = [[len(text) for text in texts], prompts, limits]
    lengths, of_prompts, of_limits = (torch.tensor(one, device=device) for one in numbers)
    history = torch.tensor(padded, device=device)
    return Place(history=history, lengths=lengths, prompts=of_prompts, limits=of_limits)


class Rows:
    """The sequences of some passes on the device: chooses their next tokens without asking the host.

    A new one is made whenever the sequences change. place: where the rows stand, if the choice looks back. draws: fp64
    [rows, passes], their uniform numbers; None for greedy.
    """

    def __init__(self, choice: Choice, place: Place | None, draws: Tensor | None) -> None:
        self._choice, self._place, self._draws = choice, place, draws
        self._step = 0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [rows, vocabulary] -> the next tokens, int64 [rows], and which rows' logits could not be used, bool."""
        sampling = self._choice.sampling
        if self._place is not None:
            logits = self._choice.adjusted(logits, self._place)
        uniforms = None if self._draws is None else self._draws[:, self._step]
        tokens = next_tokens(logits, sampling, uniforms)
        if self._place is not None:
            self._place = self._place.after(tokens)
        self._step += 1
        return tokens, unusable(logits, tokens if sampling.greedy else None)
