"""Streaming detokenisation without incomplete characters.

A token is not a piece of text: a four-byte character may be spread over four tokens, and a tokeniser may write a token
with or without a space depending on what precedes it. So each new token is decoded together with those
since the last clean boundary and one group before it, and what that adds is the new text. What ends in U+FFFD, which
tokenisers write for bytes that are no character (yet), waits for the next token.

>>> text = Detokeniser(lambda tokens: bytes(tokens).decode(errors="replace"))
>>> [text.feed(byte) for byte in "né".encode()]
['n', '', 'é']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Tokens -> text; a longer list begins with the same text, so: no clean-up of spaces, and special tokens left out."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"

MOST_WAITING = 32
"""Tokens that may wait for a character to be complete: past it they are not text, and decoding must stay cheap."""

MOST_BEFORE = 8
"""Tokens of the prompt that are decoded with the first ones generated."""


class Detokeniser:
    """Of one prompt. `before`: the prompt's tokens, where its continuation is wanted as it goes on from there (with the
    space that some tokenisers drop at the start of a text)."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before[-MOST_BEFORE:])
        self._old = len(self._window)  # of the window's tokens, those that were given as text before
        self._given = len(self._decode(self._window).rstrip(UNKNOWN)) if self._window else 0
        self.whole = True
        """Whether every token fed so far is in the text given: the text ends between two characters."""

    def feed(self, token: int) -> str:
        """What this token adds that no later one will change; often '' within a character."""
        self._window.append(token)
        text = self._decode(self._window)
        stable = text.rstrip(UNKNOWN)
        self.whole = len(stable) == len(text)
        if len(self._window) > MOST_WAITING + MOST_BEFORE:
            self.whole, stable = True, text
        fresh = stable[self._given :]
        if self.whole and fresh:
            self._forget_old()
        elif fresh:
            self._given = len(stable)
        elif self.whole and len(self._window) > MOST_WAITING:
            self._window.pop()  # without text, as special tokens are; endless ones must not lengthen the window
        return fresh

    def flush(self) -> str:
        """What still waits, as the tokeniser writes it. No more tokens come."""
        fresh = self._decode(self._window)[self._given :]
        self._forget_old()
        self.whole = True
        return fresh

    def _forget_old(self) -> None:
        """What was just given stays as context for the next token, and what came before it goes."""
        # A group given by force is of no use as context beyond its last token.
        self._window = self._window[self._old :][-MOST_BEFORE:]
        self._old = len(self._window)
        self._given = len(self._decode(self._window))
