"""`flatout.tune` of a TrainStep: what is found on its copies, what stays as it was, and what is refused."""

from __future__ import annotations

import json
import random
import time
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import UsageError
from flatout.levers.lever import Choice, Verdict, offer
from flatout.levers.observed import Observed
from flatout.levers.optimizer_in_backward import OptimizerInBackward
from flatout.levers.subject import Subject
from flatout.levers.threads import Threads
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.device import CpuDevice, Mark
from flatout.plan import Plan
from flatout.script.numerics import NumericsRequest
from flatout.script.trial.answers import TrialEnded
from flatout.torch_private.dispatch import current_dispatch_mode
from flatout.tuning.step_tuning import StepTrials, _read
from flatout.tuning.windows import Arm, Pace, compare_arms
from tests.tuning import planted_levers as planted

LOSS = flatout.supervised(nn.CrossEntropyLoss())


def training(plan: Plan | None = None, loss_fn: Any = LOSS, **options: Any) -> flatout.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return flatout.TrainStep(model, optimizer, loss_fn, plan, **options)


def data(count: int = 6) -> list[Any]:
    chance = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=chance), torch.randint(0, 4, (16,), generator=chance)) for _ in range(count)]


def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.02)
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


@pytest.fixture
def pretended_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes as long as it sleeps, and nobody waits for it: a busy machine changes nothing."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(CpuDevice, "mark", lambda device: Mark(seconds=slept[0]))


class Slower(planted.Slower):
    def apply(self, subject: Subject, value: Any) -> Any:
        def wrapper(module: Any, call: Any) -> Any:
            time.sleep(0.005)
            return call()

        return subject.around_calls(wrapper)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer(1, reason="planted")


class Raises(planted.Raises):
    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer("channels_last", reason="planted")


@pytest.fixture
def planted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    levers = (Slower(), Raises(), planted.Corrupts(), planted.Helps())
    monkeypatch.setattr("flatout.tuning.step_tuning.LEVERS", levers)
    monkeypatch.setattr("flatout.train.step.levers_of", lambda scope: levers)


@pytest.mark.usefixtures("planted_only", "brief", "pretended_sleep")
@pytest.mark.slow
def test_each_planted_lever_goes_for_its_own_reason_and_nothing_of_the_users_moves() -> None:
    scheduled = torch.optim.lr_scheduler.OneCycleLR
    step = training(Plan(micro_batches=2).with_choice("nonfinite", "raise", "mine"), slow_loss, clip_norm=1.0)
    step.scheduler = scheduled(step.optimizer, 0.1, total_steps=5)
    source = flatout.batches((torch.randn(96, 8), torch.randint(0, 4, (96,))), 16)
    next(iter(source))
    weights = [one.clone() for one in step.model.parameters()]
    at, numbers, mine = source.state_dict(), torch.get_rng_state(), random.getstate()
    told: list[str] = []
    found = flatout.tune(step, source, seconds=100, progress=told.append)
    trials = {trial.label: (trial.outcome, trial.reason) for trial in found.state.trials}
    assert trials["slower 1"][0] == "dropped", trials
    assert trials["raises channels_last"] == ("failed", "the step failed under it: RuntimeError: planted failure")
    assert trials["corrupts gradients"][0] == "failed", trials
    assert trials["helps"] == ("kept", "faster")
    assert found.plan.choices() == {"cudnn_benchmark": True, "micro_batches": 2, "nonfinite": "raise"}
    assert found.plan.reasons["nonfinite"] == "mine"
    assert found.plan.exactness == "bit-identical"
    assert found.speedup is not None
    assert found.speedup.ratio > 2
    assert all(torch.equal(a, b) for a, b in zip(weights, step.model.parameters(), strict=True))
    assert not step.optimizer.state
    assert step.steps == 0
    assert step.scheduler.last_epoch == 0
    assert source.state_dict() == at
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == mine
    assert "proof: helps is bit-identical?" in told
    text = found.summary()
    assert "5 batches, which stay in memory: loading is not tuned" in text
    assert "window pairs): cudnn_benchmark = True" in text
    assert json.loads(json.dumps(found.to_json()))["plan"]["cudnn_benchmark"] is True


