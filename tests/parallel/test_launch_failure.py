"""What is read from a rank's stderr, and which of several failures is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flatout.parallel import heartbeat
from flatout.parallel.heartbeat import FILE_BYTES, alive, make_file, name_process, read_beat
from flatout.parallel.launching.attempt import Attempt
from flatout.parallel.launching.failure import RankEnd, dumped_stack, first_failure, last_exception
from flatout.parallel.launching.leader import _said_of
from flatout.parallel.launching.messages import Beats, Ended, RankBeat

TORCH = "/env/lib/python3.11/site-packages/torch"
OF_TORCH = b"""[rank1]: Traceback (most recent call last):
[rank1]:   File "/work/train.py", line 7, in <module>
[rank1]:     main()
[rank1]:   File "/work/train.py", line 3, in main
[rank1]:     raise ValueError("bad")
[rank1]: ValueError: bad
"""
WAITED = f"""warning: something else
Traceback (most recent call last):
  File "/work/train.py", line 9, in <module>
    distributed.all_reduce(t)
  File "{TORCH}/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
RuntimeError: Connection closed by peer
a line after it
""".encode()


def test_the_last_traceback_is_read() -> None:
    assert last_exception(OF_TORCH) == ("ValueError: bad", "/work/train.py, line 3", False)
    assert last_exception(OF_TORCH + WAITED) == (
        "RuntimeError: Connection closed by peer",
        "/work/train.py, line 9",
        True,
    )
    for nothing in (b"", b"Traceback (most recent call last):\n  File", b"\xff\n", WAITED[:60]):
        assert last_exception(nothing) == (None, None, False)


def end(rank: int, status: int | None = 1, number: int | None = None, *, waited: bool = False) -> RankEnd:
    return RankEnd(rank=rank, machine=0, status=status, signal=number, seconds_ago=0.0, in_collective=waited)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([(end(0, waited=True), 10.0), (end(1), 10.5)], 1),  # it had printed its traceback late
        ([(end(0), 10.0), (end(1), 10.5)], 0),
        ([(end(0, waited=True), 10.0), (end(1, None, 9), 10.5)], 1),
        ([(end(0, None, 6), 10.0), (end(1, 3), 10.5)], 1),  # NCCL's watchdog aborts those that wait
        ([(end(0, waited=True), 10.0), (end(1, waited=True), 9.9)], 1),
        ([(end(0, waited=True), 10.0), (end(1, None, 15), 50.0)], 0),  # long after
    ],
)
def test_the_failure_that_led_to_the_others_is_named(ends: list[tuple[RankEnd, float]], first: int) -> None:
    assert first_failure(ends).rank == first


def test_a_failure_that_follows_from_another_is_not_named_at_once() -> None:
    attempt = Attempt(0, 2)
    attempt.note(0, Ended(attempt=0, end=end(0, waited=True)))
    assert attempt.anything_failed
    assert attempt.failed() is None
    attempt.note(0, Ended(attempt=0, end=end(1)))
    found = attempt.failed()
    assert found is not None
    assert found.rank == 1


def row(rank: int, beats: int, *, age: float = 0.0, inside: bool = False) -> RankBeat:
    return RankBeat(rank=rank, beats=beats, step=beats, age_seconds=age, inside=inside)


@pytest.mark.parametrize(
    ("rows", "slowest"),
    [
        ([row(0, 5, age=9), row(1, 4, age=9)], (1,)),
        ([row(0, 5, age=9, inside=True), row(1, 5, age=9)], (1,)),
        ([row(0, 5, age=9, inside=True), row(1, 5, age=9, inside=True)], (0, 1)),
        ([row(0, 0, age=9), row(1, 5, age=9)], (1,)),  # the first has not trained yet
    ],
)
def test_the_slowest_rank_hangs(rows: list[RankBeat], slowest: tuple[int, ...]) -> None:
    attempt = Attempt(0, 2)
    attempt.note(0, Beats(attempt=0, ranks=tuple(rows)))
    assert attempt.hangs(8.0)
    assert not attempt.hangs(1e6)
    assert not attempt.hangs(0)
    assert attempt.slowest() == slowest


def test_ranks_that_never_made_a_step_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(0, 2)
    attempt.note(0, Beats(attempt=0, ranks=(row(0, 0, age=9), row(1, 0, age=9))))
    assert attempt.unjudged_seconds(8.0) is None  # they may still be starting
    monkeypatch.setattr(attempt, "_began", attempt._began - 100)
    assert attempt.unjudged_seconds(0) is None
    assert attempt.unjudged_seconds(600.0) is None
    assert attempt.unjudged_seconds(8.0) == pytest.approx(100, abs=50)
    assert attempt.unjudged_seconds(8.0) is None
    trained = Attempt(0, 2)
    monkeypatch.setattr(trained, "_began", trained._began - 100)
    trained.note(0, Beats(attempt=0, ranks=(row(0, 5),)))
    assert trained.unjudged_seconds(8.0) is None


def test_a_rank_that_has_ended_does_not_hang() -> None:
    attempt = Attempt(0, 1)
    attempt.note(0, Ended(attempt=0, end=end(0, 0)))
    attempt.note(0, Beats(attempt=0, ranks=(row(0, 5, age=9),)))
    assert not attempt.hangs(8.0)


def test_where_a_stack_stands() -> None:
    text = f"""noise
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait
Current thread 0x00007f0000000002 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/work/train.py", line 17 in <module>
"""
    waits = dumped_stack(text.encode())
    assert waits == ("/work/train.py, line 17", False)
    own = dumped_stack(text.replace(f"{TORCH}/distributed/distributed_c10d.py", "/work/data.py").encode())
    assert own == ("/work/data.py, line 3252", True)
    assert dumped_stack(b"nothing") is None


# the heartbeat


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "beat"
    make_file(path)
    name_process(path, os.getpid())
    monkeypatch.setenv("_FLATOUT_HEARTBEAT", str(path))
    monkeypatch.setattr(heartbeat, "_made", [])
    monkeypatch.setattr(heartbeat, "_prints_stack_on_signal", lambda: False)
    return path


def beat(step: int, *, inside: bool = False) -> None:
    """As a TrainStep does."""
    found = heartbeat.heartbeat()
    if found is not None:
        found.write(step, inside=inside)


def test_beats_are_read(file: Path) -> None:
    assert read_beat(file) is None
    beat(41, inside=True)
    beat(42)
    found = read_beat(file)
    assert found is not None
    assert (found.pid, found.beats, found.step, found.inside, found.dumps) == (os.getpid(), 1, 42, False, False)


def test_a_rank_that_evaluates_is_alive(file: Path) -> None:
    alive()
    assert read_beat(file) is None
    beat(7)
    before = read_beat(file)
    alive()
    after = read_beat(file)
    assert before is not None
    assert after is not None
    assert after.at_seconds > before.at_seconds
    assert (after.beats, after.step) == (1, 7)


def test_another_process_does_not_beat_for_the_rank(file: Path) -> None:
    name_process(file, os.getpid() + 1)
    beat(9)
    assert read_beat(file) is None


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_FLATOUT_HEARTBEAT", raising=False)
    monkeypatch.setattr(heartbeat, "_made", [])
    beat(1)
    monkeypatch.setenv("_FLATOUT_HEARTBEAT", str(tmp_path / "gone"))
    monkeypatch.setattr(heartbeat, "_made", [])
    beat(1)
    assert list(tmp_path.iterdir()) == []
    assert read_beat(tmp_path / "gone") is None


def test_the_file_is_small() -> None:
    assert FILE_BYTES <= 64
    assert sys.byteorder  # one machine writes and reads it


def test_ddps_own_collectives_wait_for_others() -> None:
    failed = f"""Traceback (most recent call last):
  File "/work/train.py", line 9, in <module>
    model(x)
  File "{TORCH}/nn/parallel/distributed.py", line 1775, in _pre_forward
    if torch.is_grad_enabled() and self.reducer._rebuild_buckets():
RuntimeError: Connection closed by peer
"""
    assert last_exception(failed.encode())[2]
    own = failed.replace("/nn/parallel/distributed.py", "/nn/modules/linear.py")
    assert not last_exception(own.encode())[2]


def test_ranks_that_had_ended_before_one_that_waited_are_known() -> None:
    attempt = Attempt(0, 3)
    attempt.note(0, Ended(attempt=0, end=end(1, 0)))
    waited, alone = end(0, waited=True), end(2)
    attempt.note(0, Ended(attempt=0, end=waited))
    attempt.note(0, Ended(attempt=0, end=alone))
    assert attempt.left_early(waited) == (1,)
    assert attempt.left_early(alone) == ()
    assert _said_of((1,)) == "; rank 1 had ended, with exit status 0"
    assert _said_of(()) == ""
