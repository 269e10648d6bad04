"""Files that earlier versions wrote are read: a sample of every format and schema, as it was written then.

A new schema adds a sample here, and the old ones stay.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.errors import MachineError, UsageError
from flatout.infer.prediction.result_files import open_results
from flatout.machine import kept_ceilings
from flatout.machine.ceilings import Ceilings
from flatout.machine.detect import detect
from flatout.machine.kept_ceilings import load_ceilings, save_ceilings
from flatout.plan import read_plan
from flatout.plan_document import SCHEMA as PLAN_SCHEMA
from flatout.private_details import arguments_digest
from flatout.profiling.profile import Profile
from flatout.report.compare import compare_sides
from flatout.report.document import read_document
from flatout.serve.run_folder import read_run
from flatout.timing import Measurement
from flatout.tuning.history import _trials

FORMATS = Path(__file__).parent / "recorded" / "formats"
PREDICTED_OF = {"model": "net.py:make", "inputs": "images.npz"}


def test_there_is_a_plan_of_every_schema() -> None:
    assert {path.name for path in FORMATS.glob("plan-*")} == {f"plan-{n}.toml" for n in range(1, PLAN_SCHEMA + 1)}


def test_plans_with_arguments_in_full_are_for_the_same_arguments() -> None:
    first, second, third, fourth = (read_plan(FORMATS / f"plan-{n}.toml") for n in (1, 2, 3, 4))
    assert first.choices() == {"precision": "bf16", "micro_batches": 4}
    assert (first.exactness, first.reasons["micro_batches"]) == ("bit-identical", "fits into 8 GiB")
    assert second.choices() == {"threads": 2, "memory_format": "channels_last"}
    digest = arguments_digest(["--epochs", "3"])
    assert first.arguments_digest == second.arguments_digest == digest
    assert (third.argv, third.arguments_digest) == ((), arguments_digest(()))
    assert third.sources == ()
    assert fourth.sources == ("sha256:0d1f3a5b7c9e2468 train.py", "sha256:13579bdf02468ace net/blocks.py")


@pytest.mark.parametrize("kind", ["run", "tune", "check", "memory", "profile", "run-state", "watch"])
def test_documents(kind: str) -> None:
    found = read_document(FORMATS / f"{kind}-1.json", kind)
    assert found["flatout"]["schema"] == 1


def test_a_profile_is_read_back() -> None:
    found = Profile.from_json(read_document(FORMATS / "profile-1.json", "profile")["profile"])
    assert (found.steps, found.device, found.flops) == (2, "cpu", 622592.0)
    assert found.parts is not None
    assert {row.path for row in found.modules} == {"Net", "Net.first", "Net.last"}


def test_a_run_can_be_compared_with_one_of_an_earlier_version() -> None:
    run = read_document(FORMATS / "run-1.json")
    found = compare_sides([run], [run])
    assert found.baseline == (Measurement.from_json(run["measurement"]),)
    assert run["script"] == {
        "name": "train.py",
        "arguments": None,
        "arguments_digest": arguments_digest(["--epochs", "1"]),
        "status": 0,
    }


def test_the_state_of_a_run_that_an_earlier_version_started(tmp_path: Path) -> None:
    shutil.copy(FORMATS / "run-state-1.json", tmp_path / "state.json")
    state = read_run(tmp_path).state
    assert (state.steps, state.epoch and state.epoch.steps_total) == (1234, 500)
    assert [one.name for one in state.findings] == ["starved"]


def test_the_history_of_tunes() -> None:
    trials = _trials((FORMATS / "tunes-1.json").read_text())
    assert "fused optimizer" in {one.choice for one in trials}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ceilings.json"
    monkeypatch.setattr(kept_ceilings, "_cache_file", lambda machine, device: path)
    return path


def test_ceilings(kept: Path) -> None:
    """Also those from before the file had a schema."""
    text = (FORMATS / "ceilings-1.json").read_text()
    found = []
    for document in (json.loads(text), {name: value for name, value in json.loads(text).items() if name != "schema"}):
        kept.write_text(json.dumps(document))
        found.append(load_ceilings(detect(), "cpu"))
    assert isinstance(found[0], Ceilings)
    assert found[0] == found[1]
    save_ceilings(detect(), found[0])
    assert json.loads(kept.read_text()) == json.loads(text)


def test_ceilings_of_a_newer_version_are_left_alone(kept: Path) -> None:
    kept.write_text((FORMATS / "ceilings-1.json").read_text())
    old = load_ceilings(detect(), "cpu")
    assert old is not None
    newer = json.dumps({"schema": 2, "products": {}})
    kept.write_text(newer)
    assert load_ceilings(detect(), "cpu") is None
    with pytest.raises(MachineError, match=r"was written by a newer Flatout \(schema 2; this one reads 1\); upgrade"):
        save_ceilings(detect(), old)
    assert kept.read_text() == newer


def test_a_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(FORMATS / "checkpoint-1", tmp_path / "saved")
    net = torch.nn.Linear(3, 2)
    step = flatout.TrainStep(net, torch.optim.Adam(net.parameters(), lr=0.1), flatout.supervised(torch.nn.MSELoss()))
    loaded = flatout.Checkpoints(tmp_path / "saved").load()
    assert loaded is not None
    flatout.restore(loaded, step, generators=False)
    assert step.steps == 1
    torch.testing.assert_close(net.weight[0], torch.tensor([0.0957, 0.4097, -0.3752]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["predictions-1.jsonl", "predictions-1"])
@pytest.mark.parametrize("stated", [True, False])
def test_predictions_are_gone_on_with(name: str, stated: bool, tmp_path: Path) -> None:
    """Also those from before run.json had a schema."""
    note = _copied(name, tmp_path)
    if not stated:
        note.write_text(json.dumps(PREDICTED_OF))
    results = open_results(tmp_path / name, PREDICTED_OF, restart=False)
    assert (results.done, results.failed) == (2, 0)
    results.close()


@pytest.mark.parametrize("name", ["predictions-1.jsonl", "predictions-1"])
@pytest.mark.parametrize("schema", [2, "2", None, [2]])
def test_predictions_of_a_newer_version_are_left_alone(name: str, schema: Any, tmp_path: Path) -> None:
    note = _copied(name, tmp_path)
    note.write_text(json.dumps({"schema": schema, **PREDICTED_OF}))
    with pytest.raises(UsageError, match=r"holds results of a newer Flatout, schema .*; update Flatout"):
        open_results(tmp_path / name, PREDICTED_OF, restart=False)


def _copied(name: str, folder: Path) -> Path:
    """The results in `folder`; returns the path of their run.json."""
    if (FORMATS / name).is_dir():
        shutil.copytree(FORMATS / name, folder / name)
        return folder / name / "run.json"
    for path in FORMATS.glob(f"{name}*"):
        shutil.copy(path, folder)
    return folder / f"{name}.run.json"
