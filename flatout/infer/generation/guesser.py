"""Speculative decoding: one pass over each text's last token and guesses (speculation.py has the proof).

Guesses come from the text itself, or from a draft model with a cache of its own. How many are tried, and whether any,
depends on their cost and acceptance so far, so that unpredictable text is not slowed down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flatout.infer.generation.batch_run import Passes, Text
from flatout.infer.generation.cache import Span
from flatout.infer.generation.native_decoder import NativePasses
from flatout.infer.generation.sampling import next_tokens, no_usable_logits, probabilities, unusable
from flatout.infer.generation.speculation import Lookup, accept, accept_equal
from flatout.infer.generation.throttle import Throttle
from flatout.infer.generation.token_choice import Choice, place_of
from flatout.infer.generation.torch_decoder import TorchPasses


class Guesser:
    """Of one run. draft: None = look for the guess in the text so far."""

    def __init__(self, choice: Choice, draft: NativePasses | TorchPasses | None) -> None:
        self._choice, self._sampling, self._draft = choice, choice.sampling, draft
        self._throttle = Throttle()
        self._lookups: dict[int, Lookup] = {}
        self._looked_up: dict[int, int] = {}
        """Text -> how many of its tokens its lookup knows."""
        self._drafted: dict[int, int] = {}
        """Text -> how many of its tokens the draft's cache holds."""
        self._room: list[int] = []
        """Guesses that each text may have in the pass to come."""
        self._looked: list[list[int]] = []
        self._began = 0.0
        self.proposed = self.accepted = 0

    def finds_guesses(self, texts: Sequence[Text]) -> bool:
        """Whether the next pass should try guesses, and there are any: else a plain pass is cheaper."""
        self._began = time.perf_counter()
        size = self._throttle.choose()
        self._room = [min(size, text.limit - len(text.made) - 1) for text in texts]
        if max(self._room) < 1:
            return False
        if self._draft is not None:
            return True
        self._looked = self._lookups_of(texts, self._room)
        return any(self._looked)

    def note_plain_pass(self, texts: int, seconds: float) -> None:
        """A pass without guesses over this many texts took `seconds`."""
        self._throttle.observe(0, [0] * texts, seconds)

    def advance(self, engine: Passes, texts: Sequence[Text]) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """One pass, where guesses were found: new tokens of each text, and the spans (start, length) that were read."""
        guesses, chances = self._drafts(texts, self._room) if self._draft else (self._looked, None)
        spans = [
            Span(slot=text.slot, start=text.length - 1, length=1 + len(guess))
            for text, guess in zip(texts, guesses, strict=True)
        ]
        read = [token for text, guess in zip(texts, guesses, strict=True) for token in (text.made[-1], *guess)]
        logits = engine.advance(torch.tensor(read, device=engine.device), spans, every=True)
        found, counts = self._judged(self._adjusted(logits, texts, guesses), texts, guesses, chances)
        self._note(texts, guesses, counts)
        self._throttle.observe(max(map(len, guesses)), counts, time.perf_counter() - self._began)
        return found, [(span.start, span.length) for span in spans]

    # guesses

    def _lookups_of(self, texts: Sequence[Text], room: Sequence[int]) -> list[list[int]]:
        guesses = []
        for text, limit in zip(texts, room, strict=True):
            lookup = self._lookups.setdefault(text.index, Lookup())
            known = self._looked_up.get(text.index, 0)
            lookup.extend(text.tokens[known:])
            self._looked_up[text.index] = text.length
            guesses.append(lookup.propose(limit) if limit > 0 else [])
        return guesses

    def _drafts(self, texts: Sequence[Text], room: Sequence[int]) -> tuple[list[list[int]], list[Tensor] | None]:
        """Guesses of the draft, and for sampling what each was drawn from: fp32 [guesses, vocabulary] of each text."""
        assert self._draft is not None
        longest = min(self._draft.cache.length, self._draft.decoder.max_tokens)  # the cache is rounded up
        guesses: list[list[int]] = [[] for _ in texts]
        drawn_from: list[list[Tensor]] = [[] for _ in texts]
        for step in range(max(room)):
            here = [index for index, text in enumerate(texts) if step < room[index] and text.length + step < longest]
            if not here:
                break
            fed, spans = [], []
            for index in here:
                text, start = texts[index], self._drafted.get(texts[index].index, 0)
                fresh = [guesses[index][-1]] if step else text.tokens[start:]
                start = text.length + step - 1 if step else start
                spans.append(Span(slot=text.slot, start=start, length=len(fresh)))
                fed += fresh
            logits = self._draft.advance(torch.tensor(fed, device=self._draft.device), spans)
            probs = None if self._sampling.greedy else probabilities(logits, self._sampling)
            uniforms = None
            if probs is not None:
                uniforms = torch.stack([texts[index].uniform("proposals", step) for index in here]).to(logits.device)
            tokens = next_tokens(logits, self._sampling, uniforms).tolist()
            for row, index in enumerate(here):
                guesses[index].append(tokens[row])
                if probs is not None:
                    drawn_from[index].append(probs[row])
        for text, guess in zip(texts, guesses, strict=True):
            if guess:
                self._drafted[text.index] = text.length + len(guess) - 1
        if self._sampling.greedy:
            return guesses, None
        return guesses, [torch.stack(one) if one else torch.empty(0, device=self._draft.device) for one in drawn_from]

    # judgement

    def _adjusted(self, logits: Tensor, texts: Sequence[Text], guesses: Sequence[Sequence[int]]) -> Tensor:
        if not self._choice.looks_back:
            return logits
        rows = [
            (text, [*text.tokens, *guess[:count]])
            for text, guess in zip(texts, guesses, strict=True)
            for count in range(len(guess) + 1)
        ]
        prompts, limits = [len(text.prompt) for text, _ in rows], [text.limit for text, _ in rows]
        place = place_of([history for _, history in rows], prompts, limits, device=logits.device)
        return self._choice.adjusted(logits, place)

    def _judged(
        self, logits: Tensor, texts: Sequence[Text], guesses: Sequence[Sequence[int]], chances: list[Tensor] | None
    ) -> tuple[list[list[int]], list[int]]:
        """New tokens of each text, and how many of them were guessed."""
        found, counts = [], []
        ends = list(accumulate(len(guess) + 1 for guess in guesses))
        for index, (text, guess) in enumerate(zip(texts, guesses, strict=True)):
            rows = logits[ends[index] - len(guess) - 1 : ends[index]]
            proposed = torch.tensor(guess, dtype=torch.int64, device=rows.device)
            draws = None
            if not self._sampling.greedy:
                draws = torch.stack([text.uniform("draws", step) for step in range(len(rows))]).to(rows.device)
            if chances is None or not guess:
                count, last = accept_equal(next_tokens(rows, self._sampling, draws), proposed)
            else:
                assert draws is not None
                judges = [text.uniform("acceptances", step) for step in range(len(guess))]
                count, last = accept(
                    probabilities(rows, self._sampling),
                    proposed,
                    chances[index].to(rows.device),
                    draws=draws,
                    acceptances=torch.stack(judges).to(rows.device),
                )
            bad = unusable(rows[: int(count) + 1]).tolist()  # a row behind a wrong guess may be what it likes
            if any(bad):
                raise no_usable_logits(text.index, len(text.made) + bad.index(True))
            counts.append(int(count))
            found.append([*guess[: int(count)], int(last)])
        return found, counts

    def _note(self, texts: Sequence[Text], guesses: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self.proposed += sum(map(len, guesses))
        self.accepted += sum(counts)
        if self._draft is not None:
            for text, guess, count in zip(texts, guesses, counts, strict=True):
                if guess:  # what was read behind the first wrong guess is overwritten later
                    self._drafted[text.index] = text.length + min(count, len(guess) - 1)
