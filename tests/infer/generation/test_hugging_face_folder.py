"""A folder as transformers saves it, with its tokeniser: prompts, streams and stops as text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from flatout.errors import UsageError
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.infer.model_source import load_model
from flatout.infer.tokenizer_source import load_tokenizer, tokenizer_beside

transformers = pytest.importorskip("transformers")

TEXT = Path(json.__file__).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE learnt from Python's own source, and a GPT-2 with random weights."""
    from tokenizers import ByteLevelBPETokenizer

    where = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator([TEXT], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learnt._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    words.save_pretrained(where)
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=400, n_positions=96, n_embd=48, n_layer=2, n_head=3, eos_token_id=0, bos_token_id=0
    )
    config.initializer_range = 0.3
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(where)
    return where


def test_the_folder_gives_model_and_tokeniser(folder: Path) -> None:
    network, _ = load_model(str(folder))
    words = tokenizer_beside(str(folder))
    generator = TokenGenerator(network, tokenizer=words)
    prompts = ["def dumps(obj,", "naïve – 日本"]
    made = generator.generate(prompts, max_new_tokens=30)
    assert made.texts is not None
    for prompt, tokens, text in zip(prompts, made.tokens, made.texts, strict=True):
        before = words.encode(prompt)
        whole = words.decode(before + tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text == whole[len(prompt) :]
    pieces: dict[int, str] = {0: "", 1: ""}
    for piece in generator.stream(prompts, max_new_tokens=30):
        pieces[piece.prompt] += piece.text or ""
    assert list(pieces.values()) == made.texts
    stop = made.texts[0][6:9]
    cut = generator.generate(prompts[:1], max_new_tokens=30, stop=stop)
    assert cut.texts == [made.texts[0][: made.texts[0].index(stop)]]
    assert cut.reasons == ["stop"]


def test_from_the_command_line(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["generate", str(folder), "--prompt", "import json", "--max-new-tokens", "12", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["texts"][0]) > 0
    assert made["engine"]


def test_a_folder_without_a_tokeniser(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no tokenizer; it has one of"):
        load_tokenizer(str(tmp_path))
    assert tokenizer_beside(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
