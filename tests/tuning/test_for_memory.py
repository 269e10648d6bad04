"""A lever for memory is kept where it is faster, asked for, or where memory is short; a figure stands by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.levers.activation_offload import ActivationOffload
from flatout.levers.chunked_loss import ChunkedLoss
from flatout.levers.lever import Choice
from flatout.machine.description import Cpu, Gpu, Machine, Versions
from flatout.machine.detect import detect
from flatout.plan import Plan
from flatout.report.tune_text import tune_text
from flatout.script.entry import Target
from flatout.script.trial.answers import Peak
from flatout.statistics import Comparison
from flatout.tuning import training_search, verifier
from flatout.tuning.fitting import judge_gain
from flatout.tuning.script_tuning import TuneRequest, tune_script
from flatout.tuning.windows import Pairing

CHOICE = Choice(ChunkedLoss(), "chunked")
HERE = Machine(
    fingerprint="f",
    cpu=Cpu(name="c", model_id="m", physical_cores=1, logical_cores=1, available_cores=1, fast_dtypes=("fp32",)),
    memory_total_bytes=1000,
    memory_available_bytes=900,
    devices=(Gpu(name="g", index=0, memory_total_bytes=100),),
    versions=Versions(python="3", operating_system="o", flatout="0", torch="2.13.0"),
)


def peak(size: int | None, resident: int = 10, why: str = "") -> Peak:
    return Peak(peak_bytes=size, resident_bytes=resident, incidents={CHOICE.lever.name: why} if why else {})


@pytest.mark.parametrize(
    ("before", "after", "device", "asked", "outcome", "reason"),
    [
        (peak(80), peak(40), "cpu", False, "dropped", 'put loss = "chunked" under [plan]'),
        (peak(80), peak(40), "cpu", True, "kept", "asked for"),
        (peak(80), peak(78), "cpu", True, "dropped", "hardly any memory"),
        (peak(80, resident=900), peak(40), "cpu", False, "kept", "memory is short: 900 B of"),
        (peak(90), peak(40), "cuda:0", False, "kept", "memory is short: 90 B of 100 B"),
        (peak(90), peak(40), "cuda:1", False, "dropped", "[plan]"),
        (peak(None), peak(None), "cuda:0", False, "dropped", "[plan]"),
        (peak(None), peak(None), "cpu", True, "kept", "asked for"),
        (peak(80), peak(40, why="used by 'argmax'"), "cpu", True, "dropped", "used by 'argmax'"),
    ],
)
def test_what_is_kept(before: Peak, after: Peak, device: str, asked: bool, outcome: str, reason: str) -> None:
    found = judge_gain(before, after, CHOICE, HERE, device, asked=asked)
    assert found[0] == outcome
    assert reason in found[1]


OFFLOADED = Choice(ActivationOffload(), True)


def test_the_line_for_a_plan_is_one_that_a_plan_takes() -> None:
    _, reason = judge_gain(peak(80), peak(40), OFFLOADED, HERE, "cpu", asked=False)
    text = reason.removeprefix("not faster; to save memory, put ").removesuffix(" under [plan]")
    assert Plan.from_toml(f"[plan]\n{text}\n").choices() == OFFLOADED.choices


SCRIPT = """
import torch
from torch.nn import functional
torch.set_num_threads(1)
torch.manual_seed(0)
embed, head = torch.nn.Embedding(2048, 4), torch.nn.Linear(4, 2048)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
x = torch.randint(0, 2048, (1, 512))
while True:
    logits = head(embed(x))
    loss = functional.cross_entropy(logits.view(-1, 2048), x.roll(1, 1).view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def finding(ratio: float, compare: Callable[..., Pairing]) -> Callable[..., Pairing]:
    """`compare`, which finds this ratio whatever the machine does."""
    found = Comparison(
        ratio=ratio,
        low=ratio - 0.05,
        high=ratio + 0.05,
        confidence=0.95,
        pairs=6,
        verdict="faster" if ratio > 1 else "slower",
    )
    return lambda *args, **words: replace(compare(*args, **words), comparison=found)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials", "brief")
@pytest.mark.parametrize("ratio_in_search", [0.9, 1.2])
def test_a_plan_that_asks_for_it_is_verified_with_its_bytes_though_it_is_slower(
    ratio_in_search: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_search, "compare_arms", finding(ratio_in_search, training_search.compare_arms))
    monkeypatch.setattr(verifier, "compare_afresh", finding(0.8, verifier.compare_afresh))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    request = TuneRequest(target=Target(path="train.py"), budget_seconds=300, only=(("loss", "chunked"),))
    result = tune_script(request, detect())
    (trial,) = result.state.trials
    assert trial.outcome == "kept", trial.reason
    assert trial.baseline_peak_bytes is not None
    assert trial.candidate_peak_bytes is not None
    scores = 512 * 2048 * 4
    assert trial.baseline_peak_bytes - trial.candidate_peak_bytes > scores
    assert result.plan.choices() == {"loss": "chunked"}
    assert "x0.80" in tune_text(result)
    assert result.proof is not None
    assert result.proof.verdict == "within rounding"
    assert "peak" in tune_text(result)
