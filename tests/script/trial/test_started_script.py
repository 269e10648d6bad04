"""Trials that are forked from a script at its first step compute what the script does, and each by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.levers.subject import Subject
from flatout.machine.process_memory import resident_bytes
from flatout.script.entry import Target
from flatout.script.numerics import NumericsAnswer, NumericsRequest
from flatout.script.trial import forking
from flatout.script.trial.answers import TrialDied, TrialEnded
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import StartedScript, TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.prover import Pattern, Prover
from flatout.tuning.training_search import TrainingSearch
from tests.levers.test_catalogue import CPU
from tests.tuning.planted_levers import Helps, Planted

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="trials need Linux"),
    pytest.mark.usefixtures("forked_trials"),
]

SCRIPT = """
import os, random, sys, threading, time
import numpy
import torch
torch.set_num_threads({threads})
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = open(__file__, "rb")
print("started", flush=True)
{before}
for step in range(60):
    noise = random.random() + numpy.random.rand() + sum(text.read(3))
    loss = (model(torch.randn(256, 64)) ** 2).mean() + noise * model[0].bias.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {each}
"""


def setup_of(folder: Path, before: str = "", each: str = "", threads: int = 1) -> TrialSetup:
    (folder / "train.py").write_text(SCRIPT.format(before=before, each=each, threads=threads))
    (folder / "work").mkdir(exist_ok=True)
    return TrialSetup(target=Target(path=str(folder / "train.py")), work_folder=folder / "work")


@contextlib.contextmanager
def started_once(setup: TrialSetup) -> Iterator[TrialSetup]:
    with StartedScript(saved_from_seconds=0.0) as started:
        yield replace(setup, started=started)


def numbers(trial: TrialProcess, steps: int = 6) -> dict[str, object]:
    found: NumericsAnswer = trial.numerics([], NumericsRequest(steps=steps))
    return {name: value for name, value in found.items() if "resident" not in name}


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_each_fork_computes_what_the_script_does(tmp_path: Path, threads: int) -> None:
    """Weights, generators and the position in a file are those of the first step, whatever other forks have done."""
    setup = setup_of(tmp_path, threads=threads)
    with setup.trial() as alone:
        alone.start()
        expected, startup = numbers(alone), alone.startup_seconds
    with started_once(setup) as forks:
        for _ in range(2):
            with forks.trial() as trial:
                trial.start()
                assert trial._parent is not None
                assert numbers(trial) == expected
                assert trial.log_path.read_text() == ""
                assert trial.isolation["mode"] == alone.isolation["mode"]
                assert trial.start_seconds is not None
                assert trial.startup_seconds is not None
                assert startup is not None
                assert trial.start_seconds < trial.startup_seconds
    logs = [path.read_text() for path in forks.work_folder.glob("*/output.log")]
    assert sorted(logs) == ["", "", "started\n", "started\n"]  # the first of them was not to be forked


@pytest.mark.slow
def test_several_live_side_by_side_and_end_by_themselves(tmp_path: Path) -> None:
    with started_once(setup_of(tmp_path)) as forks, forks.trial() as one, forks.trial() as other:
        one.start()
        other.start()
        assert len(one.window([], settle=1, steps=4).seconds) == 4
        assert len(other.window([], settle=1, steps=4).seconds) == 4
        one.close()
        assert not one.alive
        assert other.alive
        with pytest.raises(TrialEnded) as end:
            other.window([], settle=1, steps=1000)
        assert end.value.status == 0
    assert list(forks.work_folder.glob("*/scratch")) == []


@pytest.mark.slow
def test_with_what_they_were_forked_from_they_end(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    with started_once(setup) as forks:
        trial = forks.trial()
        trial.start()
    with pytest.raises(TrialDied):
        trial.window([], settle=1, steps=1)
    assert not trial.alive
    trial.close()


@pytest.mark.slow
def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    setup = replace(setup_of(tmp_path, each="if step == 5: time.sleep(600)"), hang_floor_seconds=1.0)
    with started_once(setup) as forks, forks.trial() as trial:
        trial.start()
        trial.expected_step_seconds = 1e-3
        began = time.monotonic()
        with pytest.raises(TrialError, match="hangs"):
            trial.window([], settle=0, steps=8)
        trial.close()
        assert time.monotonic() - began < 60
        with forks.trial() as another:
            another.start()
            assert another.alive


PROGRESS = "import tqdm; tqdm.tqdm.monitor_interval = 0.01; bar = tqdm.tqdm(range(3), file=open(os.devnull, 'w'))"


@pytest.mark.parametrize(
    ("before", "obstacle"),
    [
        ("", ""),
        (PROGRESS, ""),
        ("lock = __import__('multiprocessing').Lock()", ""),
        ("made = torch.nn.functional.relu(torch.ones(1 << 20)).sum()", ""),
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True, name='reader').start()", "threads: reader"),
        ("child = os.fork() or time.sleep(600)", "other processes"),
        ("ends = __import__('socket').socketpair()", "it holds open socket:"),
        ("ends = os.pipe()", "it holds open pipe:"),
        ("shared = torch.ones(4).share_memory_()", "shared memory"),
        ("torch.cuda.device_count = lambda: 1", "a thread for each GPU"),
    ],
)
@pytest.mark.first_case
def test_what_cannot_be_forked_says_why_and_goes_on(tmp_path: Path, before: str, obstacle: str) -> None:
    with setup_of(tmp_path, before).trial() as trial:
        trial.start()
        found = trial.fork_obstacle()
        assert obstacle in found
        assert bool(found) == bool(obstacle)
        assert len(trial.window([], settle=1, steps=2).seconds) == 2


@pytest.mark.slow
def test_where_there_is_an_obstacle_each_trial_starts_the_script(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "ends = os.pipe()")
    with started_once(setup) as forks:
        for _ in range(2):
            with forks.trial() as trial:
                trial.start()
                assert trial.log_path.read_text() == "started\n"
                assert "pipe" in trial.fork_obstacle()
        assert forks.from_the_start() is forks


@pytest.mark.parametrize(
    ("each", "wrote"),
    [
        ("open('figures.txt', 'a').write('x')", "open for writing"),
        pytest.param("torch.save(model.state_dict(), 'model.pt')", "save: ", marks=pytest.mark.slow),
        pytest.param("os.makedirs('new', exist_ok=True)", "make directory", marks=pytest.mark.slow),
        ("open(os.devnull, 'w').write('x'); __import__('tempfile').TemporaryFile()", ""),
    ],
)
@pytest.mark.first_case
def test_where_a_fork_writes_the_next_trial_starts_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: str, wrote: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with started_once(setup_of(tmp_path, each=each)) as forks:
        started, texts = forks.started, []
        assert started is not None
        for _ in range(2):
            with forks.trial() as trial:
                trial.start()
                numbers(trial)
                texts.append(trial.log_path.read_text())
        assert wrote in started.obstacle
        assert bool(started.obstacle) == bool(wrote)
    assert texts == ["", "started\n" if wrote else ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "work"]


# what a tune makes of it


class OnFromTheFirstStep(Planted):
    """It says so in the environment."""

    name = "once"
    plan_field = "matmul_precision"
    switch = "once"

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        os.environ["ON"] = self.name
        yield


class OnFromTheFirstLine(OnFromTheFirstStep):
    name = "before"
    plan_field = "loader_workers"
    switch = "loader"


PLANTED = (Helps(), OnFromTheFirstStep(), OnFromTheFirstLine())
HELPS, ONCE, BEFORE = (Choice(lever, True) for lever in PLANTED)
SHOWS = "print(os.environ.get('ON', 'off'), flush=True)"


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each trial got its process."""
    found: list[str] = []
    fork_server_or_new, fork = TrialProcess._start_process, TrialProcess.fork

    def started(trial: TrialProcess, *given: Any, **named: Any) -> None:
        found.append("started")
        fork_server_or_new(trial, *given, **named)

    def forked(trial: TrialProcess, *given: Any) -> Any:
        found.append("forked")
        return fork(trial, *given)

    monkeypatch.setattr(TrialProcess, "_start_process", started)
    monkeypatch.setattr(TrialProcess, "fork", forked)
    return found


