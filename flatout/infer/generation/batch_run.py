"""Continuous batching: each free slot takes the next prompt, so that no prompt waits for the longest text.

Tokens stay on the device for several passes at a time (one on a CPU, where reading them is free); then the host checks
for end tokens and stops, and yields what was generated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.infer.generation.cache import CachedPasses, Span
from flatout.infer.generation.generated import Piece, Reason
from flatout.infer.generation.sampling import Uniforms, Use, no_usable_logits
from flatout.infer.generation.stepping import StatePasses
from flatout.infer.generation.stopping import Watch
from flatout.infer.generation.token_choice import Choice, Rows, place_of
from flatout.infer.generation.whole_texts import WholeTextPasses

if TYPE_CHECKING:
    from flatout.infer.generation.speculation import Guesser

Passes = CachedPasses | WholeTextPasses | StatePasses
"""What runs passes over a cache, states or texts of one run's own. `note`: what it found out about the model."""
PASSES_BETWEEN_LOOKS = 16
"""On a GPU: each look synchronises. Tokens past the end of a text are discarded."""


@dataclass(kw_only=True)
class Text:
    """One prompt and what was generated for it."""

    index: int
    prompt: list[int]
    """What it goes on from; of an encoder-decoder the decoder's first token."""
    source: list[int] | None = None
    """What an encoder reads before it begins."""
    limit: int
    """The most tokens to generate."""
    at_limit: Reason
    """What it is called when that ends it."""
    watch: Watch
    uniforms: Uniforms | None
    """Of this prompt alone; None for greedy."""
    slot: int = -1
    made: list[int] = field(default_factory=list)
    given: int = 0
    """Tokens that were yielded in pieces."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.made]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.made)

    @property
    def reason(self) -> Reason | None:
        """Why it ended; None: it goes on."""
        ending = self.watch.ending
        if ending is None:
            return None
        return self.at_limit if ending.reason == "length" else ending.reason

    def uniform(self, use: Use, step: int) -> Tensor:
        """fp64 []: the number for `use` at the token `step` after the next one; the last again past the limit."""
        assert self.uniforms is not None, "a greedy text needs none"
        place = min(len(self.made) + step, self.limit - 1)
        return self.uniforms.numbers(use, place + 1)[place]

    def add(self, tokens: Sequence[int]) -> None:
        """Takes tokens until one ends the text."""
        for token in tokens:
            self.made.append(token)
            if self.watch.feed(token):
                return


class BatchRun:
    """One call of generate: `pieces` runs it. check: called before each pass; raises where going on would be wrong."""

    def __init__(
        self, engine: Passes, choice: Choice, texts: Sequence[Text], guesser: Guesser | None, check: Callable[[], None]
    ) -> None:
        self.engine, self.choice, self.guesser, self._check = engine, choice, guesser, check
        self._waiting = deque(texts)
        self._free = list(range(min(engine.slots, len(texts))))[::-1]
        self._active: list[Text] = []
        self.reading, self.writing = engine.work(), engine.work()
        self.passes = 0

    def pieces(self) -> Iterator[Piece]:
        """What the texts gained, as it becomes certain; each text's last piece has its reason."""
        while self._waiting or self._active:
            self._check()
            if self._waiting and self._free:
                yield from self._admit()
            elif self.guesser is not None and self.guesser.finds_guesses(self._active):
                yield from self._guess_ahead()
            else:
                yield from self._advance()

    # inside

    def _admit(self) -> Iterator[Piece]:
        """Read the prompts that free slots can take, all in one pass, and choose their first tokens."""
        fresh = []
        while self._waiting and self._free:
            text = self._waiting.popleft()
            text.slot = self._free.pop()
            fresh.append(text)
        began = time.perf_counter()
        if isinstance(self.engine, StatePasses) and fresh[0].source is not None:
            self.engine.encode([text.slot for text in fresh], [text.source or [] for text in fresh])
        tokens = torch.tensor([token for text in fresh for token in text.prompt], device=self.engine.device)
        spans = [Span(slot=text.slot, start=0, length=len(text.prompt)) for text in fresh]
        logits = self.engine.advance(tokens, spans)
        chosen, unusable = self._rows(fresh, 1).choose(logits)
        firsts = self._to_host([chosen], [unusable], fresh)
        self.reading.add([(0, span.length) for span in spans], len(fresh), time.perf_counter() - began)
        self._active += fresh
        yield from self._hand_on(fresh, firsts)

    def _advance(self) -> Iterator[Piece]:
        """Some passes of one token for every active text, then a look."""
        texts = list(self._active)
        count = 1 if self.engine.device.type == "cpu" else PASSES_BETWEEN_LOOKS
        count = min(count, *(text.limit - len(text.made) for text in texts))
        began = time.perf_counter()
        rows = self._rows(texts, count)
        tokens = torch.tensor([text.made[-1] for text in texts], device=self.engine.device)
        starts = [text.length - 1 for text in texts]
        chosen, unusable = [], []
        for step in range(count):
            spans = [Span(slot=text.slot, start=start + step) for text, start in zip(texts, starts, strict=True)]
            tokens, bad = rows.choose(self.engine.advance(tokens, spans))
            chosen.append(tokens)
            unusable.append(bad)
        found = self._to_host(chosen, unusable, texts)
        self.passes += count
        each = (time.perf_counter() - began) / count
        for step in range(count):
            self.writing.add([(start + step, 1) for start in starts], len(texts), each)
            if self.guesser is not None:
                self.guesser.note_plain_pass(len(texts), each)
        yield from self._hand_on(texts, found)

    def _guess_ahead(self) -> Iterator[Piece]:
        """One pass over each text's last token and what was guessed to follow."""
        assert self.guesser is not None
        texts = list(self._active)
        began = time.perf_counter()
        found, spans = self.guesser.advance(self.engine, texts)
        self.passes += 1
        rows = sum(length for _, length in spans)
        self.writing.add(spans, rows, time.perf_counter() - began)
        yield from self._hand_on(texts, found)

    def _rows(self, texts: Sequence[Text], ahead: int) -> Rows:
        device, place = self.engine.device, None
        if self.choice.looks_back:
            prompts, limits = [len(text.prompt) for text in texts], [text.limit for text in texts]
            place = place_of([text.tokens for text in texts], prompts, limits, device=device, ahead=ahead)
        uniforms = [(text.uniforms, len(text.made)) for text in texts if text.uniforms is not None]
        draws = [one.numbers("draws", made + ahead)[made : made + ahead] for one, made in uniforms]
        return Rows(self.choice, place, torch.stack(draws).to(device) if draws else None)

    def _to_host(self, chosen: list[Tensor], unusable: list[Tensor], texts: Sequence[Text]) -> list[list[int]]:
        """The one wait for the device: tokens of each text; NumericsError where logits were of no use."""
        tokens, bad = torch.stack(chosen, 1).tolist(), torch.stack(unusable, 1).tolist()
        for text, row in zip(texts, bad, strict=True):
            if any(row):
                raise no_usable_logits(text.index, len(text.made) + row.index(True))
        return tokens

    def _hand_on(self, texts: Sequence[Text], found: Sequence[Sequence[int]]) -> Iterator[Piece]:
        for text, tokens in zip(texts, found, strict=True):
            text.add(tokens)
            piece = piece_of(text)
            if text.reason is not None:
                self._active.remove(text)
                self._free.append(text.slot)
            if piece is not None:
                yield piece


def piece_of(text: Text) -> Piece | None:
    """What became certain since the last piece; None if that is nothing."""
    string = text.watch.take() if text.watch.makes_text else None
    kept = text.watch.certain_tokens
    tokens = tuple(text.made[text.given : kept])
    text.given = max(text.given, kept)
    if not tokens and not string and text.reason is None:
        return None
    return Piece(prompt=text.index, tokens=tokens, text=string, reason=text.reason)
