"""How many tokens to guess, from the measured cost and acceptance.

A pass over k guesses and one token takes T(k) and yields E(k) = 1 + the expected number of guesses accepted; the best
k has the greatest E(k) / T(k), and k = 0 is a plain pass. T is a running median, since a shared machine occasionally
stalls a pass tenfold; E comes from the share accepted at each position, recent passes counting most.

Where guessing does not pay it is switched off and tried again after 4, 8, 16 ... passes. Each try costs time on a text
that cannot be guessed, so the net loss of tries is kept below a small share of the elapsed time. Only the first pass of
a size may exceed that bound: its duration is not known beforehand, and may include warm-up.

>>> throttle = Throttle()
>>> for _ in range(5):
...     throttle.observe(0, 0, seconds=0.010)
>>> throttle.choose()
2
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median_low

SIZES = (2, 4, 8)
"""Numbers of guesses to choose from: few, as each is a shape to compile or record."""

BUDGET = 0.015
"""Share of the time that tries may lose, net of later gains; the bound is twice that."""
CREDIT = 0.5
"""Plain passes that may be lost at the start, so that short texts get a try."""
MOST_SAVED = 4.0
"""Gained plain passes that may be spent later, so that one stall does not switch off what pays."""
TRY = 0.1
"""Plain passes that a try may lose before it is abandoned without a hit ..."""
MOST_TRIES = 3
"""... and the most passes of a try: where they are cheap, a single miss proves little."""

FIRST_WAIT, MOST_WAIT = 4, 128
"""Plain passes until the first try, and at most between two."""
RENEWAL = 64
"""Passes with guesses after which a plain one is due, to keep the plain time current as the text grows."""
LEAST_GAIN = 1.02
"""Guessing goes on while it is this many times as fast."""

WINDOW = 9
"""Passes of a size over which the median is taken."""
SETTLED = 3
"""Samples for a median that is robust to one spike; with fewer the optimistic estimate is used."""
ASSUMED_SLOPE = 0.1
"""Assumed cost of a guess, in plain passes, before any was measured."""
STALL = 1.5
"""Multiple of the longest plausible pass above which it counts as stalled."""

FADING = 0.9
"""Weight of a pass's acceptances against the next one's: about ten passes are remembered."""
PRIOR_HITS, PRIOR_TRIALS = 0.3, 1.0
"""Prior counts for all positions together."""
ALIKE = 2.0
"""Guesses of all positions together that each position counts as its own."""


class _Times:
    """The recent seconds of passes of one size."""

    def __init__(self) -> None:
        self.warm = False
        self.samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        if self.warm:  # the first pass of a size allocates, compiles or records
            self.samples.append(seconds)
        self.warm = True

    @property
    def settled(self) -> bool:
        return len(self.samples) >= SETTLED

    def typical(self) -> float:
        return median_low(self.samples)


class Throttle:
    """Of one batch: `choose` before each pass, `observe` after it. Reads no clock."""

    def __init__(self) -> None:
        self._times = {size: _Times() for size in (0, *SIZES)}
        self._elapsed = 0.0
        self._lost = 0.0  # seconds
        self._size = 0  # guesses a pass; 0 = off
        self._trying = False  # the pass to come decides whether guessing goes on
        self._tries = 0
        self._wait, self._waited = FIRST_WAIT, 0
        self._since_plain = 0
        self._gained = 0.0  # seconds, since it was switched on
        self._forget_acceptances()

    @property
    def on(self) -> bool:
        """Whether guessing is found to pay at present."""
        return self._size > 0 and not self._trying

    def choose(self) -> int:
        """How many tokens to guess for the next pass, at most; 0 = none. May be asked repeatedly."""
        return 0 if self.on and self._since_plain >= RENEWAL else self._size

    def observe(self, proposed: int, accepted: int | Sequence[int], seconds: float) -> None:
        """A pass over `proposed` guesses a row (the most of any row; 0 = plain), guessing included, took `seconds`.

        `accepted`: of each row how many were accepted; a number for a single row.
        """
        rows = [accepted] if isinstance(accepted, int) else accepted
        assert all(0 <= count <= proposed for count in rows), f"{accepted} of {proposed} guesses accepted"
        size = self._size_of(proposed)
        self._times[size].add(seconds)
        self._waited += not size
        if not self._times[0].settled:
            return
        self._elapsed += min(seconds, self._longest(size))
        if size:
            self._count_acceptances(proposed, rows)
            self._record_loss(size, fmean(rows) + 1, seconds)
            self._since_plain += 1
            self._decide(hit=any(rows))
        else:
            self._since_plain = 0
            self._wait_for_a_try()

    def _size_of(self, proposed: int) -> int:
        """A pass over fewer guesses than a size counts as one of that size: it is hardly shorter."""
        assert proposed <= SIZES[-1], f"{proposed} guesses where at most {SIZES[-1]} were asked for"
        sizes = (0, *SIZES)
        return sizes[bisect_left(sizes, proposed)]

    def expected_tokens(self, size: int) -> float:
        """Tokens that a pass with so many guesses brings a row, by the acceptances seen."""
        tokens, reached = 1.0, 1.0
        # A position seldom reached is taken to be much like all of them together.
        alike = (sum(self._hits) + PRIOR_HITS) / (sum(self._trials) + PRIOR_TRIALS)
        for hits, trials in zip(self._hits[:size], self._trials, strict=False):
            reached *= (hits + alike * ALIKE) / (trials + ALIKE)
            tokens += reached
        return tokens

    def expected_seconds(self, size: int) -> float:
        """Of a pass with so many guesses: measured, or estimated optimistically from other sizes."""
        times = self._times[size]
        if times.settled or (size == 0 and times.samples):
            return times.typical()
        guess = self._seconds_by_neighbours(size)
        return min(guess, times.typical()) if times.samples else guess

    def gain(self, size: int) -> float:
        """Speedup with this many guesses over none."""
        return self.expected_tokens(size) * self.expected_seconds(0) / self.expected_seconds(size)

    def _seconds_by_neighbours(self, size: int) -> float:
        plain = self.expected_seconds(0)
        known = {other: self._times[other].typical() for other in SIZES if other != size and self._known(other)}
        below = max((other for other in known if other < size), default=0)
        above = min((other for other in known if other > size), default=None)
        start = known[below] if below else plain
        if above is not None:
            slope = (known[above] - start) / (above - below)
        elif below:
            slope = (start - plain) / below / 2  # optimistic: a size that is never tried stays unknown
        else:
            slope = plain * ASSUMED_SLOPE
        return start + max(slope, 0.0) * (size - below)

    def _known(self, size: int) -> bool:
        times = self._times[size]
        return times.settled or (bool(times.samples) and times.typical() < self._longest(size))

    def _longest(self, size: int) -> float:
        """What a pass can take: judging k guesses needs no longer than k plain passes. Above, something stalled."""
        return (size + 1) * STALL * self.expected_seconds(0)

    def _charged_seconds(self, size: int, seconds: float) -> float:
        """The time that a pass is charged with: pessimistic, since this keeps the bound."""
        times = self._times[size]
        if times.settled:
            return times.typical()
        if times.samples:
            return min(times.typical(), self._longest(size))
        return seconds if seconds < self._longest(size) else self._seconds_by_neighbours(size)  # a shape's first time

    def _record_loss(self, size: int, tokens: float, seconds: float) -> None:
        loss = self._charged_seconds(size, seconds) - tokens * self.expected_seconds(0)
        self._lost = max(-MOST_SAVED * self.expected_seconds(0), self._lost + loss)
        self._gained -= loss

    def _allowance(self) -> float:
        return CREDIT * self.expected_seconds(0) + BUDGET * self._elapsed - self._lost

    def _wait_for_a_try(self) -> None:
        if self._size:
            return
        plain, smallest = self.expected_seconds(0), SIZES[0]
        loss = self._charged_seconds(smallest, self._seconds_by_neighbours(smallest)) - plain
        if self._waited >= self._wait and loss <= self._allowance():
            self._size, self._trying, self._tries, self._gained = smallest, True, 0, 0.0
            self._forget_acceptances()

    def _decide(self, *, hit: bool) -> None:
        if self._trying and not hit:
            self._tries += 1
            if self._tries == MOST_TRIES or -self._gained > TRY * self.expected_seconds(0) or self._allowance() < 0:
                self._switch_off()
            return
        best = max(SIZES, key=self.gain)
        if self.gain(best) < LEAST_GAIN or self._allowance() < 0:
            self._switch_off()
        else:
            self._size, self._trying = best, False

    def _switch_off(self) -> None:
        """For longer each time, unless guessing brought something since it was switched on."""
        self._wait = FIRST_WAIT if self._gained > 0 else min(2 * self._wait, MOST_WAIT)
        self._size, self._trying, self._waited = 0, False, 0

    def _forget_acceptances(self) -> None:
        self._hits, self._trials = [0.0] * SIZES[-1], [0.0] * SIZES[-1]

    def _count_acceptances(self, proposed: int, rows: Sequence[int]) -> None:
        """A row that accepts n guesses has tried the first n + 1: after a rejected one nothing is known.

        A row without a guess where others have one has paid for it all the same, and counts as rejecting.
        """
        for position in range(proposed):
            trials = sum(count >= position for count in rows)
            if trials:
                hits = sum(count > position for count in rows)
                self._trials[position] = self._trials[position] * FADING + trials / len(rows)
                self._hits[position] = self._hits[position] * FADING + hits / len(rows)
