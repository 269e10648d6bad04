"""From logits to the next token: penalties, truncation, and a draw that depends on the prompt only.

A sampled text should be the same whether its prompt is alone or in a batch, at any step and on any device. So there is
no stateful generator: the uniform number for generated token `position` of prompt `index`
is a function of (seed, index, position), from a counter-based generator (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", 2011). Nothing here waits for the device.

Logits are [rows, vocabulary] on any device; a row is one position of one prompt.

>>> import torch
>>> sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
>>> uniforms = torch.stack([Uniforms(7, prompt, length=16).numbers("draws", 1)[0] for prompt in range(2)])
>>> next_tokens(torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]), sampling, uniforms)
tensor([1, 0])
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flatout.errors import NumericsError, UsageError
from flatout.infer.generation.token_ids import plain_number

SEEDS = 1 << 63
"""Seeds are below this, as for the rest of Flatout's generators."""

LEAST_TEMPERATURE = 1e-30
"""Divisor in place of a smaller temperature, which fp32 would round to 0; differences of logits are far above."""
GREATEST_TEMPERATURE = 1e30
"""And in place of a greater one, which fp32 would take for infinite: every token that may come is as likely then."""
LEAST_PENALTY, GREATEST_PENALTY = 1e-6, 1e6
"""Beyond them a penalised logit may no longer be a finite number."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The truncations keep the tokens that pass them all."""

    temperature: float = 0.0
    """Logits are divided by it; 0 = greedy, the most probable token."""
    top_k: int | None = None
    """Keep the k most probable, and those that equal the last of them."""
    top_p: float | None = None
    """Keep the most probable that together reach this probability, and those that equal the last of them."""
    min_p: float | None = None
    """Keep tokens at least this share as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen are divided by it where positive, else multiplied; 1 = off."""
    no_repeat_ngram: int | None = None
    """No run of this many tokens comes a second time."""
    seed: int | None = None
    """The text is a function of it; None = a new one each time, which the result reports."""

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain_number(getattr(self, one.name)))
        _check("temperature", self.temperature, low=0, remedy="pass 0 for greedy, or about 0.7 to 1.0 to sample")
        _check("top_k", self.top_k, low=1, whole=True, remedy="leave it out to keep all tokens")
        _check("top_p", self.top_p, low=0, high=1, above=True, remedy="leave it out to keep all tokens")
        _check("min_p", self.min_p, low=0, high=1, remedy="leave it out to keep all tokens")
        remedy = "1.0 is none, 1.1 discourages repetition"
        _check("repetition_penalty", self.repetition_penalty, low=0, above=True, remedy=remedy)
        _check("repetition_penalty", self.repetition_penalty, low=LEAST_PENALTY, high=GREATEST_PENALTY, remedy=remedy)
        _check("no_repeat_ngram", self.no_repeat_ngram, low=1, whole=True, remedy="leave it out to allow repetition")
        _check("seed", self.seed, low=0, high=SEEDS - 1, whole=True, remedy="leave it out for a fresh one")
        given = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.greedy and given:  # a truncation says that its author means to sample: it would be ignored
            what = f"{given[0]} is {getattr(self, given[0])!r} with temperature 0"
            limit = "greedy takes the most probable token, whatever else is kept"
            raise UsageError(what, limit=limit, remedy=f"pass temperature=1.0 to sample, or leave {given[0]} out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """Whether the logits depend on the tokens before, so that `adjusted` needs them."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram is not None


def _check(
    name: str,
    value: object,
    *,
    low: float,
    high: float | None = None,
    above: bool = False,
    whole: bool = False,
    remedy: str,
) -> None:
    """UsageError unless None or a number of the interval; `above` excludes `low` itself."""
    if value is None and name not in ("temperature", "repetition_penalty"):
        return
    noun = "a whole number" if whole else "a number"
    bounds = f"above {low}" if above else f"of at least {low}"
    bounds += f" and at most {high}" if high is not None else ""
    if (
        not isinstance(value, int if whole else int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < low
        or (above and value == low)
        or (high is not None and value > high)
    ):
        raise UsageError(f"{name} is {value!r}", limit=f"it must be {noun} {bounds}", remedy=remedy)


def adjusted(logits: Tensor, sampling: Sampling, history: Tensor, lengths: Tensor) -> Tensor:
    """The logits with tokens seen made less likely and repeated n-grams made impossible (-inf).

    `history` is int64 [rows, columns]: each row's prompt and what was generated so far, from column 0 on. `lengths`
    is int64 [rows]: how many of its columns count; what stands behind them is not looked at. The logits
    given are not written to; with neither penalty nor ban they are returned as they are. The repetition penalty is
    that of Keskar et al., "CTRL" (2019). A ban may leave a row without any token, which `unusable` finds.
    """
    if history.shape[1] == 0 or not sampling.adjusts:
        return logits
    if sampling.repetition_penalty != 1:
        logits = _penalised(logits, sampling.repetition_penalty, history, lengths[:, None])
    if sampling.no_repeat_ngram is not None:
        logits = _without_repeats(logits, sampling.no_repeat_ngram, history, lengths[:, None])
    return logits


def _penalised(logits: Tensor, penalty: float, history: Tensor, lengths: Tensor) -> Tensor:
    columns = torch.arange(history.shape[1], device=history.device)
    # Columns past the length are set to the row's first token: it is penalised anyway, to the same value.
    tokens = torch.where(columns < lengths, history, history[:, :1]).clamp(min=0)
    values = logits.gather(1, tokens)
    penalised = torch.where(values < 0, values * penalty, values / penalty)
    return logits.scatter(1, tokens, torch.where(lengths > 0, penalised, values))


def _without_repeats(logits: Tensor, size: int, history: Tensor, lengths: Tensor) -> Tensor:
    if history.shape[1] < size:
        return logits
    windows = history.unfold(1, size, 1)  # [rows, starts, size]
    starts = torch.arange(windows.shape[1], device=history.device)
    last = (lengths - size + 1 + torch.arange(size - 1, device=history.device)).clamp(min=0)
    prefix = history.gather(1, last)  # [rows, size - 1]: what a further token would complete
    seen = (windows[:, :, : size - 1] == prefix[:, None]).all(-1) & (starts + size <= lengths)
    # The least of a logit and +inf is the logit: where no n-gram would repeat, nothing changes.
    bans = torch.where(seen, -math.inf, math.inf).to(logits.dtype)
    tokens = torch.where(seen, windows[:, :, -1], 0)
    return logits.scatter_reduce(1, tokens, bans, "amin")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What the next token is drawn from: fp32 [rows, vocabulary], each row's sum 1; greedy: 1 for the token taken.

    Temperature, top_k, top_p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019) and min_p (Nguyen
    et al., "Turning Up the Heat", 2024) in this order. Each truncation is a threshold: tokens that equal the last one
    kept are kept too, so that no order among equals, which devices sort differently, decides the text.
    """
    if sampling.greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter(1, greedy_tokens(logits)[:, None], 1.0)
    logits = logits.float()
    # Against the greatest logit first: however low the temperature, exp then never overflows.
    temperature = min(max(sampling.temperature, LEAST_TEMPERATURE), GREATEST_TEMPERATURE)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    probs = torch.softmax(scores, -1)
    thresholds = []
    if sampling.top_p is not None and sampling.top_p < 1:
        thresholds.append(_nucleus(probs, sampling.top_p))
    if sampling.min_p:
        thresholds.append(probs.amax(-1, keepdim=True) * sampling.min_p)
    if not thresholds:
        return probs
    kept = torch.where(probs >= torch.stack(thresholds).amax(0), probs, 0)
    return kept / kept.sum(-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[rows, 1]: the least probability among the most probable tokens that together reach `top_p`."""
    ordered = _descending(probs)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    count = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, count - 1)