def test_two_trials_take_turns_and_leave_nothing_on(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    other = Choice(Threads(), threads + 1)
    trials = StepTrials(step=training(), batches=data(), shared_folder=tmp_path)
    with trials.trial() as first, trials.trial() as second:
        first.start()
        second.start()
        windows = [one.window(choices, settle=1, steps=2) for one in (first, second) for choices in ((), (other,))]
        assert torch.get_num_threads() == threads
        assert all(len(window.seconds) == 2 for window in windows)
        one, two = (trial.numerics((), NumericsRequest(steps=5)) for trial in (first, second))
        assert one == two
        assert one["losses"] != [one["losses"][0]] * 5
        assert first.describe().device == "cpu"
        seen = first.breakdown((), steps=3)
        assert seen.step_seconds is not None
        assert sum(seen.breakdown_seconds.values()) == pytest.approx(seen.step_seconds)
        work = first.work()
        assert work.flops_per_step == 3 * 2 * 16 * (8 * 16 + 16 * 4) - 2 * 16 * 8 * 16  # no gradient of the inputs
        assert work.operations_per_step > 20
        assert work.denormal_share is not None
        assert first.peak(()).peak_bytes is not None
    assert not first.alive


def test_long_first_steps_are_made_once_and_lead_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and a state of the optimizer, a batch after the other."""
    calls: list[object] = []
    note = calls.append  # of copies: a list that the loss function itself names is each copy's own

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        note(batch)
        return LOSS(model, batch)

    def recorded(trials: StepTrials) -> Any:
        with trials.trial() as trial:
            trial.start()
            calls.clear()
            return trial.numerics((), NumericsRequest(steps=5))

    batches = data()
    each = StepTrials(step=training(loss_fn=counted), batches=batches, shared_folder=tmp_path)
    wanted = recorded(each)
    assert not each.begun
    monkeypatch.setattr("flatout.tuning.step_tuning.LONG_FIRST_SECONDS", 0.0)
    once = StepTrials(step=training(loss_fn=counted), batches=batches, shared_folder=tmp_path)
    assert recorded(once) == wanted
    assert recorded(once) == wanted  # the first trial has left what it started from as it was
    with once.trial() as later:
        calls.clear()
        later.start()
        assert not calls
    with once.trial([Choice(Threads(), 1)]) as other:
        other.start()
        assert len(calls) == 2  # what is on from the start is on in the first steps


def test_a_step_that_fails_under_a_choice_says_with_what(tmp_path: Path) -> None:
    def fails_later(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].sum() < -1e6:
            raise ValueError("on this batch")
        return LOSS(model, batch)

    batches = [*data(4), (torch.full((16, 8), -1e6), data()[0][1])]
    trials = StepTrials(step=training(loss_fn=fails_later), batches=batches, shared_folder=tmp_path)
    with trials.trial() as trial:
        trial.start()
        with pytest.raises(TrialEnded) as ended:
            trial.window((), settle=1, steps=10)
    assert ended.value.headline == "ValueError: on this batch"
    assert ended.value.steps == 4


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one")


@pytest.mark.parametrize(
    ("change", "batches", "said"),
    [
        ({}, data()[0], "batches is tuple; it is an iterable of batches as .*; for a single one: \\[batch\\]"),
        ({}, data()[0][0], "batches is Tensor"),
        ({}, 3, "batches is int"),
        ({}, [], "there are no batches"),
        ({}, None, "batches is None"),
        ({"plan": Plan(precision="bf16", micro_batches=2)}, data(), "already sets 'precision'; .*without"),
    ],
)
def test_what_cannot_be_tuned_is_refused(change: dict[str, Any], batches: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flatout.tune(training(**change), batches)


def test_models_that_cannot_be_tried_are_refused() -> None:
    step = training()
    step.model.compile()
    with pytest.raises(UsageError, match="already compiled"):
        flatout.tune(step, data())
    model = nn.Sequential(Uncopied(8, 4))
    step = flatout.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS)
    with pytest.raises(UsageError, match="cannot be copied: TypeError: there is only one"):
        flatout.tune(step, data())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exactness": "exact"}, "exactness is 'exact'"),
        ({"seconds": 0}, "seconds is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flatout.tune(training(), data(), **options)
    with pytest.raises(UsageError, match=said):
        flatout.tune("train.py", **options)


def test_the_steps_own_errors_are_its_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        flatout.tune(training(), [(torch.randn(4, 5), torch.randint(0, 4, (4,)))])
    step = training()
    step.model.eval()
    with pytest.raises(UsageError, match="evaluation mode"):
        flatout.tune(step, data())


def test_a_subject_is_a_step_or_a_script() -> None:
    with pytest.raises(UsageError, match="no such script: nowhere"):
        flatout.tune("nowhere.py")
    with pytest.raises(UsageError, match="batches is a list; they are a TrainStep's"):
        flatout.tune("train.py", data())  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"arguments is .*; it is a list of words; for example"):
        flatout.tune("train.py", arguments="--lr 0.1")
    with pytest.raises(UsageError, match="subject is a Linear; it is a TrainStep or the path of a script"):
        flatout.tune(nn.Linear(2, 2))  # type: ignore[call-overload]


def test_a_peak_that_fails_leaves_nothing_that_follows_operations(tmp_path: Path) -> None:
    before = current_dispatch_mode()
    step = training(loss_fn=fails_late)
    with StepTrials(step=step, batches=data(), shared_folder=tmp_path).trial() as trial:
        trial.start()
        with pytest.raises(TrialEnded, match="the script ended"):
            trial.peak([], steps=50)
    assert current_dispatch_mode() is before


CALLS = [0]


def fails_late(model: nn.Module, batch: Any) -> torch.Tensor:
    CALLS[0] += 1
    if CALLS[0] > 20:
        raise RuntimeError("it fails late")
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


def test_reading_batches_leaves_their_source_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.utils.data.TensorDataset(torch.arange(40.0))
    sampler = torch.utils.data.RandomSampler(table, generator=torch.Generator().manual_seed(4))
    loaders = [
        torch.utils.data.DataLoader(table, 4, shuffle=True, generator=generator),
        torch.utils.data.DataLoader(table, batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False)),
    ]
    for loader in loaders:
        first = _read(loader)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, _read(loader), strict=True))  # type: ignore[index]


class Breaks:
    """A source that fails at its third batch."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2):
            self.at += 1
            yield torch.zeros(2)
        raise OSError("the disk is gone")

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_source_that_fails_is_put_back_too() -> None:
    source = Breaks()
    with pytest.raises(OSError, match="the disk is gone"):
        _read(source)
    assert source.at == 0


def test_any_mapping_is_one_batch() -> None:
    with pytest.raises(UsageError, match=r"batches is UserDict.*\[batch\]"):
        _read(UserDict(x=torch.zeros(2)))


@pytest.mark.usefixtures("pretended_sleep")
def test_the_windows_of_a_turn_are_of_the_same_batches(tmp_path: Path) -> None:
    """Eight batches of different lengths came again and again, the long ones always in the windows of one side."""

    def as_long_as_its_batch(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.01 * len(batch))
        loss: torch.Tensor = model(batch).mean()
        return loss

    batches = [torch.zeros(length, 8) for length in (1, 5, 2, 8, 3, 9, 4, 7)]
    trials = StepTrials(step=training(loss_fn=as_long_as_its_batch), batches=batches, shared_folder=tmp_path)
    other = Choice(Threads(), torch.get_num_threads() + 1)
    with trials.trial() as trial:
        trial.start()
        for pace in (Pace.for_step(0.05, seconds=60.0), Pace.for_step(0.2, seconds=60.0)):
            found = compare_arms(Arm(trial), Arm(trial, [other]), replace(pace, most_pairs=6))
            assert found.comparison.ratio == pytest.approx(1.0, abs=1e-6)
            assert len(set(found.baseline_medians)) > 1


def test_updates_in_backward_are_left_to_what_saves_memory(tmp_path: Path) -> None:
    """What follows backward() in the loop here says nothing about the step's own."""
    trials = StepTrials(step=training(), batches=data(), shared_folder=tmp_path)
    with trials.trial() as trial:
        trial.start()
        verdict = OptimizerInBackward().applies(detect(), trial.describe())
    assert "flatout.fit_to_memory tries it" in verdict.reason


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "60"])
def test_a_budget_is_a_finite_time(seconds: Any) -> None:
    with pytest.raises(UsageError, match=r"seconds is .*; it is above 0, and finite; 300 are"):
        flatout.tune(training(), data(), seconds=seconds)
