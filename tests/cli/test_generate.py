"""flatout generate from the command line: texts on stdout, figures on stderr, errors with their remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main

SOURCE = """
import torch
from flatout.models import GPT2, GPT2Config

class Letters:
    def encode(self, text):
        return [ord(letter) % 65 for letter in text]

    def decode(self, ids):
        return "".join(chr(65 + one % 26) for one in ids)

letters = Letters()

def model():
    torch.manual_seed(0)
    print("made")
    return GPT2(GPT2Config(vocab_size=65, max_tokens=64, width=32, heads=2, layers=1)).eval()
"""
MODEL = "net_to_speak.py:model"
TOKENIZER = ["--tokenizer", "net_to_speak.py:letters"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "net_to_speak.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("net_to_speak", None)


def test_one_prompt_is_shown_and_nothing_else(capsys: Any) -> None:
    assert main(["generate", MODEL, "--prompt", "1,2,3", "--max-new-tokens", "5"]) == 0
    told = capsys.readouterr()
    assert len(told.out.split()) == 5
    assert "5 tokens for 1 prompt · " in told.err


def test_texts_of_several_prompts_and_as_lines(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"you"\n{"prompt": "me"}\n{"input_ids": [1, 2]}\n')
    command = ["generate", MODEL, *TOKENIZER, "--prompts", "prompts.jsonl", "--max-new-tokens", "6"]
    assert main([*command, "--weights", "int8", "--out", "made.jsonl", "--temperature", "0.8", "--seed", "3"]) == 0
    assert capsys.readouterr().out == ""
    rows = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [0, 1, 2]
    assert all(len(row["tokens"]) == len(row["text"]) == 6 for row in rows)
    assert main([*command, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["flatout"]["document"] == "generation"
    assert whole["reasons"] == ["length"] * 3


def test_a_plan_and_what_goes_before_it(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[plan]\nprecision = "bf16"\n')
    command = ["generate", MODEL, "--prompt", "7", "--json", "--plan", "plan.toml"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["storage"] == "bf16"
    assert main([*command, "--weights", "int4"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] == "int4"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prompt", "hello"], "'hello' is a text and there is no tokenizer"),
        ([], "there is no prompt; pass --prompt TEXT or --prompts FILE"),
        (["--prompt", "1,65"], "prompt 0 holds token 65 at place 1; the model's ids are 0 to 64"),
        (["--prompt", "1", "--weights", "int9"], "'int9' is not one of 'int8', 'int4'"),
        (["--prompt", "1", "--top-p", "3", "--temperature", "1"], "top_p is 3.0"),
        (
            ["--prompt", "1", "--plan", "no.toml"],
            "no plan at no.toml; make one with: flatout tune SCRIPT, or for inference: flatout tune-inference",
        ),
        (["--prompts", "none.txt"], "cannot read none.txt"),
        (["--prompt", "a", "--tokenizer", "net_to_speak.py:GPT2Config"], "without encode"),
        (["--prompt", "1", "--out", "none/made.jsonl"], "there is no folder"),
        (["--prompt", ",".join(["1"] * 65)], "prompt 0 has 65 tokens; the model reads prompts of at most 64"),
        (["--prompts", "deep.jsonl"], "deep.jsonl, line 1 is nested too deeply"),
        (["--prompts", "numbers.jsonl"], "numbers.jsonl, line 1 is 5; a prompt is a text, or a list of ids"),
        (["--prompts", "odd.jsonl"], "odd.jsonl, line 2 has 'ids'; a prompt is under 'prompt', 'text', 'input_ids'"),
    ],
)
def test_bad_input_ends_with_code_2_and_no_traceback(options: list[str], told: str, capsys: Any) -> None:
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("numbers.jsonl").write_text("5\n7\n")
    Path("odd.jsonl").write_text('[1]\n{"ids": [1, 2]}\n')
    assert main(["generate", MODEL, *options]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.parametrize("read", ["prompts.txt", MODEL.rpartition(":")[0], "plan.toml"])
def test_texts_replace_no_file_that_is_read(read: str, capsys: Any) -> None:
    Path("prompts.txt").write_text("1,2\n")
    Path("plan.toml").write_text("[plan]\n")
    before = Path(read).read_bytes()
    assert main(["generate", MODEL, "--prompts", "prompts.txt", "--plan", "plan.toml", "--out", read]) == 2
    assert f"--out is {read}; the texts would replace a file that is only read" in capsys.readouterr().err
    assert Path(read).read_bytes() == before


def test_texts_that_cannot_be_written_are_printed(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "net_to_speak.py").write_text(f"{SOURCE}\nimport os\nos.rmdir('gone')\n")
    assert (
        main(["generate", MODEL, *TOKENIZER, "--prompt", "a", "--max-new-tokens", "3", "--out", "gone/made.jsonl"]) == 2
    )
    shown = capsys.readouterr()
    assert "cannot write gone" in shown.err
    assert "--- prompt 0 (length)" in shown.out


def test_a_mark_at_the_start_of_a_file_is_no_part_of_a_prompt(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n", encoding="utf-8-sig")
    found = []
    for options in (["--prompts", "prompts.txt"], ["--prompt", "one"]):
        assert main(["generate", MODEL, *TOKENIZER, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert found == [3, 3]


def test_models_without_a_fast_path(capsys: Any) -> None:
    """One that keeps a state, and an encoder-decoder, which needs to know its first token."""
    Path("net_to_speak.py").write_text(
        "import torch\n"
        "from flatout.models import CharacterGenerator, CharacterGeneratorConfig, Seq2SeqConfig, Seq2SeqTransformer\n"
        "def letters():\n"
        "    config = CharacterGeneratorConfig(vocab_size=9, embedding_width=4, hidden_width=4)\n"
        "    return CharacterGenerator(config).eval()\n"
        "def pairs():\n"
        "    config = Seq2SeqConfig(vocab_size=9, width=8, heads=2, encoder_layers=1, decoder_layers=1)\n"
        "    return Seq2SeqTransformer(config).eval()\n"
    )
    options = ["--prompt", "1,2,3", "--max-new-tokens", "4", "--json"]
    assert main(["generate", "net_to_speak.py:letters", *options]) == 0
    assert json.loads(capsys.readouterr().out)["engine"].endswith("by its state after each token")
    assert main(["generate", "net_to_speak.py:pairs", *options]) == 2
    assert "pass decoder_start_token_id=" in capsys.readouterr().err
    assert main(["generate", "net_to_speak.py:pairs", *options, "--decoder-start-token-id", "1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["tokens"][0]) == 4
    assert "each source is encoded once" in made["engine"]


def test_other_separators_of_lines_are_part_of_a_prompt(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\u2028still one\x0b\x0c\u0085\r\n\ntwo\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('"one\u2028still one"\n\n{"text": "two"}\n', encoding="utf-8")
    for name in ("prompts.txt", "prompts.jsonl"):
        assert main(["generate", MODEL, *TOKENIZER, "--prompts", name, "--max-new-tokens", "2", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["tokens"]) == 2


def test_what_the_model_prints_is_no_part_of_the_text(capsys: Any) -> None:
    Path("net_to_speak.py").write_text(
        "import torch\n"
        "class Loud(torch.nn.Module):\n"
        "    def forward(self, tokens):\n"
        "        print('forward')\n"
        "        return torch.nn.functional.one_hot((tokens + 1) % 9, 9).float()\n"
    )
    options = ["--prompt", "1,2,3", "--max-new-tokens", "3"]
    assert main(["generate", "net_to_speak.py:Loud", *options]) == 0
    told = capsys.readouterr()
    assert told.out.split() == ["4", "5", "6"]
    assert "forward" in told.err
    assert main(["generate", "net_to_speak.py:Loud", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [[4, 5, 6]]


@pytest.mark.parametrize("options", [["--json"], ["--out", "/dev/null"]])
def test_what_code_in_c_prints_is_not_in_the_answer(tmp_path: Path, capfd: Any, options: list[str]) -> None:
    loud = """
import os

class Loud(GPT2):
    def forward(self, *args, **kwargs):
        os.write(1, b"from C")
        return super().forward(*args, **kwargs)

def loud():
    os.write(1, b"from C")
    return Loud(GPT2Config(vocab_size=65, max_tokens=64, width=32, heads=2, layers=1)).eval()
"""
    (tmp_path / "net_to_speak.py").write_text(SOURCE + loud)
    command = ["generate", "net_to_speak.py:loud", "--prompt", "1,2", "--max-new-tokens", "2", *options]
    assert main(command) == 0
    said = capfd.readouterr()
    assert "from C" in said.err
    assert "from C" not in said.out


def test_figures_never_get_into_the_document(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["generate", MODEL, "--prompt", "1,2", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reasons"] == ["length"]