def _descending(probs: Tensor) -> Tensor:
    if probs.device.type == "cpu":  # numpy sorts with vector instructions: 81 us against torch's 2.8 ms at 50,257
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    return probs.sort(-1, descending=True).values


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by the inverse of its distribution function: int64 [rows].

    `probs` is [rows, vocabulary], not negative; a row's sum need not be 1. `uniforms` is fp64 [rows] in [0, 1). A token
    of probability 0 is never drawn, nor one beyond the last, whatever the rounding.
    """
    sums = probs.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * sums[:, -1:]
    if probs.device.type == "cpu":
        # A CPU adds from left to right: sums never decrease, stay equal at 0, and the last exceeds u times itself.
        return torch.searchsorted(sums, targets, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)
    return _first_above(sums, targets, probs > 0)


def _first_above(sums: Tensor, targets: Tensor, possible: Tensor) -> Tensor:
    """The first possible token whose sum exceeds the target, else the last possible one.

    A GPU adds in blocks: in the last bits its sums may fall, and rise where the probability is 0.
    """
    above = possible & (sums > targets)
    first = above.to(torch.int8).argmax(-1)
    last = possible.shape[-1] - 1 - possible.flip(-1).to(torch.int8).argmax(-1)
    return torch.where(above.any(-1), first, last)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The most probable token of each row, the lowest of equals; the first NaN, if there is one: int64 [rows]."""
    if logits.device.type == "cpu":  # numpy looks with vector instructions: 2 us against torch's 27 at 50,257
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def next_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> Tensor:
    """int64 [rows], of logits that were `adjusted` if need be. `uniforms`: fp64 [rows], not needed for greedy."""
    if sampling.greedy:
        return greedy_tokens(logits)
    assert uniforms is not None, "sampling needs uniform numbers"
    return draw(probabilities(logits, sampling), uniforms)


