"""A script's curve: its own loader's batches in other sizes, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.errors import ScriptError
from flatout.private_details import arguments_digest
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess
from flatout.sizing.curve import BatchCurve
from flatout.sizing.script_curve import CurveRequest, script_batch_curve
from tests.cli.in_process import said_by

pytestmark = pytest.mark.usefixtures("forked_trials", "few_rounds")

LOOP = """
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn({samples}, 64))
loader = {loader}
for epoch in range({epochs}):
    for (inputs,) in loader:
        {check}
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = "DataLoader(data, 4, shuffle=True)"


def write(folder: Path, *, loader: str = PLAIN, samples: int = 100, epochs: int = 100_000, check: str = "pass") -> str:
    path = folder / "train.py"
    path.write_text(LOOP.format(loader=loader, samples=samples, epochs=epochs, check=check))
    return str(path)


def curve(path: str, budget_seconds: float = 600.0) -> BatchCurve:
    return script_batch_curve(CurveRequest(target=Target.from_command([path]), budget_seconds=budget_seconds))


def test_an_unmodified_scripts_loader_gives_other_sizes(tmp_path: Path) -> None:
    found = curve(write(tmp_path))
    sizes = [point.batch_size for point in found.points]
    assert found.given_batch_size == 4
    assert sizes == [1, 2, 4, 8, 16]
    peaks = [point.peak_bytes or 0 for point in found.points]
    assert peaks == sorted(peaks)
    assert peaks[0] > 0
    assert all(point.samples_per_step == point.batch_size for point in found.points)


def test_a_size_that_leaves_too_few_steps_an_epoch_is_not_run(tmp_path: Path) -> None:
    found = curve(write(tmp_path, samples=50))
    assert max(point.batch_size for point in found.points) == 8
    assert found.stopped_above == "the data set has 50 samples, fewer than 4 steps of batch 16"


def test_a_loader_that_drops_its_last_batch_is_varied_too(tmp_path: Path) -> None:
    found = curve(write(tmp_path, loader="DataLoader(data, 4, drop_last=True)"))
    assert [point.batch_size for point in found.points] == [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_a_script_that_ends_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], TrialProcess.start

    def counted(trial: TrialProcess, patience_seconds: float) -> None:
        started.append(trial)
        start(trial, patience_seconds)

    monkeypatch.setattr(TrialProcess, "start", counted)
    found = curve(write(tmp_path, epochs=1, samples=2000))
    assert len(started) > 1
    assert {1, 2, 4, 8, 16, 32, 64} <= {point.batch_size for point in found.points}  # a start has steps enough for each


def test_accumulated_batches_count_all_their_samples(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    text = path.read_text().replace("optimizer.step()", "count = globals().get('count', 0) + 1")
    text = text.replace(
        "        optimizer.zero_grad()", "        if count % 2 == 0: optimizer.step(); optimizer.zero_grad()"
    )
    path.write_text(text)
    found = curve(str(path))
    assert all(point.samples_per_step == 2 * point.batch_size for point in found.points)


def test_a_size_at_which_the_script_fails_is_left_out(tmp_path: Path) -> None:
    loader = "DataLoader(data, 4, drop_last=True)"  # whose last batches are never shorter
    found = curve(write(tmp_path, loader=loader, check="assert len(inputs) != 8, 'not 8'"))
    assert 8 not in [point.batch_size for point in found.points]
    assert [(one.batch_size, one.reason) for one in found.failed] == [(8, "AssertionError: not 8")]


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ("[(torch.randn(16, 64),) for _ in range(1000)]", "it forms its batches itself"),
        ("DataLoader(data, 16, num_workers=1)", "its loader has worker processes"),
        (
            "DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 16, False))",
            "a batch sampler of its own",
        ),
        ("DataLoader(data, batch_size=None)", "a batch sampler of its own"),
    ],
    ids=["by hand", "workers", "batch sampler", "no batches"],
)
@pytest.mark.first_case
def test_batches_that_cannot_be_varied_from_outside_are_refused(tmp_path: Path, loader: str, said: str) -> None:
    with pytest.raises(ScriptError, match=said) as caught:
        curve(write(tmp_path, loader=loader))
    assert "flatout.batch_curve(step, batch)" in caught.value.remedy


def test_a_script_that_fails_by_itself_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"train\.py failed by itself: ZeroDivisionError"):
        curve(write(tmp_path, check="1 / 0"))


def test_the_verb_prints_one_screen(tmp_path: Path) -> None:
    write(tmp_path, check="print('noise')")
    result = said_by(tmp_path, "memory", "--batch-curve", "--budget", "60s", "train.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("speed     train.py on cpu · batch 4 given")
    assert "noise" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_verb_prints_one_document(tmp_path: Path) -> None:
    write(tmp_path)
    result = said_by(tmp_path, "memory", "--batch-curve", "--budget", "60s", "--json", "train.py", "--lr", "0.1")
    found = json.loads(result.stdout)
    assert found["flatout"]["document"] == "batch-curve"
    digest = arguments_digest(["--lr", "0.1"])
    assert found["script"] == {"name": "train.py", "arguments": None, "arguments_digest": digest}
    assert found["given_batch_size"] == 4


def test_a_refusal_ends_the_verb_with_its_exit_code(tmp_path: Path) -> None:
    write(tmp_path, loader="[(torch.randn(16, 64),) for _ in range(1000)]")
    result = said_by(tmp_path, "memory", "--batch-curve", "train.py")
    assert result.returncode == 1
    assert "only those of a torch DataLoader can be given another size" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--batch-curve", "--steps", "5"),
            "--steps together with --batch-curve; steps are taken until --budget is spent",
        ),
        (("--budget", "5m"), "--budget without --batch-curve; --patience bounds a watched run"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = said_by(tmp_path, "memory", *words, "train.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_budget_of_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    result = said_by(tmp_path, "memory", "--batch-curve", "--budget", "0s", "train.py")
    assert result.returncode == 2
    assert "--budget is 0" in result.stderr


def test_an_empty_budget_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    result = said_by(tmp_path, "memory", "--batch-curve", "--budget", "", "train.py")
    assert result.returncode == 2
    assert "'' is not a duration" in result.stderr


@pytest.mark.slow
def test_a_script_with_too_few_steps_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ScriptError) as caught:
        curve(write(tmp_path, epochs=1, samples=20))
    assert "train.py ended after 5 steps; that is too few to time a batch size" in str(caught.value)
