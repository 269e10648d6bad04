"""A search meets levers that are wrong, slow, broken, hanging or leaking: each goes for the right reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.tune.tune import TuneRequest, TuneResult, tune

SCRIPT = """
import time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(16, 8), torch.randn(16, 4)
open("written-by-the-script.txt", "w").write("x")
while True:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.004)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    folder = tmp_path_factory.mktemp("planted")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    levers = Path(__file__).parent / "planted_levers.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        request = TuneRequest(
            target=Target(path="train.py"), budget_seconds=120, levers=f"{levers}:LEVERS", hang_floor_seconds=3.0
        )
        found = tune(request, detect())
    assert [entry.name for entry in folder.iterdir()] == ["train.py"]
    return found


@pytest.mark.parametrize(
    ("label", "outcome", "reason"),
    [
        ("slower", "dropped", "slower"),
        ("raises", "failed", "planted failure"),
        ("raises in backward", "failed", "planted failure of a backward pass"),
        ("hangs", "failed", "hangs"),
        ("leaks", "failed", "leaks memory"),
        ("corrupts gradients", "failed", "numbers: from the same gradients the optimizer's step moves"),
        ("helps", "kept", "faster"),
    ],
)
def test_each_planted_lever_goes_for_its_own_reason(result: TuneResult, label: str, outcome: str, reason: str) -> None:
    trial = next(trial for trial in result.state.trials if trial.label == label)
    assert (trial.outcome, reason in trial.reason) == (outcome, True), trial.reason


def test_the_rest_is_proved_and_faster(result: TuneResult) -> None:
    assert result.proof is not None
    assert result.proof.verdict == "bit-same"
    assert result.final is not None
    assert result.final.comparison.verdict == "faster"
    assert list(result.plan.choices()) == ["cudnn_benchmark"]
