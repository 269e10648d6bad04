"""Strategies tried and proved for real, with two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.plan import Plan
from flatout.script.trial.setup import TrialSetup
from flatout.script.work_folder import work_folder
from flatout.search.deadline import Deadline
from flatout.strategies.choosing import StrategiesRequest, _Choosing
from flatout.strategies.facts import FSDP_TENSOR, TrainingFacts, planned_for, strategies_of
from flatout.strategies.sides import trainer
from tests.cli.in_process import said_by

NET = """
import torch, flatout
from flatout.models import GPT2, GPT2Config
def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
def make(plan):
    tokens = torch.randint(0, 31, (48, 9))
    model = GPT2(GPT2Config(vocab_size=31, max_tokens=8, width=16, heads=2, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return flatout.TrainStep(model, optimizer, loss_fn, plan, clip_norm=1.0), flatout.batches(tokens, 8, plan, seed=0)
"""


@pytest.fixture(autouse=True)
def _one_nudge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process more."""
    monkeypatch.setattr("flatout.strategies.proving.NUDGES", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategies"), [(2, strategies_of(2)), (4, (FSDP_TENSOR,))])
def test_every_strategy_is_proved_to_train_as_one_process(
    tmp_path: Path, ranks: int, strategies: tuple[str, ...]
) -> None:
    """Dropout is in the model, and left out on both sides."""
    (tmp_path / "net.py").write_text(NET)
    request = StrategiesRequest(spec=f"{tmp_path / 'net.py'}:make", ranks=ranks, plan=Plan(), budget_seconds=600)
    with work_folder() as folder:
        setup = TrialSetup(target=trainer(folder), work_folder=folder)
        choosing = _Choosing(request, detect(), setup, Deadline(600), lambda text: None)
        choosing._facts = facts = choosing._found_facts()
        assert isinstance(facts, TrainingFacts)
        assert (facts.model, facts.blocks, facts.samples) == ("GPT2", 2, 8)
        assert facts.memory["fsdp"].bytes is not None
        verdicts = {}
        for name in strategies:
            choosing._plans[name] = planned_for(Plan(), name, ranks, 8)
            proof = choosing._proof(name)
            verdicts[name] = proof if isinstance(proof, str) else proof.verdict
    assert verdicts == dict.fromkeys(strategies, "equal to rounding")


OTHERS = """
import torch, flatout
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
def step_of(model, plan, reduction="mean", **more):
    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1], reduction=reduction)
    return flatout.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn, plan, **more)
def data(plan):
    return flatout.batches((X, Y), 16, plan, seed=0)
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.inner(x)
def sums(plan):
    return step_of(net(), plan, "sum", count_terms=lambda batch: None), data(plan)
def averages(plan):
    return step_of(Averaging(), plan), data(plan)
def whole_batches(plan):
    return step_of(net(), plan), DataLoader(TensorDataset(X, Y), 16)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("sums", "equal to rounding"),
        ("averages", "different: weights differ by"),  # the buffer is that of rank 0's share
        ("whole_batches", "a rank has a batch of 16 samples; a batch has 16 in one process, and ddp gives each rank"),
    ],
)
def test_what_two_ranks_do_otherwise_is_found(tmp_path: Path, name: str, verdict: str) -> None:
    (tmp_path / "others.py").write_text(OTHERS)
    request = StrategiesRequest(spec=f"{tmp_path / 'others.py'}:{name}", ranks=2, plan=Plan(), budget_seconds=600)
    with work_folder() as folder:
        setup = TrialSetup(target=trainer(folder), work_folder=folder)
        choosing = _Choosing(request, detect(), setup, Deadline(600), lambda text: None)
        choosing._facts = choosing._found_facts()
        choosing._plans["ddp"] = planned_for(Plan(), "ddp", 2, 16)
        proof = choosing._proof("ddp")
    assert (proof if isinstance(proof, str) else f"{proof.verdict}: {proof.reason}").startswith(verdict)


@pytest.mark.slow
def test_a_choice_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    done = said_by(tmp_path, "tune", "--devices", "2", "--budget", "60s", "net.py:make")
    assert done.returncode == 0, done.stderr
    assert "net.py:make: GPT2 with" in done.stdout
    assert "ddp" in done.stdout
    assert (tmp_path / "flatout-report.json").exists()
