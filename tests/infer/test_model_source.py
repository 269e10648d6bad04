"""A model from what a person types, and every way of typing it wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.errors import UsageError
from flatout.infer.model_source import load_model
from flatout.infer.tokenizer_source import load_tokenizer

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn
from neighbour_of_a_net import WIDTH

@dataclass
class Sizes:
    width: int = WIDTH

class Net(nn.Linear):
    def __init__(self, width=WIDTH):
        super().__init__(width, 2)

class Holder:
    inner = Net(3)

class Needy(nn.Module):
    def __init__(self, width, depth):
        super().__init__()

ready = Net()
pair = (Net(), (torch.zeros(1, WIDTH),))

def make():
    return Net(), {"input": torch.ones(2, WIDTH)}

def fails():
    return Net("wide")

def leaves():
    raise SystemExit(3)

def wrong():
    return 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "some_net.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_a_net.py").write_text("WIDTH = 5")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["ready", "Net", "make", "pair", "Holder.inner"])
@pytest.mark.parametrize("source", ["some_net.py", "some_net"])
def test_a_name_in_a_file_or_module(folder: Path, source: str, name: str) -> None:
    model, example = load_model(f"{source}:{name}")
    assert isinstance(model, nn.Linear)
    assert (example is not None) == (name in ("make", "pair"))
    if name == "make":
        assert torch.equal(example["input"], torch.ones(2, 5))  # type: ignore[index]


def test_one_file_is_loaded_once(folder: Path) -> None:
    assert load_model("some_net.py:ready")[0] is load_model(f"{folder}/some_net.py:ready")[0]
    assert load_model("some_net:ready")[0] is load_model("some_net.py:ready")[0]


def test_a_file_named_like_a_library(folder: Path) -> None:
    (folder / "json.py").write_text("from torch import nn\nmodel = nn.Identity()\n")
    import json

    assert isinstance(load_model("json.py:model")[0], nn.Identity)
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("some_net.py", r"the model is 'some_net.py'.* as in some_net.py:wrong; the file defines Sizes, Net, Holder"),
        ("missing.py:net", "no such file: missing.py"),
        ("some_net.py:", "the model is 'some_net.py:'"),
        ("no.such.module:net", "no module named 'no.such.module'"),
        ("not a module:net", "no such file or module: 'not a module'"),
        ("some_net.py:redy", "some_net.py has no 'redy'.*did you mean ready"),
        ("some_net.py:zzz", "some_net.py has no 'zzz'.*it has Sizes, Net"),
        ("some_net.py:Needy", "Needy needs width, depth.*without arguments.*def model"),
        ("some_net.py:fails", r"calling some_net.py:fails failed at some_net.py, line 13: super.*Error"),
        ("some_net.py:leaves", r"failed at some_net.py, line 32: raise SystemExit\(3\): SystemExit: 3"),
        ("some_net.py:wrong", "gives 7; it is an nn.Module"),
        ("some_net.py:Sizes", "gives a Sizes"),
        ("", "the model is ''; a model is named file.py:name"),  # as of a variable of a shell that is not set
        (".", r"\. is a folder without config.json"),
    ],
)
def test_what_cannot_be_loaded_says_why(folder: Path, spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){says}"):
        load_model(spec)


def test_a_file_that_fails_names_its_line_and_leaves_no_module(folder: Path) -> None:
    (folder / "broken_net.py").write_text("import torch\nx = torch.zeros(2) @ torch.zeros(3)\n")
    with pytest.raises(UsageError, match=r"loading broken_net.py failed at broken_net.py, line 2: x = .*RuntimeError"):
        load_model("broken_net.py:x")
    assert "broken_net" not in sys.modules
    (folder / "unreadable_net.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"unreadable_net.py, line 1: SyntaxError"):
        load_model("unreadable_net.py:x")


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model, example = load_model(str(tmp_path))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert example is not None
    assert example["input_ids"].dtype is torch.int64
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UsageError, match=r"reading .* failed"):
        load_model(str(tmp_path))


def test_a_tokenizer_is_made_like_a_model(folder: Path) -> None:
    (folder / "some_words.py").write_text(
        "class Words:\n"
        "    def encode(self, text):\n        return [len(word) for word in text.split()]\n"
        "    def decode(self, ids):\n        return ' '.join('x' * one for one in ids)\n"
        "def made():\n    return Words()\n"
        "def sized(size):\n    return Words()\n"
        "def broken():\n    raise OSError('no words here')\n"
    )
    for name in ("Words", "made"):
        assert load_tokenizer(f"some_words.py:{name}").encode("a bb") == [1, 2]
    with pytest.raises(UsageError, match=r"sized needs size; it is called without arguments; .* def tokenizer"):
        load_tokenizer("some_words.py:sized")
    with pytest.raises(UsageError, match=r"calling some_words.py:broken failed at .*line 11.*no words here"):
        load_tokenizer("some_words.py:broken")
    for absent in ("words.json", "absent.py:words", "absent_words:made"):
        with pytest.raises(UsageError, match=r"a tokenizer is named .* or a folder with a Hugging Face tokenizer"):
            load_tokenizer(absent)
