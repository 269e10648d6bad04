"""Where a generated text ends: an end-of-text token, a stop given by the user, or the limit on its length.

Stops are token ids, sequences of ids and texts. A text may begin in the middle of one token and end in the middle of
another, so texts are matched by character. The stop that is completed first wins; of several completed by the same
character (or token), the longest. All stops of a kind are matched at once by an Aho-Corasick automaton ("Efficient
string matching", 1975), one step per token or character. Its depth is also the length of what may turn out to be part
of a stop, which a stream must hold back.

>>> stops = stops_from([[1, 1, 2]], eos=[0])
>>> watch = Watch(stops, limit=10)
>>> [watch.feed(token) for token in (7, 1, 1, 1, 2)]
[False, False, False, False, True]
>>> watch.ending
Ending(reason='stop', tokens=2, generated=5, characters=None)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from flatout.errors import UsageError
from flatout.infer.generation.detokenising import Decode, Detokeniser
from flatout.infer.generation.token_ids import whole_number

Reason = Literal["eos", "stop", "length"]
S = TypeVar("S", bound=Sized)


class Automaton:
    """Finds the first place where any of several patterns is complete. Symbols are anything hashable."""

    def __init__(self, patterns: Iterable[Sequence[Hashable]]) -> None:
        self._next: list[dict[Hashable, int]] = [{}]
        self._shorter = [0]  # node -> that of the longest shorter suffix that begins a pattern
        self.depth = [0]
        """Of each node: how many of the last symbols begin a pattern."""
        self.complete = [0]
        """Of each node: the length of the longest pattern that the last symbols complete; 0 = none."""
        for pattern in patterns:
            self._add(pattern)
        self._link()

    def step(self, node: int, symbol: Hashable) -> int:
        """The node after `symbol`; the first is node 0."""
        while (after := self._next[node].get(symbol)) is None:
            if node == 0:
                return 0
            node = self._shorter[node]
        return after

    def _add(self, pattern: Sequence[Hashable]) -> None:
        node = 0
        for symbol in pattern:
            if symbol not in self._next[node]:
                self._next[node][symbol] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[node] + 1)
                self.complete.append(0)
            node = self._next[node][symbol]
        self.complete[node] = len(pattern)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())  # shallow nodes first: a link leads to a shallower one
        while waiting:
            node = waiting.popleft()
            for symbol, child in self._next[node].items():
                self._shorter[child] = self.step(self._shorter[node], symbol)
                self.complete[child] = self.complete[child] or self.complete[self._shorter[child]]
                waiting.append(child)


@dataclass(frozen=True, kw_only=True)
class Stops:
    """What ends a text, the same for all prompts; made by `stops_from`."""

    eos: frozenset[int] = frozenset()
    token_ids: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    decode: Decode | None = None
    in_tokens: Automaton = field(init=False, repr=False, compare=False)
    in_text: Automaton = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.texts and self.decode is None:
            raise UsageError(
                f"stop text {self.texts[0]!r} without a tokenizer",
                limit="a text is looked for in the text of the tokens",
                remedy="pass a tokenizer, or give the stop as token ids",
            )
        object.__setattr__(self, "in_tokens", Automaton(self.sequences))
        object.__setattr__(self, "in_text", Automaton(self.texts))


def stops_from(
    stop: object = None, eos: Sequence[int] = (), decode: Decode | None = None, *, vocabulary: int | None = None
) -> Stops:
    """The stops that the user names.

    `stop` is a token id, a text, or a list; of a list each element is a stop: an id, a text or a list of ids (a
    sequence). `eos` are the model's end-of-text ids. Raises UsageError for any other type, for empty stops, and for ids
    not below `vocabulary`.
    """
    ids, sequences, texts = [], [], []
    for one in stop if isinstance(stop, list | tuple) else [] if stop is None else [stop]:
        if isinstance(one, str):
            texts.append(_not_empty(one, stop))
        elif isinstance(one, list | tuple):
            sequences.append(tuple(_token(part, stop, vocabulary) for part in _not_empty(one, stop)))
        else:
            ids.append(_token(one, stop, vocabulary))
    return Stops(
        eos=frozenset(eos),
        token_ids=frozenset(ids),
        sequences=tuple(dict.fromkeys(sequences)),
        texts=tuple(dict.fromkeys(texts)),
        decode=decode,
    )


def _not_empty(one: S, stop: object) -> S:
    if not one:
        what = f"stop {stop!r} holds an empty {type(one).__name__}"
        raise UsageError(what, limit="every text contains it", remedy="leave it out, or put a character or token in")
    return one


def _token(value: object, stop: object, vocabulary: int | None) -> int:
    """A token id, numpy's integers included."""
    token = None if isinstance(value, bool) else whole_number(value)
    if token is None:
        what = f"stop is {stop!r}: {value!r} is of type {type(value).__name__}"
        limit = "it must be a token id, a text, or a list of ids, texts or lists of ids"
        remedy = "pass stop=[...] with those; tensors and arrays as lists, by tolist()"
        raise UsageError(what, limit=limit, remedy=remedy)
    if token < 0 or (vocabulary is not None and token >= vocabulary):
        limit = f"token ids are 0 to {vocabulary - 1}" if vocabulary is not None else "token ids are not negative"
        raise UsageError(f"stop token {token}", limit=limit, remedy="pass an id of this model's vocabulary")
    return token


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why and where a text ended."""

    reason: Reason
    tokens: int
    """Generated tokens to keep: those before the stop (a token that holds part of a stop text is not kept)."""
    generated: int
    """All that were generated, the stop's included; what follows it was not looked at."""
    characters: int | None
    """Characters of the text to keep, which may end within a token; None where no text was made."""


