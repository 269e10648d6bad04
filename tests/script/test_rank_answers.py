"""When the parent of a trial has all that ranks will ever tell: also where one dies, or says nothing of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.script import rank_answers
from flatout.script.process_record import ProcessRecord
from flatout.script.profile_trial import rank_profiles
from flatout.script.rank_answers import ANSWER, BEGUN, RankAnswers, RankWatch

HOLDS = """
import sys
from pathlib import Path
from flatout.script.rank_answers import RankAnswers
RankAnswers(Path(sys.argv[1]), sys.argv[2]).begin()
print("begun", flush=True)
sys.stdin.read()
"""


def record(rank: int | None, ranks: int | None) -> dict[str, object]:
    return ProcessRecord(
        pid=1, rank=rank, ranks=ranks, started_at=0.0, steps=5, step_seconds=0.1, device="cpu", peak_resident_bytes=1
    ).to_json()


def give(folder: Path, name: str, rank: int | None, ranks: int | None = 2, **changes: Any) -> None:
    """An answer of a rank that is no process."""
    answer: Any = {"name": name, "rank": rank, "ranks": ranks, "record": record(rank, ranks), "fault": ""}
    answer["profile"] = {"event": "profile", "ended": False, "steps": 5}
    answer |= {"ended": False, **changes}
    (folder / f"{BEGUN}{name}").touch()
    RankAnswers(folder, name).give(answer)


def test_all_ranks_have_to_answer(tmp_path: Path) -> None:
    watch = RankWatch(tmp_path)
    assert not watch.settled()
    give(tmp_path, "b", 1)
    assert not watch.settled()  # of two
    give(tmp_path, "a", 0)
    assert watch.settled()
    assert [one.name for one in rank_profiles(watch.answers())] == ["rank 0", "rank 1"]
    assert (watch.answers()[0]["rank"], watch.notes("profiled")) == (0, ())


def test_processes_that_train_apart_are_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RankWatch(tmp_path)
    give(tmp_path, "a", None, None)
    assert not watch.settled()  # another one may begin
    monkeypatch.setattr(rank_answers, "LATE_RANK_SECONDS", 0.0)
    assert watch.settled()


def test_a_script_that_ends_by_itself_is_left_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RankWatch(tmp_path)
    for rank in range(2):
        give(tmp_path, str(rank), rank, ended=True)
    assert not watch.settled()
    monkeypatch.setattr(rank_answers, "END_SECONDS", 0.0)
    assert watch.settled()  # it does something else, and may take its time


def test_a_rank_that_has_died_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path), "dies"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"begun\n"
        give(tmp_path, "a", 0)
        watch = RankWatch(tmp_path)
        assert not watch.settled()
        assert watch.dead == ()
        rank.send_signal(signal.SIGKILL)
    assert not watch.settled()
    assert watch.dead == ("dies",)
    monkeypatch.setattr(rank_answers, "END_SECONDS", 0.0)
    assert watch.settled()
    assert watch.notes("profiled") == ("process dies died before being profiled", "1 of 2 ranks were profiled")


def test_forks_of_a_rank_do_not_keep_it_alive(tmp_path: Path) -> None:
    """Workers of its loaders: the lock is the process's own."""
    answers = RankAnswers(tmp_path, "here")
    answers.begin()
    if (pid := os.fork()) == 0:
        os._exit(RankWatch(tmp_path)._is_dead("here"))  # held by the parent, so not by this process
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / f"{ANSWER}x.json").write_text("{")
    assert RankWatch(tmp_path).answers() == []
    give(tmp_path, "a", 0, 1)
    assert json.loads((tmp_path / f"{ANSWER}a.json").read_text())["rank"] == 0
