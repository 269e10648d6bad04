"""What `flatout launch` says of a job, in words: lines on stderr that begin with [flatout]."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from flatout.parallel.launching.events import (
    Again,
    ClockDiffers,
    Event,
    Killing,
    LeaderLost,
    MachineBack,
    MachineLost,
    MachinesReady,
    NoneJudged,
    OnlyHere,
    RankFailed,
    RanksHang,
    Stopping,
)
from flatout.parallel.launching.rank_count import RankCount
from flatout.terminal import discard, printable
from flatout.units import counted, format_seconds

PREFIX = "[flatout] "
_HINTS = {
    "SIGKILL": "out of memory? see: dmesg, or the memory limit of the container",
    "SIGSEGV": "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    "SIGABRT": "native code gave up; its reason is above",
    "SIGBUS": "/dev/shm full?",
}


def tell(event: Event) -> None:
    """Write its line to stderr."""
    _say(PREFIX + event_text(event))


def tell_count(found: RankCount) -> None:
    """Write to stderr why this machine starts so many ranks."""
    _say(f"{PREFIX}{counted(found.ranks, 'rank')} ({found.reason})")


def _say(text: str) -> None:
    """The job goes on where nobody reads it any more."""
    if sys.stderr is None:  # it was closed
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def event_text(event: Event) -> str:
    """Its line, without what stands before it."""
    match event:
        case MachinesReady():
            again = " again" if event.restarts else ""
            return f"{counted(event.ranks, 'rank')} on {', '.join(event.machines)} start{again}"
        case ClockDiffers():
            how = "ahead of" if event.seconds > 0 else "behind"
            seconds = format_seconds(abs(event.seconds))
            return f"warning: the clock of {event.machine} is {seconds} {how} machine 0's: files may seem to be newer"
        case OnlyHere():
            return (
                f"warning: {event.host} is {event.address} here, which other machines cannot reach; "
                "name one that they can with --interface"
            )
        case RankFailed():
            return _failed(event) + _follows(event.again, event.ranks > 1)
        case RanksHang():
            return _hung(event) + _follows(event.again, event.of > len(event.ranks))
        case NoneJudged():
            waited = format_seconds(event.waited_seconds)
            return (
                f"no rank has completed a step of a TrainStep in {waited}: until one has, ranks are watched for "
                "failures, and not for hanging"
            )
        case MachineLost():
            return f"{event.machine} is lost: {event.reason}" + _follows(event.again, True)
        case MachineBack():
            return f"{event.machine} has joined; all ranks start again"
        case LeaderLost():
            wait = format_seconds(event.wait_seconds)
            return f"machine 0 ({event.address}) is lost: {event.reason}; waiting up to {wait} for it"
        case Stopping():
            at = f" on {event.machine}" if event.machine else ""
            return f"{_signal_name(event.signal)}{at}: waiting for the ranks to end; once more: kill them"
        case Killing():
            return "killing the ranks"


def _failed(event: RankFailed) -> str:
    name = f"rank {event.rank}" + (f" on {event.machine}" if event.machine else "")
    if event.signal is not None:
        signal_name = _signal_name(event.signal)
        hint = f" ({_HINTS[signal_name]})" if signal_name in _HINTS and event.again is None else ""
        return f"{name} was killed by {signal_name}{hint}"
    said = f": {printable(event.exception)}" if event.exception else ""
    where = f" ({event.where})" if event.where else ""
    return f"{name} failed with exit status {event.status}{said}{where}"


def _hung(event: RanksHang) -> str:
    at = f" on {event.machine}" if event.machine else ""
    where = f"; it is at {event.where}" if event.where and len(event.ranks) == 1 else ""
    verb = "hangs" if len(event.ranks) == 1 else "hang"
    silent = format_seconds(event.silent_seconds)
    return f"{_ranks(event.ranks)}{at} {verb}: no step for {silent}, after step {event.step}{where}"


def _ranks(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _follows(again: Again | None, others: bool) -> str:
    if again is not None:
        return f"; restart {again.restart} of {again.of}"
    return "; the others are ended" if others else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
