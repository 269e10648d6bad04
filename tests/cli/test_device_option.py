"""--device of every verb that trains or measures: a device that is not there is named before anything else is done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from tests.cli.in_process import said_by
from tests.processes import Python

NET = "import torch\n\ndef model():\n    return torch.nn.Linear(4, 2)\n"
SCRIPT = ["train.py", "--device", "cuda:3"]
"""The script's own option is the script's."""
VERBS = {
    "check": [],
    "tune": SCRIPT,
    "memory": SCRIPT,
    "run": SCRIPT,
    "predict": ["net.py:model", "inputs.npy", "--out", "out.jsonl"],
    "generate": ["net.py:model", "--prompt", "1"],
    "tune-inference": ["net.py:model", "inputs.npy"],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    (tmp_path / "train.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "net.py").write_text(NET)
    np.save(tmp_path / "inputs.npy", np.zeros((3, 4), dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_device_that_is_not_there(verb: str, device: str, capsys: Any) -> None:
    assert main([verb, "--device", device, *VERBS[verb]]) == 2
    said = capsys.readouterr()
    assert f"'{device}'" in said.err
    assert "cpu" in said.err
    assert "it ran" not in said.err


def test_check_without_a_gpu_to_be_seen(tmp_path: Path) -> None:
    seen = said_by(tmp_path, "check", "--device", "cpu", "--json")
    assert json.loads(seen.stdout)["machine"]["devices"] == []


def test_the_next_command_names_it(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from flatout.cli.tune import _run_in, _saved, _seeing

    result: Any = SimpleNamespace(fits=True)
    command = [*_seeing("cuda:1"), "train.py", "7"]
    for ranks, said in ((None, "flatout run"), (2, "torchrun --nproc-per-node 2 -m flatout run")):
        found = _saved(result, tmp_path, [*_run_in(ranks), *command])
        assert found.endswith(f"next: {said} --device cuda:1 train.py 7")


def test_a_script_sees_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "train.py").write_text("import os\nraise ValueError(os.environ['CUDA_VISIBLE_DEVICES'] or 'none')\n")
    assert "ValueError: none" in said_by(tmp_path, "memory", "--device", "cpu", "train.py").stderr
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_a_plan_for_the_cpu_shows_the_script_no_gpu(tmp_path: Path, python: Python) -> None:
    (tmp_path / "plan.toml").write_text('schema = 2\n[plan]\ndevice = "cpu"\n')
    (tmp_path / "train.py").write_text("import os\nprint(repr(os.environ['CUDA_VISIBLE_DEVICES']))\n")
    ran = python(
        "-m", "flatout", "run", "--quiet", "--plan", "plan.toml", "--trust-plan", "train.py",
        cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert ran.stdout == "''\n"
