"""A trial that is a group of ranks: windows on command, and what is left when it ends, whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flatout.decoding import decode
from flatout.errors import ScriptError
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.levers.observed import ModuleSeen, Observed
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.script.replicas.settings import SCRATCH, Settings
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.tuning.devices.prediction import exchange_between
from flatout.tuning.devices.ranks_trial import Basis, RanksRefused, RanksTrial
from flatout.tuning.devices_proof import DevicesProof
from flatout.tuning.ranks.job import JobRequest, RanksJob
from flatout.tuning.results import SearchState

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs namespaces of Linux"),
    pytest.mark.slow,
]

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
with open("written.txt", "w") as file:
    file.write("by a trial")
for epoch in range({epochs}):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        {body}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
"""

Group = Callable[..., RanksTrial]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """`group(body="pass", epochs=1000, change=())`: of two ranks, not started yet."""
    made: list[RanksTrial] = []
    here = Path.cwd()
    (tmp_path / "work").mkdir()
    (tmp_path / "user").mkdir()
    os.chdir(tmp_path / "user")

    def group(
        body: str = "pass", *, epochs: int = 1000, change: tuple[str, str] = ("", ""), deadline: Deadline | None = None
    ) -> RanksTrial:
        Path("train.py").write_text(SCRIPT.format(epochs=epochs, body=body).replace(*change))
        setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path / "work", deadline=deadline)
        trial = RanksTrial(setup, Settings(), 2)
        made.append(trial)
        return trial

    yield group
    for trial in made:
        trial.close()
    os.chdir(here)
    assert processes_of(tmp_path) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of those that still run and name the folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder / "work") in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


def test_steps_are_timed_on_command_and_nothing_is_left(group: Group, tmp_path: Path) -> None:
    lever = next(one for one in LEVERS if one.plan_field == "precision")
    with group() as trial:
        trial.start()
        plain = trial.window([], settle=1, steps=3)
        with_lever = trial.window([Choice(lever, "bf16")], settle=1, steps=3, suspended=True)
        assert len(plain.seconds) == len(with_lever.seconds) == 3
        assert with_lever.rolled_back == {}
        assert trial.alive
    assert not trial.alive
    assert processes_of(tmp_path) == []
    assert [one.name for one in (tmp_path / "work").rglob(f"{SCRATCH}*")] == []
    assert [one.name for one in (tmp_path / "user").iterdir()] == ["train.py"]


def test_a_script_that_cannot_be_shared_is_refused_with_the_remedy(group: Group) -> None:
    with pytest.raises(RanksRefused, match=r"is a batch norm.*GroupNorm or LayerNorm"):
        group(change=("nn.Tanh()", "nn.BatchNorm1d(8)")).start()


def test_a_rank_that_fails_alone_is_named_with_its_exception(group: Group) -> None:
    trial = group(body="if epoch == 1 and torch.equal(a[0], x[4]): raise ValueError('broken')")
    trial.start()
    with pytest.raises(TrialEnded) as caught:
        trial.window([], settle=0, steps=30)
    assert (caught.value.status, caught.value.note) == (1, "rank 1")
    assert caught.value.headline == "ValueError: broken"


def test_a_script_that_ends_says_after_how_many_steps(group: Group) -> None:
    trial = group(epochs=1)
    trial.start()
    with pytest.raises(TrialEnded) as caught:
        trial.window([], settle=0, steps=30)
    assert (caught.value.status, caught.value.script_steps) == (0, 8)


def test_a_group_ends_where_the_search_is_stopped(group: Group) -> None:
    deadline = Deadline(1000.0)
    trial = group(deadline=deadline)
    trial.start()
    deadline.stopped = True
    with pytest.raises(BudgetSpent):
        trial.window([], settle=0, steps=100_000)


def test_the_exchange_is_measured(group: Group, tmp_path: Path) -> None:
    seen = Observed(modules=(ModuleSeen(kind="Net", parameters=250_000, dtypes=("torch.float32",)),))
    basis = Basis(
        state=SearchState(observed=seen, first_observed=seen),
        setup=group().setup,
        machine=detect(),
        settings=Settings(),
        step_seconds=0.01,
        deadline=Deadline(1000.0),
        progress=print,
    )
    found = exchange_between(basis, 2)
    assert found is not None
    assert found.size_bytes == 1_000_000
    assert 0 < found.small_seconds < 10
    assert 0 < found.all_reduce_seconds < 10


def test_a_proof_of_a_script_that_fails_raises_what_it_raised(group: Group, tmp_path: Path) -> None:
    trial = group(body="raise ValueError('broken')")
    folder = tmp_path / "work" / "proof"
    folder.mkdir()
    Settings().write(folder)
    request = JobRequest(kind="proof", target=trial.setup.target, devices=2, steps=4)
    with RanksJob(folder, request) as job, pytest.raises(ScriptError, match="the script failed on one device"):
        job.result(lambda: True)


def test_a_proof_is_of_the_script_under_its_levers(group: Group, tmp_path: Path) -> None:
    trial = group()
    folder = tmp_path / "work" / "proof"
    folder.mkdir()
    Settings(choices=(("autocast", "bf16"), ("optimizer", "fused"))).write(folder)
    with RanksJob(folder, JobRequest(kind="proof", target=trial.setup.target, devices=2, steps=6)) as job:
        proof = decode(DevicesProof, job.result(lambda: True))
    assert (proof.verdict, proof.steps) == ("equal to rounding", 6), proof.reason
    assert any("16 bits" in note for note in proof.notes)


def test_ranks_end_with_a_parent_that_is_killed(group: Group, tmp_path: Path) -> None:
    group()  # writes the script
    started = f"""
import sys, time
from pathlib import Path
from flatout.script.entry import Target
from flatout.script.replicas.settings import Settings
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.devices.ranks_trial import RanksTrial
setup = TrialSetup(target=Target(path="train.py"), work_folder=Path({str(tmp_path / "work")!r}))
trial = RanksTrial(setup, Settings(), 2)
trial.start()
print("started", flush=True)
time.sleep(100)
"""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", started], env=variables, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        assert processes_of(tmp_path)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while processes_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