def planted_setup(folder: Path, each: str = "", before: str = "") -> TrialSetup:
    return replace(setup_of(folder, before, each), levers=f"{__file__}:PLANTED")


@pytest.mark.slow
def test_only_what_has_to_be_on_before_the_first_step_needs_a_start_of_its_own(
    tmp_path: Path, spawned: list[str]
) -> None:
    shown = []
    with started_once(planted_setup(tmp_path, SHOWS)) as forks:
        for choices in ([], [ONCE], [], [BEFORE], [ONCE, BEFORE], []):
            with forks.trial(choices) as trial:
                trial.start()
                trial.window([], settle=0, steps=2)
                shown.append(trial.log_path.read_text().split()[0])
    assert shown == ["off", "once", "off", "before", "once", "off"]
    assert spawned == ["started", "forked", "forked", "forked", "started", "forked", "forked", "forked"]


@pytest.mark.slow
def test_what_later_trials_are_spared_is_the_start(tmp_path: Path) -> None:
    with started_once(planted_setup(tmp_path)) as forks:
        assert forks.spared_seconds() == 0.0
        with forks.trial() as trial:
            trial.start()
            assert trial.startup_seconds is not None
            assert 0.0 < forks.spared_seconds() <= trial.startup_seconds
        assert forks.spared_seconds([ONCE, HELPS]) == forks.spared_seconds()
        assert forks.spared_seconds([BEFORE]) == 0.0
        assert forks.in_new_processes().spared_seconds() == forks.from_the_start().spared_seconds() == 0.0
        with replace(forks, environment={"ANY": "1"}).trial() as trial:
            assert trial.setup.spared_seconds() == 0.0
            trial.start()
            assert trial._parent is None


