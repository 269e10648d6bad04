"""A search meets levers that are wrong, slow, broken, hanging or leaking: each goes for the right reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.tuning.script_tuning import TuneRequest, tune_script

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
    time.sleep(0.01)  # the busiest machine does not hide it
"""


REASONS = [
    ("slower", "dropped", "slower"),
    ("raises", "failed", "planted failure"),
    ("raises in backward", "failed", "planted failure of a backward pass"),
    ("hangs", "failed", "hangs"),
    ("leaks", "failed", "leaks memory"),
    ("corrupts gradients", "failed", "numbers: from the same gradients the optimizer's update of"),
    ("helps", "kept", "faster"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials", "brief")
def test_each_planted_lever_goes_for_its_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, because one tune gives all of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    levers = f"{Path(__file__).parent / 'planted_levers.py'}:LEVERS"
    request = TuneRequest(target=Target(path="train.py"), budget_seconds=200, levers=levers, hang_floor_seconds=5.0)
    result = tune_script(request, detect())
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]
    trials = {trial.label: trial for trial in result.state.trials}
    for label, outcome, reason in REASONS:
        assert (trials[label].outcome, reason in trials[label].reason) == (outcome, True), trials[label].reason
    assert result.proof is not None
    assert result.proof.verdict == "bit-identical"
    assert result.final is not None
    assert result.final.comparison.verdict == "faster"
    assert list(result.plan.choices()) == ["cudnn_benchmark"]
