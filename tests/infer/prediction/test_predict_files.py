"""Inputs from files, results on the disk, and a run that goes on after SIGKILL."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import nn

from flatout.cli.main import main
from flatout.errors import UsageError
from flatout.infer.input_files import open_inputs
from flatout.infer.prediction.predict import Predictor
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.result_files import kept, named_values, open_results
from flatout.infer.tokenizer_source import encode_of


def listed(path: Path, start: int = 0, **options: Any) -> list[Any]:
    return [np.asarray(one).tolist() for one in open_inputs(path, **options).begin(start)]


def test_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    assert listed(tmp_path / "a.npy") == [[0, 1], [2, 3], [4, 5]]
    assert listed(tmp_path / "a.npy", start=2) == [[4, 5]]
    np.savez(tmp_path / "b.npz", tokens=np.arange(6), lengths=np.array([1, 3, 2]))
    assert listed(tmp_path / "b.npz") == [[0], [1, 2, 3], [4, 5]]
    assert listed(tmp_path / "b.npz", start=1) == [[1, 2, 3], [4, 5]]
    np.save(tmp_path / "foreign.npy", np.arange(6).reshape(2, 3).astype(">i8"))
    assert [torch.as_tensor(row).tolist() for row in open_inputs(tmp_path / "foreign.npy").begin(0)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    save_file({"x": torch.arange(4).view(2, 2), "y": torch.ones(2)}, tmp_path / "c.safetensors")
    rows = list(open_inputs(tmp_path / "c.safetensors").begin(0))
    assert rows[1]["x"].tolist() == [2, 3]
    assert float(rows[1]["y"]) == 1


def test_a_place_that_is_neither_lines_nor_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"to be a.csv; they are NAME.jsonl, or a folder .*--out .*a.jsonl, or --out"):
        open_results(tmp_path / "a.csv", {}, restart=False)
    assert not (tmp_path / "a.csv").exists()
    for name in ("a", "run.2", "there.d"):
        if name == "there.d":
            (tmp_path / name).mkdir()
        open_results(tmp_path / name, {}, restart=False).close()
        assert (tmp_path / name / "run.json").exists()


@pytest.mark.parametrize("shape", [(4,), (3, 8, 8)])
def test_bytes_for_a_model_of_floats_get_a_remedy(shape: tuple[int, ...]) -> None:
    model = nn.Linear(4, 2) if len(shape) == 1 else nn.Conv2d(3, 2, 3)
    inputs = list(np.zeros((2, *shape), dtype=np.uint8))
    (found, _) = Predictor(model)(inputs)
    assert isinstance(found, Failed)
    assert "save others as float32" in found.remedy


def test_lines_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'[1, 2]\n{"text": "ab"}\n"b"\nnonsense\n\xff\n{"tokens": [3]}\n{"prompt": "c"}\n')
    source = open_inputs(path, encode=lambda text: [ord(letter) for letter in text])
    assert source.count == 7
    one, text, other, bad, worse, named, prompt = source.begin(0)
    assert (one, text, other, named, prompt) == ([1, 2], [97, 98], [98], {"tokens": [3]}, [99])
    assert "not JSON" in str(bad)
    assert "not UTF-8" in str(worse)
    assert "name a tokenizer" in str(next(open_inputs(path).begin(1)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "they end in .npy"),
        ("none.npy", None, "cannot read .*No such file"),
        ("none.npz", None, "cannot read .*No such file"),
        ("none.jsonl", None, "cannot read .*No such file"),
        ("a.npy", b"nonsense", "cannot read"),
        ("a.npy", b"", "cannot read"),
        ("a.npy", b"PK\x03\x04", "cannot read"),
        ("a.npz", b"nonsense", "cannot read .*: it is not a complete .npz archive"),
        ("a.npz", b"PK\x03\x04 cut off", "cannot read .*: it is not a complete .npz archive"),
        ("a.safetensors", b"nonsense", "cannot read .*SafetensorError"),
    ],
)
def test_files_that_are_no_inputs(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        open_inputs(tmp_path / name)


def test_arrays_that_do_not_belong_together(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.zeros((3, 3)))
    with pytest.raises(UsageError, match=r"x is \[2, 3\], y is \[3, 3\]"):
        open_inputs(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros(5), lengths=np.array([2, 2]))
    with pytest.raises(UsageError, match="x holds 5 tokens; lengths add up to 4"):
        open_inputs(tmp_path / "b.npz")
    for lengths in (np.array([7, -2]), np.array([2.0, 3.0]), np.array(5)):
        np.savez(tmp_path / "c.npz", x=np.zeros(5), lengths=lengths)
        with pytest.raises(UsageError, match=r"c.npz: lengths is .*; it holds a whole number for each input"):
            open_inputs(tmp_path / "c.npz")


@pytest.mark.parametrize("beside", [{}, {"lengths": np.array([2])}])
def test_arrays_without_names_are_no_keywords(tmp_path: Path, beside: dict[str, Any]) -> None:
    np.savez(tmp_path / "a.npz", *(np.zeros(2) for _ in range(3)), **beside)
    with pytest.raises(UsageError, match=r"holds arr_0 to arr_2, arrays without names.*save one array"):
        open_inputs(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", np.zeros((3, 2)))
    assert open_inputs(tmp_path / "b.npz").count == 3


def test_lines_go_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = open_results(path, {"model": "a"}, restart=False)
    results.add(0, torch.tensor([1.0, float("nan")]))
    results.add(1, Failed(index=1, what="bad"))
    results.add(2, {"x": torch.tensor(3)})
    results.close()
    text = path.read_bytes()
    path.write_bytes(text[:-4])  # a kill in the middle of a line
    again = open_results(path, {"model": "a"}, restart=False)
    assert (again.done, again.failed) == (2, 1)
    again.add(2, {"x": torch.tensor(3)})
    again.close()
    assert path.read_bytes() == text
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [
        {"index": 0, "output": [1.0, None]},
        {"index": 1, "failed": "bad"},
        {"index": 2, "output": {"x": 3}},
    ]


def test_lines_hold_what_is_no_tensor_too(tmp_path: Path) -> None:
    told: list[str] = []
    results = open_results(tmp_path / "out.jsonl", {}, restart=False, warn=told.append)
    output = {"scores": torch.ones(2), "label": "cat", "sure": True, "count": 3, "share": float("inf"), "none": None}
    results.add(0, {**output, "cache": object(), "array": np.arange(2), "number": np.float32(0.5)})
    results.add(1, ["label7"])
    results.add(2, 0.25)
    results.add(3, {"boxes": [], "cache": None})
    with pytest.raises(
        UsageError, match=r"nothing of the output can be written: one value \(of type object\); lines hold"
    ):
        results.add(4, object())
    results.close()
    outputs = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rest = {"share": None, "none": None, "array": [0, 1], "number": 0.5}
    assert outputs[0] == {"scores": [1, 1], "label": "cat", "sure": True, "count": 3, **rest}
    assert outputs[1:] == [{"0": "label7"}, 0.25, {"cache": None}]
    assert [one.partition(";")[0] for one in told] == ["not written: cache (of type object)"]


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
@pytest.mark.parametrize("odd", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_tensors_that_no_file_holds_are_named_at_once(odd: torch.Tensor, name: str, tmp_path: Path) -> None:
    results = open_results(tmp_path / name, {}, restart=False)
    with pytest.raises(UsageError, match=r"one value \(of type (sparse )?Tensor, torch\.(complex128|float32)\)"):
        results.add(0, odd)
    results.close()


def test_complex_numbers_in_a_folder(tmp_path: Path) -> None:
    results = open_results(tmp_path / "out", {}, restart=False)
    results.add(0, torch.complex(torch.ones(2), torch.zeros(2)))
    results.close()
    (file,) = (tmp_path / "out").glob("results-*")
    assert load_file(file)["0"].is_complex()


def test_lines_that_a_reader_fails_on_are_marked_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("ab\na?\nba\n", encoding="utf-8-sig")
    encode = encode_of(Letters())
    found = list(open_inputs(tmp_path / "texts.txt", encode).begin(0))
    assert found[0::2] == [[1, 2], [2, 1]]
    assert "the tokenizer cannot encode 'a?': KeyError: '?'" in str(found[1])
    (tmp_path / "deep.jsonl").write_text("[1]\n" + "[" * 100_000 + "\n[2]\n")
    first, deep, last = open_inputs(tmp_path / "deep.jsonl").begin(0)
    assert (first, last) == ([1], [2])
    assert "nested too deeply" in str(deep)


class Letters:
    def encode(self, text: str) -> list[int]:
        return [{"a": 1, "b": 2}[letter] for letter in text]

    def decode(self, ids: list[int]) -> str:
        return str(ids)


def test_a_folder_names_once_what_it_cannot_hold(tmp_path: Path) -> None:
    told: list[str] = []
    results = open_results(tmp_path / "out", {}, restart=False, warn=told.append)
    for index in range(2):
        results.add(index, {"scores": torch.ones(2), "label": "cat", "none": None, "array": np.arange(2)})
    with pytest.raises(UsageError, match=r"nothing of .*: label \(of type str\); a folder .* --out NAME.jsonl"):
        results.add(2, {"label": "cat"})
    results.close()
    (file,) = (tmp_path / "out").glob("results-*")
    assert sorted(load_file(file)) == ["0.array", "0.scores", "1.array", "1.scores"]
    assert [one.partition(";")[0] for one in told] == ["not written: label (of type str)"]


def test_a_folder_goes_on_behind_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.infer.prediction.result_files.RESULTS_A_FILE", 3)
    results = open_results(tmp_path / "out", {"model": "a"}, restart=False)
    for index in range(5):  # killed: never closed
        results.add(index, Failed(index=index, what="bad") if index == 1 else {"x": torch.full((2,), index)})
    (tmp_path / "out" / "results-00000003.safetensors.1.tmp").write_bytes(b"torn")
    again = open_results(tmp_path / "out", {"model": "a"}, restart=False)
    assert (again.done, again.failed) == (3, 1)
    for index in range(3, 5):
        again.add(index, {"x": torch.full((2,), index)})
    again.close()
    found = {}
    for file in sorted((tmp_path / "out").glob("results-*")):
        found |= load_file(file)
    assert {name: one.tolist() for name, one in found.items()} == {f"{i}.x": [i, i] for i in (0, 2, 3, 4)}


def test_a_damaged_file_of_results_is_named(tmp_path: Path) -> None:
    results = open_results(tmp_path / "out", {"model": "a"}, restart=False)
    results.add(0, torch.ones(1))
    results.close()
    (file,) = (tmp_path / "out").glob("results-*")
    for content in (file.read_bytes()[:30], save({"0": torch.ones(1)})):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"results-00000000.safetensors is not a file of results: .*--restart"):
            open_results(tmp_path / "out", {"model": "a"}, restart=False)


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_a_full_disk_is_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        if name == "out":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    results = open_results(tmp_path / name, {"model": "a"}, restart=False)
    results.add(0, torch.ones(1))
    monkeypatch.setattr("flatout.infer.prediction.result_files.save_file", full)
    monkeypatch.setattr("flatout.infer.prediction.result_files.os.fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*out.*No space left on device"):
        results.close()


def test_other_results_are_not_mixed_in(tmp_path: Path) -> None:
    for name in ("out.jsonl", "out"):
        open_results(tmp_path / name, {"model": "none yet"}, restart=False).close()  # nothing there to be mixed with
        results = open_results(tmp_path / name, {"model": "a"}, restart=False)
        results.add(0, torch.ones(1))
        results.close()
        with pytest.raises(UsageError, match=r"results with model 'a'; this run has 'b'; .* --restart"):
            open_results(tmp_path / name, {"model": "b"}, restart=False)
        results = open_results(tmp_path / name, {"model": "b"}, restart=True)
        assert results.done == 0
        results.close()
    with pytest.raises(UsageError, match=r"create the folder .*none first"):
        open_results(tmp_path / "none" / "out.jsonl", {"model": "a"}, restart=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for restart in (False, True):
        with pytest.raises(UsageError, match="is there already"):
            open_results(tmp_path / "mine", {"model": "a"}, restart=restart)
    assert (tmp_path / "mine" / "letter.txt").exists()


def test_parts_of_an_output_by_name() -> None:
    output = {"a": torch.ones(2), "b": (torch.ones(1), torch.ones(3))}
    assert sorted(named_values(output)) == ["a", "b.0", "b.1"]
    assert kept(output, "a").shape == (2,)
    assert kept((torch.ones(2), torch.ones(3)), "1").shape == (3,)
    with pytest.raises(UsageError, match=r"the output has no 'c'; it has a, b\.0, b\.1"):
        kept(output, "c")


MODEL = """
import time, torch
from torch import nn
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(30, 8), nn.Linear(8, 3)
    def forward(self, tokens):
        time.sleep(0.003)
        return self.out(self.words(tokens).cumsum(1))[:, -1]
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    draw = np.random.default_rng(0)
    lines = [json.dumps(draw.integers(0, 30, draw.integers(1, 9)).tolist()) for _ in range(900)]
    lines[700] = "[30]"
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    words = ["predict", "net.py:Slow", "in.jsonl", "--batch-tokens", "16", "--out"]
    assert main([*words, "whole.jsonl"]) == 1
    assert "input 700: token 0 is 30; ids are 0 to 29" in capsys.readouterr().err
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "flatout", *words, "cut.jsonl"], env=environment)
    out = tmp_path / "cut.jsonl"
    while not out.exists() or not out.stat().st_size:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < out.read_bytes().count(b"\n") < 900
    assert main([*words, "cut.jsonl"]) == 1
    assert "more from an earlier run" in capsys.readouterr().out
    results, whole = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (out, Path("whole.jsonl"))
    )
    assert [one["index"] for one in results] == list(range(900))
    for a, b in zip(results, whole, strict=True):
        assert a.get("failed") == b.get("failed")
        assert a.get("output") == pytest.approx(b.get("output"), abs=1e-5)
