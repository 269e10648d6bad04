"""`flatout predict` as a person meets it: results in place, the document, bad inputs, bad choices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flatout.__main__ import main
from flatout.models import Bert, BertConfig

NET = """
import torch
from flatout.models import Bert, BertConfig
def bert():
    print("loading")
    torch.manual_seed(0)
    return Bert(BertConfig(vocab_size=40, max_tokens=16, width=32, heads=2, layers=2))
class Letters:
    def encode(self, text): return [ord(letter) % 40 for letter in text]
    def decode(self, ids): return str(ids)
letters = Letters()
class Ids:
    def __init__(self, ids): self.ids = ids
class Encoding(Letters):
    def encode(self, text): return Ids(super().encode(text))
encoding = Encoding()  # as those of the tokenizers library
print("read")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig(vocab_size=40, max_tokens=16, width=32, heads=2, layers=2)).eval()


def test_results_are_those_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [[1, 2, 3], [39], list(range(16))]
    (folder / "in.jsonl").write_text("".join(f"{one}\n" for one in inputs))
    assert main(["predict", "net.py:bert", "in.jsonl", "--out", "out", "--keep", "hidden", "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["flatout"]["document"] == "predict"
    assert document["figures"]["items"] == 3
    assert document["failed_in_all"] == 0
    assert "loading" in said.err
    (file,) = (folder / "out").glob("results-*")
    found = load_file(file)
    for index, tokens in enumerate(inputs):
        with torch.no_grad():
            right = bert()(torch.tensor([tokens])).hidden[0]
        torch.testing.assert_close(found[str(index)], right, atol=1e-5, rtol=1e-4)


def test_texts_and_bad_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "in.txt").write_text("hello\n\nfar too long for the model\nbye\n")
    words = ["predict", "net.py:bert", "in.txt", "--out", "out.jsonl", "--keep", "pooled", "--precision", "bf16"]
    assert main([*words, "--tokenizer", "net.py:letters"]) == 1
    said = capsys.readouterr()
    assert "4 inputs in" in said.out
    assert "failed    2 inputs" in said.out
    assert "input 1: the input is [0]; it must hold at least 1 token" in said.err
    assert "input 2: the input has 26 tokens; the model has positions for 16; cut it" in said.err
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"index", kind} for kind in ("output", "failed", "failed", "output")]
    assert main([*words, "--tokenizer", "net.py:letters"]) == 1  # nothing is left to do
    assert "0 inputs in" in capsys.readouterr().out


def test_a_tokenizer_that_prints_and_encodes_to_an_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "in.txt").write_text("hello\nbye\n")
    words = ["predict", "net.py:bert", "in.txt", "--out", "out.jsonl", "--keep", "pooled", "--json"]
    assert main([*words, "--tokenizer", "net.py:encoding"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["figures"]["items"] == 2
    assert "read" in said.err


def test_a_run_goes_on_only_with_the_same_weights_code_and_inputs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "net.py:bert", "in.jsonl", "--out", "out.jsonl", "--keep", "pooled"]
    (folder / "in.jsonl").write_text("[1, 2]\n[3, 4]\n")
    assert main(words) == 0
    assert main(words) == 0
    assert "0 inputs in" in capsys.readouterr().out
    first = (folder / "out.jsonl").read_text()
    (folder / "in.jsonl").write_text("[1, 2]\n[3, 5]\n")  # as long as before
    assert main(words) == 2
    assert "out.jsonl holds results with inputs digest '" in capsys.readouterr().err
    (folder / "in.jsonl").write_text("[1, 2]\n[3, 4]\n")
    (folder / "net.py").write_text(NET.replace("manual_seed(0)", "manual_seed(1)"))
    assert main(words) == 2
    assert "out.jsonl holds results with code digest '" in capsys.readouterr().err
    (folder / "net.py").write_text(NET)
    torch.save(bert().state_dict(), folder / "weights.pt")
    loading = NET.replace("layers=2))", "layers=2))\n") + (
        "make = bert\ndef bert():\n    model = make()\n"
        "    model.load_state_dict(torch.load('weights.pt'))\n    return model\n"
    )
    (folder / "net.py").write_text(loading)
    sys.modules.pop("net", None)  # as in a new process
    assert main([*words, "--restart"]) == 0
    changed = {name: 2 * one if one.is_floating_point() else one for name, one in bert().state_dict().items()}
    torch.save(changed, folder / "weights.pt")
    assert main(words) == 2
    assert "out.jsonl holds results with weights digest '" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["net.py:none", "in.jsonl", "--out", "out"], "none"),
        (["net.py:bert", "no.jsonl", "--out", "out"], "cannot read no.jsonl"),
        (["net.py:bert", "in.jsonl", "--out", "out", "--precision", "bf17"], "is not one of 'fp32', 'bf16', 'fp16'"),
        (["net.py:bert", "in.jsonl", "--out", "out", "--activations", "int8"], "set weights = 'int8'"),
        (
            ["net.py:bert", "in.jsonl", "--out", "out", "--keep", "nothing"],
            "the output has no 'nothing'; it has hidden",
        ),
        (["net.py:bert", "in.jsonl", "--out", "out", "--batch-size", "0"], "batch_size is 0"),
        (["net.py:bert", "in.jsonl"], "--out"),
        (
            ["net.py:bert", "in.jsonl", "--out", "out", "--plan", "no.toml"],
            "no plan at no.toml; make one with: flatout tune SCRIPT, or for inference: flatout tune-inference",
        ),
    ],
)
def test_what_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    (folder / "in.jsonl").write_text("[1, 2]\n")
    assert main(["predict", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_hugging_face_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=40, max_position_embeddings=16, num_labels=3)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder / "bert")
    (folder / "in.jsonl").write_text("[5, 6]\n[7]\n[8, 9, 10, 11]\n")
    assert main(["predict", "bert", "in.jsonl", "--out", "out.jsonl", "--keep", "logits"]) == 0
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    with torch.no_grad():
        right = model(torch.tensor([[8, 9, 10, 11]])).logits[0]
    assert lines[2]["output"] == pytest.approx(right.tolist(), abs=1e-4)


def test_what_code_in_c_prints_is_not_in_the_document(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "in.jsonl").write_text("[1, 2, 3]\n")
    (folder / "loud.py").write_text(f"{NET}\nimport os\nos.write(1, b'from C')\n")
    assert main(["predict", "loud.py:bert", "in.jsonl", "--out", "out", "--keep", "hidden", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["figures"]["items"] == 1
    assert "from C" in said.err