@pytest.mark.slow
@pytest.mark.parametrize("budget_seconds", [1.0, 1e6])
def test_a_first_start_that_mostly_waited_is_made_again(
    tmp_path: Path, budget_seconds: float, spawned: list[str]
) -> None:
    """It says little about how long those of the last comparison take, unless the budget is large beside it."""
    setup = replace(setup_of(tmp_path, "time.sleep(6)"), deadline=Deadline(budget_seconds))
    with started_once(setup) as forks:
        for _ in range(2):
            with forks.trial() as trial:
                trial.start()
    again = ["started"] if budget_seconds == 1.0 else []
    assert spawned == [*again, "started", "forked", *(["forked"] if not again else [])]


@pytest.mark.slow
def test_a_short_start_is_not_saved(tmp_path: Path, spawned: list[str]) -> None:
    with StartedScript(saved_from_seconds=1000.0) as started:
        setup = replace(setup_of(tmp_path), started=started)
        for _ in range(2):
            with setup.trial() as trial:
                trial.start()
        assert started.obstacle == ""
    assert spawned == ["started", "started"]


def test_a_tune_starts_the_script_once_and_proves_in_forks(tmp_path: Path, spawned: list[str]) -> None:
    setup = planted_setup(tmp_path)
    with started_once(setup) as forks:
        with forks.trial() as observed:
            observed.start()
        pattern = Pattern(step_seconds=2e-3, start_seconds=0.01, total_steps=20)
        with Prover(forks, pattern, Deadline(100.0)) as prover:
            assert prover.prove([HELPS]).verdict == "bit-identical"
    assert spawned == ["started", "forked", "forked", "forked"]


@pytest.mark.slow
def test_a_proof_goes_on_without_forks_where_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TrialError("no more processes")

    monkeypatch.setattr(TrialProcess, "fork", fails)
    with started_once(planted_setup(tmp_path)) as forks:
        pattern = Pattern(step_seconds=2e-3, start_seconds=1.0, total_steps=20)
        with Prover(forks, pattern, Deadline(100.0)) as prover:
            assert prover.prove([HELPS]).verdict == "bit-identical"
        assert forks.started is not None
        assert forks.started.obstacle == "it cannot be forked: no more processes"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["os._exit(3)", "globals().update(torch=None)"])
def test_a_script_that_fails_in_forks_is_tuned_without(tmp_path: Path, how: str) -> None:
    """At the fork, or in its first step."""
    before = f"os.register_at_fork(after_in_child=lambda: {how})"
    setup = replace(planted_setup(tmp_path, before=before, each="time.sleep(0.05)"), deadline=Deadline(100.0))
    with started_once(setup) as forks:
        search = TrainingSearch(forks, CPU, [Helps()], SearchLimits(deadline=Deadline(100.0)))
        state = search.run()
        assert [choice.label for choice in state.kept] == ["helps"]
        assert search.trials.spared_seconds() == 0.0


def test_where_two_more_would_not_fit_into_memory_none_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "available_memory_bytes", lambda: 2 * resident_bytes() - (64 << 20))
    assert "are free" in forking._memory()
    monkeypatch.setattr(forking, "available_memory_bytes", lambda: 3 * resident_bytes())
    assert forking._memory() == ""


class OnceOnly(Planted):
    name, plan_field, switch = "once", "allocator", "once"


def test_a_process_with_what_cannot_be_undone_is_not_forked_from(tmp_path: Path) -> None:
    started = StartedScript(saved_from_seconds=0.0)
    assert started.may_take([])
    assert not started.may_take([Choice(OnceOnly(), "retain")])


def test_all_that_wait_are_closed_although_closing_one_fails() -> None:
    closed = []

    class Waiting:
        def __init__(self, number: int) -> None:
            self.number = number

        def close(self) -> None:
            closed.append(self.number)
            if self.number == 2:
                raise TrialError("it cannot be removed")

    started = StartedScript()
    started._processes = {frozenset({("a", number)}): Waiting(number) for number in (1, 2, 3)}  # type: ignore[misc]
    with pytest.raises(TrialError, match="cannot be removed"):
        started.close()
    assert sorted(closed) == [1, 2, 3]


@pytest.mark.slow
def test_a_script_that_ignores_the_end_of_its_children_is_not_forked(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, before="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    with started_once(setup) as forks, forks.trial() as trial:
        trial.start()
        assert forks.started is not None
        assert not forks.started.is_used
        assert "ignores SIGCHLD" in trial.fork_obstacle()
