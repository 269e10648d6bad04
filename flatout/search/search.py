"""Find the changes that help, one at a time, each beside what has been kept so far.

What promises most comes first, judged anew whenever something was kept, and of what has several values the best one of
each before the others. Each is measured in turns with what is kept, and kept if it is significantly faster. What was
refused or dropped may be tried again later, pairs that interact are tried together, and in the end each kept change is
tested against the rest without it. A change that fails is dropped, and the search goes on; what there was no time for
is listed, with a budget that would be enough.

`Search` is the same for a script, a training step and a model with inputs: a subclass says what may be tried
(`proposals`, `verdict`, `promise`) and what trying it gives (`measure`, `on_kept`). All time is read from the deadline,
whose clock a test passes in.
"""

from __future__ import annotations

import contextlib
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Generic

from flatout.levers.break_even import Counted, describe, payoff_steps, pays
from flatout.levers.catalogue import INTERACTING
from flatout.levers.lever import Saving
from flatout.plan_choices import worst
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.search.trial import C, Measured, NotTried, Record, Trial
from flatout.signals import told_of
from flatout.statistics import Comparison
from flatout.units import format_seconds

Progress = Callable[[str], None]

UNDECIDED_FROM = 1.01
"""Times as fast, at the least: what was dropped as not significant with that is tried again, if there is time."""
MUCH_SLOWER = 0.8
"""A change that was so much slower by itself is not worth a second trial beside another one."""
STOPPING = "stopping the search; what was found so far is checked (Ctrl-C again: end without a plan)"
SEARCH_SHARE = 0.5
"""Of a budget that would do: what trials get, at the least."""


@dataclass(frozen=True, kw_only=True)
class Proposal(Generic[C]):
    """What is tried together in turn: a lever with its values, or one option."""

    label: str
    candidates: tuple[C, ...] = ()
    """Empty: it is not tried here, for this reason."""
    reason: str = ""


