"""A whole tune with several devices: the number that it chooses, and one that it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.report.tune_text import tune_payload, tune_text
from flatout.script.entry import Target
from flatout.tuning.devices.choosing import DevicesAsked
from flatout.tuning.results import Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs namespaces of Linux"),
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_trials", "brief"),
]

SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(0)


class Slow(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(256, 8), torch.randint(3, (256,))

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.01)  # the busiest machine does not hide it
        return self.x[index], self.y[index]


model = nn.Sequential(nn.Linear(8, 4), LAYER, nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
open("written-by-the-script.txt", "w").write("x")
while True:
    for x, y in DataLoader(Slow(), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def tuned(folder: Path, layer: str, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Without levers: what is faster is faster by its devices."""
    (user := folder / "user").mkdir()
    monkeypatch.chdir(user)
    (user / "train.py").write_text(SCRIPT.replace("LAYER", layer))
    (folder / "levers.py").write_text("LEVERS = ()\n")
    request = TuneRequest(
        target=Target(path="train.py"),
        budget_seconds=400,
        levers=f"{folder / 'levers.py'}:LEVERS",
        devices=DevicesAsked(most=2),
    )
    found = tune_script(request, detect())
    assert [entry.name for entry in user.iterdir()] == ["train.py"]
    return found


def test_the_number_that_is_faster_and_proved_is_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(tmp_path, "nn.Tanh()", monkeypatch)
    assert found.devices is not None
    assert found.devices.chosen == 2, found.devices
    # on a busy machine what ranks exchange may not be measurable, and nothing is predicted then
    assert (found.devices.trials[0].predicted is None) == (found.devices.exchange is None)
    assert found.devices.proof is not None
    assert found.devices.proof.samples_equal
    assert found.plan.choices() == {"devices": 2}
    assert found.plan.exactness == "rounding"
    assert "on 2 devices over one" in tune_text(found)
    assert tune_payload(found)["devices"] == found.devices.to_json()


def test_one_that_cannot_be_shared_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(tmp_path, "nn.BatchNorm1d(4)", monkeypatch)
    assert found.devices is not None
    assert (found.devices.chosen, [one.outcome for one in found.devices.trials]) == (1, ["refused"])
    assert "use GroupNorm or LayerNorm" in tune_text(found)
    assert found.plan.choices() == {}