class Watch:
    """One prompt's text as it grows. Feed its generated tokens until one ends it.

    Where the stops have a `decode` the text is made too, and `take` returns what of it is final: no partial character,
    and nothing that may turn out to be part of a stop. `before` as for Detokeniser. `limit`: the most tokens generated.
    """

    def __init__(self, stops: Stops, *, limit: int | None = None, before: Sequence[int] = ()) -> None:
        self._stops, self._limit = stops, limit
        self._text = None if stops.decode is None else _GrowingText(Detokeniser(stops.decode, before), stops.in_text)
        self._generated = 0
        self._node = 0
        self._sequences = bool(stops.sequences)  # most have none, and each token should cost next to nothing
        self.ending: Ending | None = None

    @property
    def makes_text(self) -> bool:
        """Whether `take` gives text."""
        return self._text is not None

    @property
    def certain_tokens(self) -> int:
        """How many of the first tokens can no longer become part of a stop."""
        if self.ending is not None:
            return self.ending.tokens
        by_tokens = self._generated - self._stops.in_tokens.depth[self._node]
        if self._text is None or not self._stops.texts:
            return by_tokens
        return min(by_tokens, self._text.tokens_within(self._text.certain))

    def feed(self, token: int) -> bool:
        """Whether the text ends here; the ending then says why and where. Feed it nothing after that."""
        assert self.ending is None, "the text has ended"
        stops = self._stops
        self._generated += 1
        if token in stops.eos or token in stops.token_ids:
            return self._end_by_token("eos" if token in stops.eos else "stop", token)
        if self._text is not None:
            self._text.feed(token)
        swallowed = self._swallowed_by_sequence(token)
        if swallowed or (self._text is not None and self._text.stop_at is not None):
            self._end_by_stop(swallowed)
        elif self._generated == self._limit:
            self.finish()
        elif self._text is not None:
            self._text.release(self._generated - stops.in_tokens.depth[self._node])
        return self.ending is not None

    def finish(self) -> None:
        """End it by length here, if nothing ended it before: no more tokens come."""
        if self.ending is None:
            self._end("length", self._generated, self._text.flush() if self._text is not None else None)

    def take(self) -> str:
        """The text that became final since the last call; after the end, the rest. Together they are the text kept."""
        return "" if self._text is None else self._text.take()

    def _swallowed_by_sequence(self, token: int) -> int:
        """How many of the last tokens are a stop sequence; 0 = none is complete."""
        if not self._sequences:
            return 0
        self._node = self._stops.in_tokens.step(self._node, token)
        return self._stops.in_tokens.complete[self._node]

    def _end_by_token(self, reason: Reason, token: int) -> bool:
        swallowed = max(1, self._swallowed_by_sequence(token))  # a sequence may end in this very token
        kept = self._generated - swallowed
        characters = None
        if self._text is not None:
            characters = self._text.flush() if swallowed == 1 else self._text.characters_of(kept)
        self._end(reason if swallowed == 1 else "stop", kept, characters)
        return True

    def _end_by_stop(self, swallowed: int) -> None:
        """By a sequence, a stop text, or both at the same token: then by the one that keeps less."""
        kept = self._generated - swallowed
        if self._text is None:
            return self._end("stop", kept, None)
        characters = self._text.characters_of(kept)
        stop_at = self._text.stop_at
        if stop_at is not None and (not swallowed or stop_at < characters):
            kept, characters = self._text.tokens_within(stop_at), stop_at
        return self._end("stop", kept, characters)

    def _end(self, reason: Reason, tokens: int, characters: int | None) -> None:
        self.ending = Ending(reason=reason, tokens=tokens, generated=self._generated, characters=characters)
        if self._text is not None and characters is not None:
            self._text.release_to(characters)


class _GrowingText:
    """The text so far, where its tokens end, and how much of it is final."""

    def __init__(self, pieces: Detokeniser, stops: Automaton) -> None:
        self._pieces, self._stops = pieces, stops
        self._node = 0
        self._length = 0
        self._untaken = ""
        self._taken = 0
        self.certain = 0
        """Characters that can no longer become part of a stop."""
        # After n tokens: the length of the text that no later token changes, and whether it holds all n of them.
        self._lengths, self._whole = [0], [True]
        self.stop_at: int | None = None
        """Where a stop text begins, once one is complete."""

    def feed(self, token: int) -> None:
        fresh = self._pieces.feed(token)
        self._untaken += fresh
        step, complete = self._stops.step, self._stops.complete
        for index, character in enumerate(fresh, self._length + 1):
            self._node = step(self._node, character)
            if complete[self._node]:
                self.stop_at = index - complete[self._node]
                break
        self._length += len(fresh)
        self._lengths.append(self._length)
        self._whole.append(self._pieces.whole)

    def characters_of(self, tokens: int) -> int:
        """The length of the text of so many tokens, without an incomplete last character."""
        return self._lengths[tokens]

    def tokens_within(self, characters: int) -> int:
        """The most tokens whose text ends at or before this length, and not within a character."""
        tokens = len(self._lengths) - 1
        while self._lengths[tokens] > characters or not self._whole[tokens]:
            tokens -= 1
        return tokens

    def release(self, tokens: int) -> None:
        """Text is final where neither later tokens nor a stop text that has begun can change it."""
        self.release_to(min(self.characters_of(tokens), self._length - self._stops.depth[self._node]))

    def release_to(self, characters: int) -> None:
        self.certain = max(self.certain, characters)

    def flush(self) -> int:
        """Accept an incomplete last character as it is; returns the length of the whole text."""
        rest = self._pieces.flush()
        self._untaken += rest
        self._length += len(rest)
        return self._length

    def take(self) -> str:
        count = self.certain - self._taken
        ready, self._untaken = self._untaken[:count], self._untaken[count:]
        self._taken = self.certain
        return ready