Use = Literal["draws", "acceptances", "proposals"]
_USES: dict[Use, int] = {"draws": 0, "acceptances": 1, "proposals": 2}
"""Each has numbers of its own."""
FIRST_NUMBERS = 256


class Uniforms:
    """The uniform numbers in [0, 1) of the prompt with this number among all that the user gave, a table for each use.

    Entry p of a table belongs to the prompt's generated token p. The numbers are those of Philox-4x64-10 with key
    (seed, use) and counter (position, prompt): integer arithmetic, the same with every version of torch and numpy.
    """

    def __init__(self, seed: int, prompt: int, length: int) -> None:
        self._seed, self._prompt, self._length = seed, prompt, length
        self._tables: dict[Use, Tensor] = {}

    def numbers(self, use: Use, stop: int) -> Tensor:
        """fp64 [at least `stop`, but at most the length]: the first ones, as most texts end long before it."""
        known = self._tables.get(use)
        stop = min(stop, self._length)
        if known is None or len(known) < stop:  # twice as many each time: numbers that are made again cost little
            count = min(self._length, max(stop, FIRST_NUMBERS, 0 if known is None else 2 * len(known)))
            # One counter gives 4 numbers, and words 0 and 1 count them; prompts differ in word 2: no two overlap.
            key, counter = [self._seed, _USES[use]], [0, 0, self._prompt, 0]
            made = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
            bits = made.random_raw(count) >> np.uint64(11)  # 53 bits of each
            known = self._tables[use] = torch.from_numpy(bits.astype(np.float64) * 2.0**-53)
        return known


def fresh_seed() -> int:
    """From the operating system: does not advance the user's generators. Short enough to retype."""
    return secrets.randbits(32)


def unusable(logits: Tensor, greatest: Tensor | None = None) -> Tensor:
    """bool [rows]: rows with NaN or +inf, or of -inf alone. Does not wait for the device.

    `greatest`: int64 [rows], where each row is greatest, if that is known (greedy tokens are); else one more pass finds
    it: NaN counts as greater than all.
    """
    places = greedy_tokens(logits) if greatest is None else greatest
    return ~logits.gather(-1, places[..., None])[..., 0].isfinite()


def no_usable_logits(prompt: int, position: int) -> NumericsError:
    """For a row that `unusable` found: which prompt it is of, and which generated token was to come, 0 the first."""
    return NumericsError(
        f"the logits for generated token {position} of prompt {prompt} are NaN, +inf or all -inf",
        limit="a next token needs at least one finite logit, no NaN and no +inf",
        remedy="if fp32 gives finite ones, use precision='fp32'; else look for NaN in the weights, "
        "or loosen no_repeat_ngram, suppress_tokens and bad_words_ids, which may have banned every token",
    )