class Search(ABC, Generic[C]):
    """One search. `run` fills the record, and may be ended from a signal handler by `stop`."""

    counted: Counted = Counted()
    """The unit of the break-even point: steps, or items."""
    worth_beside_others: float = math.inf
    """Times as fast, at the least: what was dropped with that is tried again beside what was kept since."""

    def __init__(self, state: Record[C], deadline: Deadline, progress: Progress) -> None:
        self.state = state
        """A Record, or one with more in it."""
        self._deadline, self._progress = deadline, progress
        self._left = 1
        """Proposals that are open."""
        self._ended = False
        self._tried: list[tuple[Trial, tuple[C, ...]]] = []
        self._begun: dict[str, set[str]] = {}
        """Of each proposal the candidates that were tried by themselves, or would have been had there been time."""
        self._found_needed: set[tuple[str, ...]] = set()
        """A change that was kept, and those beside which it was compared with doing without it."""

    # what is searched

    @abstractmethod
    def observe(self) -> None:
        """Look at the thing as it is."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Of all that may be proposed."""

    @abstractmethod
    def proposal(self, name: str) -> Proposal[C]:
        """What is to be tried of it as things stand now, or why nothing."""

    def promise(self, name: str) -> tuple[float, ...]:
        """The greatest is tried next; of equals the first."""
        return ()

    def bundle(self) -> tuple[C, ...]:
        """What to try all at once before anything by itself, where there is no time for each; () where there is."""
        return ()

    @abstractmethod
    def measure(self, wanted: Sequence[C], tried: Sequence[C]) -> Measured:
        """What is kept, in turns with `wanted`, which is that with `tried`.

        Raises BudgetSpent where it was broken off for lack of time.
        """

    def after_trial(self, trial: Trial, tried: Sequence[C]) -> None:
        """It was measured; what became of it changes nothing yet."""

    @abstractmethod
    def on_kept(self, wanted: Sequence[C], tried: Sequence[C]) -> None:
        """`wanted` is kept from now on."""

    def ordered(self, wanted: Sequence[C]) -> list[C]:
        """As a plan applies them."""
        return list(wanted)

    def after_proposal(self, name: str) -> None:
        """It was tried."""

    def without(self, choice: C, others: Sequence[C]) -> Comparison | None:
        """All that is kept in turns with all but this choice; None: it is not asked, or could not be measured."""
        return None

    def on_dropped(self, choice: C, others: Sequence[C]) -> None:
        """This choice was dropped; `others` are still kept."""

    def starting_seconds(self, wanted: Sequence[C]) -> float:
        """Until the first step of a trial, which is not broken off."""
        return 0.0

    def predicted(self, tried: Sequence[C]) -> Saving | None:
        """What it is expected to save."""
        return None

    def close(self) -> None:
        """End what runs for the search."""

    @property
    def total(self) -> int | None:
        """How many steps or items there will be; None: unknown."""
        return None

    @property
    def pairs_of(self) -> str:
        """What is compared, in pairs."""
        return "windows"

    @property
    def usual_trial_seconds(self) -> float:
        """Where none was made yet."""
        return 1.0

    # the search

    def run(self) -> Record[C]:
        """Returns the record."""
        try:
            self.observe()
            names = self._bundled(list(self.names()))
            self._propose_all(names, most=1)
            self._propose_all([name for name in names if self._open(name)])
            self._second_look()
            for pair in self._pairs():
                self._try(*pair)
            self._drop_redundant()
        finally:
            self._ended = True
            self.close()
        self.state.enough_seconds = self._enough_seconds()
        return self.state

    def stop(self) -> bool:
        """End `run` soon, with what is kept so far: a signal handler may call it. False where that is nothing."""
        if not self._ended:
            self.state.stopped_after_seconds = self._deadline.elapsed_seconds
            self._deadline.stopped = True
        return bool(self.state.kept)

    def _bundled(self, names: list[str]) -> list[str]:
        """Try the bundle; the names that are left to be tried by themselves. The large gain is had early that way, and
        a budget that runs out still gives a plan; what adds nothing to it, or takes from it, is taken off at once."""
        bundle = self.bundle()
        members = [name for name in names if any(one in bundle for one in self.proposal(name).candidates)]
        if len(bundle) < 2 or not self._try(*bundle):
            return names
        self._drop_redundant()
        return [name for name in names if name not in members]

    def _propose_all(self, names: Sequence[str], most: int | None = None) -> None:
        """most: values of each; a second one waits until the best of every other was tried."""
        untried = list(names)
        while untried:
            offered = [name for name in untried if self._open(name)]
            self._left = len(offered)
            name = max(offered or untried, key=self.promise)
            untried.remove(name)
            self._propose(name, most)
            self.after_proposal(name)

    def _propose(self, name: str, most: int | None = None) -> None:
        found, begun = self.proposal(name), self._begun.setdefault(name, set())
        if not found.candidates and not begun:
            self._skip(found.label, found.reason)
        for candidate in self._open(name)[:most]:
            begun.add(candidate.label)
            self._try(candidate)

    def _open(self, name: str) -> list[C]:
        """What is proposed of it now and was not tried by itself."""
        begun = self._begun.get(name, ())
        return [one for one in self.proposal(name).candidates if one.label not in begun]

    def _try(self, *tried: C) -> bool:
        """Try these together on top of what is kept; True if they were kept."""
        label = " + ".join(one.label for one in tried)
        wanted = self.combined(tried)
        if self._remaining() <= self.starting_seconds(wanted):
            self._skip(label, self._spent(), for_lack_of_time=True)
            return False
        self._progress(f"trying {label}{self._so_far()}")
        began, on_top_of = self._deadline.elapsed_seconds, tuple(one.label for one in self.state.kept)
        predicted = self.predicted(tried)
        try:
            found = self.measure(wanted, tried)
        except BudgetSpent:
            broken_off = "broken off as the search was stopped"
            reason = broken_off if self._deadline.stopped else f"broken off, {self._spent()}"
            self._skip(label, reason, for_lack_of_time=True)
            return False
        fields = {**vars(found), "exactness": found.exactness or worst(one.exactness for one in tried)}
        trial = Trial(
            **fields,
            label=label,
            choices={name: value for one in tried for name, value in one.choices.items()},
            on_top_of=on_top_of,
            predicted=predicted,
            cost_seconds=self._deadline.elapsed_seconds - began,
            decided_after_seconds=self._deadline.elapsed_seconds,
        )
        if found.outcome == "kept":
            gone = [one for one in self.state.kept if one not in wanted]
            self.state.take_back(gone, "dropped", f"{label} took its place")
        self.state.trials.append(trial)
        self._tried.append((trial, tried))
        self.after_trial(trial, tried)
        if found.outcome == "kept":
            self.state.kept = list(wanted)
            self.on_kept(wanted, tried)
        return found.outcome == "kept"

    def combined(self, tried: Sequence[C]) -> list[C]:
        """What is kept, with these: those of the same fields, and those whose work they do, go."""
        replaced = {name for one in tried for name in (*one.choices, *one.replaces)}
        return self.ordered([*(one for one in self.state.kept if not replaced & {*one.choices}), *tried])

    def _second_look(self) -> None:
        if self._remaining() <= 0:
            return  # values not tried for lack of time would be listed a second time
        if self.state.kept:
            self._ask_again()
        for again in self._retries():
            if self._remaining() > 0:
                self._try(*again)

    def _ask_again(self) -> None:
        """What was too small a part of it to bother with may be a large one now that it is faster."""
        refused = {entry.label for entry in self.state.not_tried}
        for name in self.names():
            found = self.proposal(name)
            if found.label in refused and found.candidates:
                self.state.not_tried = [entry for entry in self.state.not_tried if entry.label != found.label]
                self._begun.get(name, set()).discard(found.label)  # where one of its values is called like it
                self._propose(name)

    def _retries(self) -> list[tuple[C, ...]]:
        """What was dropped but not plainly useless, the most promising first: it may help now that others are kept,
        and what could not be decided in the time that it had may be in what is left."""
        taken = {name for one in self.state.kept for name in one.choices}
        found = []
        for trial, tried in self._tried:
            compared = trial.comparison
            if trial.outcome != "dropped" or compared is None or len(tried) > 1 or {*trial.choices} & taken:
                continue
            undecided = compared.verdict == "not significant" and compared.ratio > UNDECIDED_FROM
            since = any(one.label not in trial.on_top_of for one in self.state.kept)
            if undecided or (since and compared.ratio > self.worth_beside_others):
                found.append((compared.ratio, tried))
        return [tried for _, tried in sorted(found, key=lambda one: one[0], reverse=True)]

    def _pairs(self) -> Iterator[tuple[C, ...]]:
        """Both of a pair that were dropped, or the one that was dropped before the other was kept; on top of what is
        kept when each is asked for."""
        for pair in INTERACTING:
            if self._remaining() <= 0:
                return
            kept = {name for one in self.state.kept for name in one.choices}
            missing = [name for name in pair if name not in kept]
            dropped = [found for name in missing if (found := self._best_dropped(name)) is not None]
            if not dropped or len(dropped) < len(missing) or any(_ratio(one) <= MUCH_SLOWER for one, _ in dropped):
                continue
            if len(dropped) == 2 or not self._was_tried_with(dropped[0][0], pair):
                yield tuple(candidate for _, tried in dropped for candidate in tried)

    def _best_dropped(self, name: str) -> tuple[Trial, tuple[C, ...]] | None:
        """Of the values of this field that were measured by themselves; None where there is none."""
        measured = [
            (trial, tried)
            for trial, tried in self._tried
            if name in trial.choices and trial.outcome == "dropped" and trial.comparison and len(tried) == 1
        ]
        return max(measured, key=lambda found: _ratio(found[0]), default=None)

    def _was_tried_with(self, dropped: Trial, pair: tuple[str, str]) -> bool:
        """Was the other one of the pair on when this one was tried?"""
        partner = next(
            one.label for one in self.state.kept if {*one.choices} & {*pair} and not {*one.choices} & {*dropped.choices}
        )
        return any(partner in trial.on_top_of for trial, _ in self._tried if {*trial.choices} & {*dropped.choices})

    def _drop_redundant(self) -> None:
        """Test what is kept without each change in turn; drop a change that a later one has made redundant."""
        if len(self.state.kept) < 2:
            return
        newest = next((tried for trial, tried in reversed(self._tried) if trial.outcome == "kept"), ())
        known = newest if len(newest) == 1 else ()  # it was tried beside all the others
        for choice in [one for one in self.state.kept if one not in known]:
            others = [other for other in self.state.kept if other is not choice]
            if self._remaining() <= 0 or not others:
                return
            beside = (choice.label, *sorted(other.label for other in others))
            if beside in self._found_needed:
                continue
            self._progress(f"is {choice.label} still needed?")
            found = self.without(choice, others)
            if found is not None and found.verdict == "faster":
                reason = f"no longer helps beside those kept after it: x{found.ratio:.2f} without it"
                self.state.take_back([choice], "dropped", reason)
                self.state.kept = others
                self.on_dropped(choice, others)
            elif found is not None:
                self._found_needed.add(beside)

    # the record

    def judged(
        self, comparison: Comparison, seconds: tuple[float, float], startup_seconds: float, least_gain: float
    ) -> Measured:
        """The verdict of the windows, and whether the start-up is earned back. seconds: without it and with it."""
        payoff = payoff_steps(startup_seconds, *seconds)
        cost = describe(startup_seconds, payoff, self.total, self.counted)
        faster, paying = comparison.verdict == "faster", pays(payoff, self.total)
        return Measured(
            outcome="kept" if faster and paying else "dropped",
            reason=(cost or "faster") if faster else _why_not_faster(comparison, least_gain, self.pairs_of),
            baseline_seconds=seconds[0],
            candidate_seconds=seconds[1],
            comparison=comparison,
            startup_seconds=startup_seconds,
            payoff=payoff,
        )

    def _skip(self, label: str, reason: str, *, for_lack_of_time: bool = False) -> None:
        self.state.not_tried.append(NotTried(label=label, reason=reason, for_lack_of_time=for_lack_of_time))

    def _remaining(self) -> float:
        return self._deadline.seconds_left

    def _so_far(self) -> str:
        """For the line that says what is tried: the time of one as it was and as it is now, and what is left."""
        timed = [trial for trial in self.state.trials if trial.baseline_seconds is not None]
        kept, left = [trial for trial in timed if trial.outcome == "kept"], f"{format_seconds(self._remaining())} left"
        first = self.first_seconds or (timed[0].baseline_seconds if timed else None)
        now = kept[-1].candidate_seconds if kept else None
        if first is None or now is None:
            return f" · {left}"
        return f" · {self._a_unit} took {format_seconds(first)}, now {format_seconds(now)} · {left}"

    @property
    def first_seconds(self) -> float | None:
        """Of one step or item, before anything was tried; None: that of the first trial."""
        return None

    @property
    def _a_unit(self) -> str:
        unit = self.counted.unit.removesuffix("s")
        return f"an {unit}" if unit[0] in "aeiou" else f"a {unit}"

    def _spent(self) -> str:
        if self._deadline.stopped:
            return "not reached before the search was stopped"
        return f"not reached in the search's share of the budget of {format_seconds(self._deadline.budget_seconds)}"

    def _enough_seconds(self) -> float | None:
        """By what the trials cost that were made; where there was none, by a usual one."""
        if not self.state.late or self._deadline.stopped:
            return None
        costs = [trial.cost_seconds for trial in self.state.trials] or [self.usual_trial_seconds]
        more = self.state.late * sum(costs) / len(costs)
        return enough_for(self._deadline.elapsed_seconds + more, self._deadline)


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], bool], progress: Callable[[str], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `stop`, which returns whether anything was kept: then the search alone ends.

    A second one ends everything, and so does the first where nothing was kept.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not stop():
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            progress(STOPPING)

    with told_of(handle, signal.SIGINT):
        yield


def enough_for(search_seconds: float, deadline: Deadline) -> float:
    """A budget in seconds of which a search gets so much, where `deadline` is what it had, in the same proportion."""
    share = 1 - deadline.reserved_seconds / deadline.budget_seconds
    return search_seconds / max(share, SEARCH_SHARE)


def _ratio(trial: Trial) -> float:
    return trial.comparison.ratio if trial.comparison else 0.0


def _why_not_faster(found: Comparison, least_gain: float, pairs_of: str) -> str:
    if found.verdict == "slower":
        return "slower"
    if found.verdict == "faster":
        return f"the gain is below {least_gain:.0%}"
    if found.ratio < 1:
        return f"not significant: not faster in {found.pairs} pairs of {pairs_of}"
    return f"not significant: {found.reason}"
