"""When a tune has to end, and what made it run over.

One Deadline is made from the user's budget and passed to every stage. A stage checks how much time is left before it
starts something, plans accordingly, and names what it is doing, so that an overrun can be explained.

    deadline = Deadline(30.0)                          # the user's budget, from now on
    search = deadline.reserving(12.0)                  # the same budget, 12 s kept back for the proof

    if search.seconds_left < cost_of_one_trial_seconds:
        ...                                            # do not start it
    with deadline.stage("starting the script"):        # stages nest: the innermost counts
        process.start()

Trials of a search are interrupted shortly after the deadline, or at once when the user stops the search, with
BudgetSpent: a TrialError that says nothing about the levers. The proof and the last comparison are not interrupted:
without them the search was pointless, so they plan ahead.

    TrialSetup(..., deadline=search)                   # and TrialProcess.interruptible

    deadline.explanation                               # '' or 'the budget of 30 s was exceeded by 12 s: ...'

In tests the clock is a function that returns what the test wants: Deadline(30.0, clock=lambda: now[0]).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flatout.errors import TrialError
from flatout.units import format_seconds

GRACE = 0.05
"""Share of the budget by which work in progress may overrun it before it is interrupted."""
TOLERANCE = 0.1
"""Share of the budget: a smaller overrun is not reported."""
MOST_STAGES_NAMED = 3


class BudgetSpent(TrialError):
    """A trial was interrupted, or not started, because the time was up."""

    def __init__(self, deadline: Deadline | None) -> None:
        of = f" of {format_seconds(deadline.budget_seconds)}" if deadline is not None else ""
        super().__init__(f"the budget{of} is spent")


@dataclass
class _Stages:
    """What ran after the budget was spent; shared by a deadline and those derived from it."""

    late_seconds: dict[str, float] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    counted_until: float = 0.0
    """Time up to this point is already attributed to a stage."""


class Deadline:
    """A budget in seconds that runs from its creation. `clock` returns seconds and is monotonic."""

    def __init__(self, budget_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_seconds = budget_seconds
        self._clock = clock
        self._began = clock()
        self.reserved_seconds = 0.0
        """What `reserving` has set aside."""
        self.stopped = False
        """Set when the user ends the search; deadlines derived before that go on."""
        self._stages = _Stages(counted_until=self._began + budget_seconds)

    def reserving(self, seconds: float) -> Deadline:
        """The same budget, with this much more (or less) of its end reserved for later stages."""
        earlier = Deadline.__new__(Deadline)
        vars(earlier).update(vars(self))
        earlier.reserved_seconds = self.reserved_seconds + seconds
        return earlier

    def within(self, seconds: float) -> Deadline:
        """The same budget, with at most this much left."""
        return self.reserving(max(0.0, self.seconds_left - seconds))

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._began

    @property
    def seconds_left(self) -> float:
        """Never below 0."""
        return 0.0 if self.stopped else max(0.0, self.budget_seconds - self.reserved_seconds - self.elapsed_seconds)

    @property
    def grace_seconds_left(self) -> float:
        """Until work in progress is interrupted; 0 or below afterwards."""
        if self.stopped:
            return 0.0
        end = self.budget_seconds * (1 + GRACE) - self.reserved_seconds
        return end - self.elapsed_seconds

    @property
    def whole_seconds_left(self) -> float:
        """Of the whole budget, whatever is reserved; 0 once it is exceeded."""
        return max(0.0, self.budget_seconds - self.elapsed_seconds)

    @property
    def exceeded_seconds(self) -> float:
        """By how much the whole budget is exceeded now, whatever is reserved; 0 while it is not."""
        return max(0.0, self.elapsed_seconds - self.budget_seconds)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name what runs now, as it is to appear in `explanation`: 'starting the script'."""
        self._attribute()
        self._stages.open.append(name)
        try:
            yield
        finally:
            self._attribute()
            self._stages.open.pop()

    def _attribute(self) -> None:
        """Charge the time since the last change of stage, as far as it is beyond the budget, to the current stage."""
        now = self._clock()
        late = now - self._stages.counted_until
        if late <= 0:
            return
        name = self._stages.open[-1] if self._stages.open else "other work"
        self._stages.late_seconds[name] = self._stages.late_seconds.get(name, 0.0) + late
        self._stages.counted_until = now

    @property
    def explanation(self) -> str:
        """'' within 10 % of the budget, else by how much it was exceeded and by which stages, longest first."""
        self._attribute()
        if self.exceeded_seconds <= TOLERANCE * self.budget_seconds:
            return ""
        late = sorted(self._stages.late_seconds.items(), key=lambda entry: -entry[1])[:MOST_STAGES_NAMED]
        named = ", ".join(f"{name} took {format_seconds(seconds)} of that" for name, seconds in late)
        budget, excess = format_seconds(self.budget_seconds), format_seconds(self.exceeded_seconds)
        return f"the budget of {budget} was exceeded by {excess}: {named}"
