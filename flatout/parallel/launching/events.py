"""What happens to a job that its user is told of. The text is in flatout.report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MachinesReady:
    """All are there, and alike; ranks start."""

    machines: tuple[str, ...]
    ranks: int
    restarts: int
    """How often they were started before."""


@dataclass(frozen=True, kw_only=True)
class ClockDiffers:
    """A machine's clock is far from that of machine 0."""

    machine: str
    seconds: float
    """Positive: it is ahead."""


@dataclass(frozen=True, kw_only=True)
class OnlyHere:
    """Machine 0 listens on an address that other machines cannot reach."""

    address: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Again:
    """What follows a failure: the ranks are started again."""

    restart: int
    of: int


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """The first rank that failed, or that was killed."""

    rank: int
    ranks: int
    machine: str | None
    """None: there is only one."""
    status: int | None = None
    """Its exit status; None: it was killed by the signal."""
    signal: int | None = None
    exception: str | None = None
    """The last line of its traceback."""
    where: str | None = None
    """The line of the user's code that it names last: 'train.py, line 12'."""
    again: Again | None = None
    """None: the job ends."""


@dataclass(frozen=True, kw_only=True)
class RanksHang:
    """Ranks that complete no more steps; the stack of each is on its stderr."""

    ranks: tuple[int, ...]
    """One, where it can be told which of them keeps the others waiting."""
    of: int
    machine: str | None
    silent_seconds: float
    step: int
    """The last one that it completed."""
    where: str | None = None
    again: Again | None = None


@dataclass(frozen=True, kw_only=True)
class NoneJudged:
    """No rank has completed a step of a TrainStep yet, so that none of them can be seen to hang."""

    waited_seconds: float
    """Since the ranks started."""


@dataclass(frozen=True, kw_only=True)
class MachineLost:
    """A machine does not answer any more, or its launcher has ended."""

    machine: str
    reason: str
    again: Again | None = None


@dataclass(frozen=True, kw_only=True)
class MachineBack:
    """A machine that was lost, or is new, asks to take part: ranks are started again, with it."""

    machine: str


@dataclass(frozen=True, kw_only=True)
class LeaderLost:
    """Machine 0 does not answer this one any more."""

    address: str
    reason: str
    wait_seconds: float
    """For how long this one goes on asking."""


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A signal was passed on to all ranks."""

    signal: int
    machine: str | None
    """Where it arrived; None: there is only one machine."""


@dataclass(frozen=True, kw_only=True)
class Killing:
    """A second signal, or ranks that did not end in time after the first."""


Event = (
    MachinesReady
    | ClockDiffers
    | OnlyHere
    | RankFailed
    | RanksHang
    | NoneJudged
    | MachineLost
    | MachineBack
    | LeaderLost
    | Stopping
    | Killing
)

Tell = Callable[[Event], None]


def is_essential(event: Event) -> bool:
    """Is it said with --quiet too: does it explain why the job ended?"""
    return isinstance(event, RankFailed | RanksHang | MachineLost) and event.again is None
