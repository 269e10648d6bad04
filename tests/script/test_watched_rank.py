"""A process that is watched for some steps and trains on: the others wait for it in their collectives."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.modules import module as modules

from flatout.script import communication_calls, memory_watch, profile_watch
from flatout.script.following import WATCHED, _follow_into
from flatout.script.profile_trial import command_of, full
from flatout.script.rank_answers import SETTINGS, RankAnswer, RankWatch, write_settings
from flatout.script.trial.messages import Command
from flatout.script.watched_rank import WatchedRank
from flatout.torch_private.loading import BaseIterator
from tests.fake_device import FakeDevice

Steps = Callable[[int], None]


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of two, as far as we are told; its group has itself alone, so nobody is waited for."""
    number: int = request.param
    for module in (communication_calls, memory_watch, profile_watch):
        monkeypatch.setattr(module, "ranks_together", lambda: (number, 2))
        monkeypatch.setattr(module, "compile_was_asked_for", lambda: False)  # by a test before
    return number


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    monkeypatch.setattr(atexit, "register", lambda call: None)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    yield run
    distributed.destroy_process_group()


def told(folder: Path, command: Command | None = None) -> Path:
    command = command or command_of(full(2), None) | {"behaviour": False}
    write_settings(folder, {"command": command, "target": ["train.py"]})
    return folder


def answer_of(folder: Path) -> RankAnswer | None:
    return next(iter(RankWatch(folder).answers()), None)


def test_it_answers_after_the_same_steps_on_each_rank_and_trains_on(rank: int, steps: Steps, tmp_path: Path) -> None:
    WatchedRank(told(tmp_path))
    counted = 0
    while answer_of(tmp_path) is None:
        steps(1)
        counted += 1
        assert counted < 60
    assert counted == 3 + 15 + 1 + 1 + 2  # warm-up, timed, followed, settling, profiled; one more where it is found
    steps(3)
    answer = answer_of(tmp_path)
    assert answer is not None
    assert (answer["rank"], answer["ranks"], answer["fault"]) == (rank, 2, "")
    assert answer["record"]["steps"] == 15
    exposed: Any = answer["record"]["exposed_seconds"]
    assert exposed > 0
    profile: Any = answer["profile"]["profile"]
    assert (profile["steps"], profile["timed_steps"]) == (2, 15)
    exchanged = profile["communication"]
    assert [one["name"] for one in exchanged["collectives"]] == ["gloo:all_reduce"]
    assert exchanged["exposed_seconds"] + exchanged["overlapped_seconds"] == pytest.approx(exchanged["total_seconds"])


@pytest.mark.usefixtures("rank")
def test_a_defect_of_ours_is_told_and_leaves_the_script_alone(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(profile_watch.ProfileWatch, "_begin_following", broken)
    WatchedRank(told(tmp_path))
    steps(25)
    answer = answer_of(tmp_path)
    assert answer is not None
    assert answer["fault"] == "ValueError: planted"
    assert "planted" in capsys.readouterr().err


@pytest.mark.usefixtures("rank")
def test_the_memory_of_a_rank_on_a_gpu_is_the_gpus(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WatchedRank(told(tmp_path))._observer
    steps(25)
    assert isinstance(watch, profile_watch.ProfileWatch)
    assert watch.rank_answer()["record"]["peak_device_bytes"] is None
    monkeypatch.setattr(FakeDevice, "memory_peak_bytes", lambda self: 7)
    watch._device = FakeDevice()
    assert watch.rank_answer()["record"]["peak_device_bytes"] == 7


@pytest.mark.usefixtures("rank")
def test_a_process_that_ends_early_says_what_it_saw(steps: Steps, tmp_path: Path) -> None:
    process = WatchedRank(told(tmp_path))
    steps(8)
    process._at_exit()
    answer = answer_of(tmp_path)
    assert answer is not None
    assert (answer["ended"], answer["profile"]["ended"], answer["profile"]["steps"]) == (True, True, 8)


def test_the_folder_says_whether_a_process_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WATCHED == SETTINGS
    followed = list[Path]()
    monkeypatch.setattr("flatout.script.watched_rank.WatchedRank", followed.append)
    _follow_into(told(tmp_path))
    assert followed == [tmp_path]


def test_the_memory_of_a_rank_is_told_and_nothing_of_ours_stays(rank: int, steps: Steps, tmp_path: Path) -> None:
    hooks, step, fetch = len(module_hooks()), torch.optim.SGD.step, BaseIterator.__next__
    WatchedRank(told(tmp_path, {"do": "memory", "steps": 6}))
    for _ in range(2 + 6):  # warm-up, then those asked for
        assert answer_of(tmp_path) is None
        steps(1)
    steps(1)  # one more where the step is found
    answer = answer_of(tmp_path)
    assert answer is not None
    assert (answer["rank"], answer["ranks"], answer["ended"], answer["fault"]) == (rank, 2, False, "")
    found = answer["memory"]
    assert (found["steps"], found["judged_steps"], found["leaks"]) == (8, 6, [])
    use: Any = found["use"]
    assert use["peak"]["categories"]["weights"] == 4 * (8 * 8 + 8)
    assert found["peak_resident_bytes"] > use["peak"]["size_bytes"]
    assert (len(module_hooks()), torch.optim.SGD.step, BaseIterator.__next__) == (hooks, step, fetch)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    steps(3)


def module_hooks() -> dict[int, Any]:
    return modules._global_forward_pre_hooks
