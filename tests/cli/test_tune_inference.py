"""flatout tune-inference on small models, with nothing tried, so that it ends at once."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest

from flatout.__main__ import main
from flatout.plan import read_plan

MODELS = """
import torch
from torch import nn
from flatout.models import GPT2, GPT2Config

def net():
    print("made")
    torch.manual_seed(0)
    return nn.Linear(8, 3)

def gpt():
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=20, max_tokens=32, width=16, heads=2, layers=1))

class Ids:
    def __init__(self, ids):
        self.ids = ids

class Letters:
    def encode(self, text):
        return Ids([ord(letter) % 20 for letter in text])

    def decode(self, ids):
        return str(ids)

print("read")
letters = Letters()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.py").write_text(MODELS)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(6, 8)).astype("f4"))
    (tmp_path / "prompts.jsonl").write_text("[1, 2, 3]\n[4, 5]\n")
    return tmp_path


def test_it_shows_the_table_and_writes_a_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune-inference", "served.py:net", "x.npy", "--exactness", "bit-identical", "--items", "9"]) == 0
    shown = capsys.readouterr().out
    assert "Linear · predict: guessed" in shown
    assert "bf16: it is reduced, and exactness is bit-identical" in shown
    assert "next: flatout predict served.py:net x.npy --out RESULTS.jsonl --plan flatout-inference.toml" in shown
    plan = read_plan(place / "flatout-inference.toml")
    assert plan.choices() == {}
    assert plan.machine_fingerprint
    assert "flatout run" not in plan.to_toml()


def test_one_document_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tune-inference",
        "served.py:gpt",
        "prompts.jsonl",
        "--exactness",
        "bit-identical",
        "--max-new-tokens",
        "4",
    ]
    assert main([*words, "--json", "--out", "p.toml", "--max-error", "inf"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["flatout"]["document"] == "tune-inference"
    assert (told["task"], told["unit"]) == ("generate", "prompt")
    assert told["tolerance"]["max_error"] is None
    assert (place / "p.toml").is_file()


@pytest.mark.parametrize(
    ("name", "tokenizer"), [("ragged.npz", []), ("ids.npy", []), ("texts.jsonl", ["--tokenizer", "served.py:letters"])]
)
def test_the_next_command_can_be_run(
    name: str, tokenizer: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(place / "ragged.npz", tokens=np.array([1, 2, 3, 4, 5]), lengths=np.array([3, 2]))
    np.save(place / "ids.npy", np.array([[1, 2, 3], [4, 5, 6]]))
    (place / "texts.jsonl").write_text('{"text": "one"}\n{"prompt": "two"}\n')
    words = ["tune-inference", "served.py:gpt", name, *tokenizer, "--exactness", "bit-identical"]
    assert main([*words, "--max-new-tokens", "4"]) == 0
    command = capsys.readouterr().out.rpartition("next: ")[2]
    program, *following = shlex.split(command)
    assert (program, following[0]) == ("flatout", "generate")
    assert main([*following, "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.count("--- prompt") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["served.py:net", "x.npy", "--out", "no/where.toml"], "there is no folder"),
        (["served.py:net", "x.npy", "--out", "x.npy"], "the plan would replace a file that is only read"),
        (["served.py:net", "x.npy", "--out", "./served.py"], "the plan would replace a file that is only read"),
        (["served.py:net", "x.npy", "--exactness", "sloppy"], "'sloppy' is not one of"),
        (["served.py:net", "x.npy", "--task", "train"], "'train' is not one of 'predict', 'generate'"),
        (["served.py:net", "nothing.npy"], "nothing.npy"),
        (
            ["served.py:net", "x.npy", "--plan", "no.toml"],
            "no plan at no.toml; make one with: flatout tune SCRIPT, or for inference: flatout tune-inference",
        ),
    ],
)
def test_what_cannot_be_used(place: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["tune-inference", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (place / "flatout-inference.toml").exists()


def test_a_folder_that_takes_no_file_is_named_before_anything_is_measured(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert main(["tune-inference", "served.py:net", "x.npy"]) == 2
    assert f"{place} takes no file; results are written to a file; name another with --out" in capsys.readouterr().err


def test_a_plan_that_cannot_be_saved_is_printed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "gone").mkdir()
    (place / "served.py").write_text(f"{MODELS}\nimport os\nos.rmdir('gone')\n")
    words = ["--exactness", "bit-identical", "--out", "gone/plan.toml"]
    assert main(["tune-inference", "served.py:net", "x.npy", *words]) == 2
    said = capsys.readouterr().err
    assert "the plan could not be saved; here it is:\n\n#" in said
    assert "\n[plan]\n" in said
    assert "cannot write the plan gone" in said


def test_a_sample_that_cannot_be_read_is_named_with_its_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "prompts.jsonl").write_text("[1, 2, 3]\n[4, 5\n")
    assert main(["tune-inference", "served.py:gpt", "prompts.jsonl"]) == 2
    assert "error: prompts.jsonl, line 2: the line is not JSON" in capsys.readouterr().err
