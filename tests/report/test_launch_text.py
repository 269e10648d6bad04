"""What is said of a job."""

from __future__ import annotations

import pytest

from flatout.parallel.launching.events import (
    Again,
    ClockDiffers,
    Event,
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
from flatout.report.launch_text import event_text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (MachinesReady(machines=("a", "b"), ranks=4, restarts=0), "4 ranks on a, b start"),
        (MachinesReady(machines=("a",), ranks=1, restarts=1), "1 rank on a start again"),
        (RankFailed(rank=0, ranks=1, machine=None, status=2), "rank 0 failed with exit status 2"),
        (
            RankFailed(rank=0, ranks=1, machine=None, status=1, exception="ValueError: \x1b[2Jbad"),
            "rank 0 failed with exit status 1: ValueError: [2Jbad",
        ),
        (
            RankFailed(rank=3, ranks=4, machine="b", signal=9, again=Again(restart=1, of=3)),
            "rank 3 on b was killed by SIGKILL; restart 1 of 3",
        ),
        (RankFailed(rank=0, ranks=1, machine=None, signal=64), "rank 0 was killed by SIGRTMAX"),
        (
            RanksHang(ranks=(0, 2), of=4, machine=None, silent_seconds=60.0, step=7, again=Again(restart=1, of=1)),
            "ranks 0 and 2 hang: no step for 1 min, after step 7; restart 1 of 1",
        ),
        (
            MachineLost(machine="machine 1 (b)", reason="no route"),
            "machine 1 (b) is lost: no route; the others are ended",
        ),
        (
            NoneJudged(waited_seconds=60.0),
            "no rank has completed a step of a TrainStep in 1 min: until one has, ranks are watched for failures, and "
            "not for hanging",
        ),
        (MachineBack(machine="b"), "b has joined; all ranks start again"),
        (
            LeaderLost(address="a:1", reason="x", wait_seconds=60.0),
            "machine 0 (a:1) is lost: x; waiting up to 1 min for it",
        ),
        (Stopping(signal=15, machine="a"), "SIGTERM on a: waiting for the ranks to end; once more: kill them"),
        (
            ClockDiffers(machine="b", seconds=-5.0),
            "warning: the clock of b is 5 s behind machine 0's: files may seem to be newer",
        ),
        (
            OnlyHere(address="127.0.1.1", host="a"),
            "warning: a is 127.0.1.1 here, which other machines cannot reach; name one that they can with --interface",
        ),
    ],
)
def test_events_in_words(event: Event, text: str) -> None:
    assert event_text(event) == text
