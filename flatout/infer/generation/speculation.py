"""Speculative decoding: guess several tokens, verify them all in one pass of the model, keep the correct ones.

One row's decoding reads every weight for a single token, so a pass over k + 1 tokens costs little more than one over
one. Guesses come from the text itself (`Lookup`: what followed the last time) or from a draft, a smaller model with a
cache of its own. The judgement (`accept`) leaves the distribution of the text exactly the model's (Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding", 2023). How many are tried, and whether any, depends on
their cost and acceptance so far (`Throttle`), so that unpredictable text is not slowed down.

>>> lookup = Lookup([5, 6, 7, 8, 5, 6])
>>> lookup.propose(3)
[7, 8, 5]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flatout.infer.generation.batch_run import Passes, Text
from flatout.infer.generation.cache import CachedPasses, Span
from flatout.infer.generation.sampling import draw, next_tokens, no_usable_logits, probabilities, unusable
from flatout.infer.generation.throttle import Throttle
from flatout.infer.generation.token_choice import Choice, place_of

RUNS = (3, 2)
"""Lengths of the runs of latest tokens that are looked for: the first that came before decides."""


class Lookup:
    """Guesses that the text goes on as it did after the last occurrence of its latest tokens.

    A run that reaches into itself is continued with its period, so that a loop is guessed to any length. Time: a few
    dictionary entries a token; memory: one a token and length of run.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # run -> where the text went on after its last occurrence
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Tokens that belong to the text for good: the prompt's, later those accepted."""
        for token in tokens:
            # The run that ends the text is entered once something follows it, so that it does not find itself.
            for size in RUNS:
                if size <= len(self.tokens):
                    self._after[tuple(self.tokens[-size:])] = len(self.tokens)
            self.tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens; none if nothing like the end of the text came before."""
        for size in RUNS:
            start = self._after.get(tuple(self.tokens[-size:]))
            if start is not None:
                known = self.tokens[start : start + limit]
                return (known * -(-limit // len(known)))[:limit]
        return []


def accept_equal(own: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """How many guesses are what the model itself says, and the token after them. Waits for no device.

    `own` is int64 [..., k + 1]: the model's token at each position, by `next_tokens`, greedy or drawn; `proposed` is
    int64 [..., k]. Returns (accepted, next token), int64 [...] each: the text goes on with proposed[:accepted] and the
    next token.

    For guesses made without chance this is exact speculative sampling: a guess x is accepted with probability p(x), as
    min(1, p / q) demands for q = 1 at x, and a token drawn from p that is not x follows max(p - q, 0). And as the token
    comes from p by its own uniform number, the text is identical to the one without guessing, whatever was guessed.
    """
    accepted = (own[..., :-1] == proposed).long().cumprod(-1).sum(-1)
    return accepted, own.gather(-1, accepted[..., None])[..., 0]


def accept(
    target_probs: Tensor, proposed: Tensor, draft_probs: Tensor, *, draws: Tensor, acceptances: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact speculative sampling: how many guesses are accepted, and the token after them. Waits for no device.

    `target_probs` is fp32 [..., k + 1, vocabulary]: what the model would draw from at each position, truncations
    included. `proposed` is int64 [..., k], and `draft_probs` fp32 [..., k, vocabulary] what each guess was drawn from,
    by uniform numbers independent of those here. `draws` is fp64 [..., k + 1] and `acceptances` fp64 [..., k]: the
    numbers from the first guess's position on. Returns (accepted, next token), int64 [...] each.

    A guess x drawn from q is accepted with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw
    from max(p - q, 0), normalised. For the proof see Leviathan et al., appendix A.1.
    """
    tokens = proposed[..., None]
    target = target_probs[..., :-1, :].gather(-1, tokens)[..., 0].double()
    draft = draft_probs.gather(-1, tokens)[..., 0].double()
    accepted = (acceptances * draft < target).long().cumprod(-1).sum(-1)
    # After the last guess nothing was refused: q is 0 there, and the draw is from p.
    refused = torch.cat([draft_probs, torch.zeros_like(target_probs[..., :1, :])], -2)
    at = accepted[..., None, None].expand(*accepted.shape, 1, target_probs.shape[-1])
    wanted = target_probs.gather(-2, at)[..., 0, :]
    rest = (wanted - refused.gather(-2, at)[..., 0, :]).clamp(min=0)
    # p and q equal but for rounding can leave nothing at all; then refusing was rounding too, and p is as good.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    last = draw(rest.reshape(-1, rest.shape[-1]), draws.gather(-1, accepted[..., None]).reshape(-1))
    return accepted, last.view(accepted.shape)


class Guesser:
    """Of one run. draft: None = look for the guess in the text so far."""

    def __init__(self, choice: Choice, draft: CachedPasses | None) -> None:
        self._choice, self._sampling, self._draft = choice, choice.sampling, draft
        self._throttle = Throttle()
        self._lookups: dict[int, Lookup] = {}
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
            lookup.extend(text.tokens[len(lookup.tokens) :])
            guesses.append(lookup.propose(limit) if limit > 0 else [])
        return guesses

    def _drafts(self, texts: Sequence[Text], room: Sequence[int]) -> tuple[list[list[int]], list[list[Tensor]] | None]:
        """Guesses of the draft, and for sampling what each was drawn from: fp32 [vocabulary] each."""
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
        return guesses, None if self._sampling.greedy else drawn_from

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
        self,
        logits: Tensor,
        texts: Sequence[Text],
        guesses: Sequence[Sequence[int]],
        chances: list[list[Tensor]] | None,
    ) -> tuple[list[list[int]], list[int]]:
        """New tokens of each text, and how many of them were guessed."""
        found, counts = [], []
        parts = logits.split([len(guess) + 1 for guess in guesses])
        for index, (text, guess, rows) in enumerate(zip(texts, guesses, parts, strict=True)):
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
                    torch.stack(chances[index]).to(rows.device),
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
