"""Trials that are forked from a script at its first step compute what the script does, and each by itself."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.script.entry import Target
from flatout.script.numerics import NumericsAnswer, NumericsRequest
from flatout.script.trial.answers import TrialDied, TrialEnded
from flatout.script.trial.process import Starts, TrialProcess, TrialSetup
from flatout.script.trial.started_script import StartedScript, started_once
from flatout.search.deadline import Deadline
from flatout.tuning.prover import Pattern, Prover, least_seconds
from tests.tuning.planted_levers import Helps

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


def numbers(trial: TrialProcess, steps: int = 6) -> dict[str, object]:
    found: NumericsAnswer = trial.numerics([], NumericsRequest(steps=steps))
    return {name: value for name, value in found.items() if "resident" not in name}


@pytest.mark.parametrize("threads", [1, 2])
def test_each_fork_computes_what_the_script_does(tmp_path: Path, threads: int) -> None:
    """Weights, generators and the position in a file are those of the first step, whatever other forks have done."""
    setup = setup_of(tmp_path, threads=threads)
    with setup.trial() as alone:
        alone.start()
        expected, startup = numbers(alone), alone.startup_seconds
    with started_once(setup) as forking:
        for _ in range(2):
            with forking.trial() as trial:
                trial.start()
                assert numbers(trial) == expected
                assert trial.log_path.read_text() == ""
                assert trial.isolation["mode"] == alone.isolation["mode"]
                assert trial.start_seconds is not None
                assert trial.startup_seconds is not None
                assert startup is not None
                assert trial.start_seconds < trial.startup_seconds
        logs = [path.read_text() for path in setup.work_folder.glob("start-*/output.log")]
    assert logs == ["started\n"]


def test_several_live_side_by_side_and_end_by_themselves(tmp_path: Path) -> None:
    with started_once(setup_of(tmp_path)) as forking, forking.trial() as one, forking.trial() as other:
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
    assert list(forking.work_folder.glob("*/scratch")) == []


def test_with_what_they_were_forked_from_they_end(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    with StartedScript() as started:
        trial = replace(setup, started=started).trial()
        trial.start()
    with pytest.raises(TrialDied):
        trial.window([], settle=1, steps=1)
    assert not trial.alive
    trial.close()


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    setup = replace(setup_of(tmp_path, each="if step == 5: time.sleep(600)"), hang_floor_seconds=1.0)
    with started_once(setup) as forking, forking.trial() as trial:
        trial.start()
        trial.expected_step_seconds = 1e-3
        began = time.monotonic()
        with pytest.raises(TrialError, match="hangs"):
            trial.window([], settle=0, steps=8)
        trial.close()
        assert time.monotonic() - began < 60
        with forking.trial() as another:
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
def test_what_cannot_be_forked_says_why_and_goes_on(tmp_path: Path, before: str, obstacle: str) -> None:
    with setup_of(tmp_path, before).trial() as trial:
        trial.start()
        found = trial.fork_obstacle()
        assert obstacle in found
        assert bool(found) == bool(obstacle)
        assert len(trial.window([], settle=1, steps=2).seconds) == 2


def test_where_there_is_an_obstacle_each_trial_starts_the_script(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "ends = os.pipe()")
    with started_once(setup) as forking:
        for _ in range(2):
            with forking.trial() as trial:
                trial.start()
                assert trial.log_path.read_text() == "started\n"
    assert setup.starts.fork_obstacle is not None
    assert "pipe" in setup.starts.fork_obstacle


@pytest.mark.parametrize(
    ("each", "wrote"),
    [
        ("open('figures.txt', 'a').write('x')", "open for writing"),
        ("torch.save(model.state_dict(), 'model.pt')", "save: "),
        ("os.makedirs('new', exist_ok=True)", "make directory"),
        ("open(os.devnull, 'w').write('x'); __import__('tempfile').TemporaryFile()", ""),
    ],
)
def test_where_a_fork_writes_the_next_trial_starts_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: str, wrote: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with StartedScript() as started:
        forking = replace(setup_of(tmp_path, each=each), started=started)
        texts = []
        for _ in range(2):
            with forking.trial() as trial:
                trial.start()
                numbers(trial)
                texts.append(trial.log_path.read_text())
        assert wrote in started.obstacle
        assert bool(started.obstacle) == bool(wrote)
    assert texts == ["", "started\n" if wrote else ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "work"]


# the proof

FROM_START = Choice(Helps(), True)


def test_a_proof_starts_the_script_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[tuple[str, bool]] = []
    spawn = TrialProcess.spawn

    def counted(trial: TrialProcess) -> None:
        spawn(trial)
        labels.append((trial.label, trial._parent is not None))

    monkeypatch.setattr(TrialProcess, "spawn", counted)
    setup = replace(setup_of(tmp_path), levers="tests.tuning.planted_levers:HELPING")
    setup.starts.fork_obstacle = ""
    with Prover(setup, Pattern(step_seconds=2e-3, startup_seconds=1.0, total_steps=20), Deadline(100.0)) as prover:
        proof = prover.prove([FROM_START])
    assert proof.verdict == "bit-identical"
    assert labels == [("start", False), ("proof", True), ("proof", True)]


def test_a_proof_goes_on_without_forks_where_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TrialError("it cannot be forked")

    monkeypatch.setattr(TrialProcess, "fork", fails)
    setup = replace(setup_of(tmp_path), levers="tests.tuning.planted_levers:HELPING")
    setup.starts.fork_obstacle = ""
    with Prover(setup, Pattern(step_seconds=2e-3, startup_seconds=1.0, total_steps=20), Deadline(100.0)) as prover:
        assert prover.prove([FROM_START]).verdict == "bit-identical"


def test_one_start_is_kept_back_for_a_proof(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    pattern = Pattern(step_seconds=0.0, startup_seconds=8.0)
    each = least_seconds(pattern, setup)
    once = replace(setup, starts=Starts(seconds=8.0, cores=1.0, fork_obstacle=""))
    assert each > 20
    assert least_seconds(pattern, once) == 8.0
    assert least_seconds(replace(pattern, kinds_of_start=2), once) == 16.0
