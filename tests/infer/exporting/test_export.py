"""Every model of ours and of others, in every format, beside the module itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.exporting import formats as export_formats
from flatout.infer.exporting.export import export
from flatout.infer.exporting.report import ExportReport, Format
from flatout.models import (
    GPT2,
    MLP,
    Bert,
    BertConfig,
    ConvNet,
    ConvNetConfig,
    GPT2Config,
    MLPConfig,
    RecurrentClassifier,
    RecurrentClassifierConfig,
    ResNet,
    ResNetConfig,
)
from flatout.report.export_text import export_document, export_text
from tests.infer.exporting.exportable import CountingBuffer, Outputs, Tied, Writes

Case = Callable[[], tuple[nn.Module, Any]]


def tokens(*shape: int, size: int = 50) -> Tensor:
    return torch.randint(0, size, shape)


SMALL = {"vocab_size": 50, "max_tokens": 16, "width": 16, "heads": 2, "layers": 2}
CASES: dict[str, Case] = {
    "MLP": lambda: (MLP(MLPConfig(inputs=8, hidden=(16,), classes=3, dropout=0.5)), torch.randn(3, 8)),
    "ConvNet": lambda: (
        ConvNet(ConvNetConfig(channels=1, height=8, width=8, stages=(4, 8), hidden=8)),
        (torch.randn(3, 1, 8, 8),),
    ),
    "ResNet": lambda: (ResNet(ResNetConfig(stages=(1, 1), width=8, classes=5)), torch.randn(1, 3, 32, 32)),
    "LSTM": lambda: (
        RecurrentClassifier(
            RecurrentClassifierConfig(vocab_size=20, embedding_width=8, hidden_width=8, classes=3, dropout=0.5)
        ),
        {"lengths": torch.tensor([6, 4, 2]), "tokens": tokens(3, 6, size=20)},
    ),
    "Bert": lambda: (Bert(BertConfig(**SMALL)), {"tokens": tokens(3, 6), "valid": torch.tensor([6, 3, 4])}),  # type: ignore[arg-type]
    "GPT2": lambda: (GPT2(GPT2Config(**SMALL)), torch.zeros(1, 6, dtype=torch.int64)),  # type: ignore[arg-type]
}
SLOW = ("Bert", "ConvNet", "LSTM", "ResNet")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in CASES])
@pytest.mark.first_case
def test_our_models_in_every_format_but_the_compiled(name: str, tmp_path: Path) -> None:
    model, example = CASES[name]()
    report = export(model, example, tmp_path / "net", format=["pt2", "onnx", "torchscript"])
    assert [file.failure for file in report.files] == [None] * 3
    for file in report.files:
        assert file.dynamic == ("batch",)
        assert file.path is not None
        assert Path(file.path).stat().st_size == file.bytes
        batches = {check.batch for check in file.checks}
        assert {1, 2} < batches
        assert max(batch or 0 for batch in batches) > (file.checks[0].batch or 0)
        assert [check.inputs for check in file.checks[:2]] == ["example", "fresh"]
    assert report.files[0].bit_identical
    assert report.files[1].largest_difference < 1e-5  # type: ignore[operator]
    assert "legacy" in report.files[2].notes[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.pt2", "net.torchscript.pt"]


@pytest.mark.parametrize("name", ["GPT2", pytest.param("Bert", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_length_may_vary_within_the_positions(name: str, tmp_path: Path) -> None:
    model, example = CASES[name]()
    formats: tuple[Format, ...] = ("pt2", "onnx") if name == "Bert" else ("pt2",)
    report = export(model, example, tmp_path / "net", format=formats, dynamic="length")
    for file in report.files:
        assert file.dynamic == ("batch", "length"), file
        assert {1, 5, 6, 7, 13, 16} == {check.length for check in file.checks}
        (length,) = (one for one in file.ranges if one.name == "length")
        assert (length.smallest, length.largest, length.refused) == (1, 16, (17,))
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    with pytest.raises(AssertionError, match="16"):
        loaded(**{**example, "tokens": tokens(3, 17)}) if name == "Bert" else loaded(tokens(2, 17))


@pytest.mark.parametrize("compiler", ["none", pytest.param("g++", marks=pytest.mark.slow)])
def test_compiled_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """Without a compiler the file holds the program as it is, which takes a tenth of the time."""
    import torch._inductor.config

    if compiler == "none":
        monkeypatch.setattr("torch._inductor.aoti_compile_and_package", _packaged)
        monkeypatch.setattr("torch._inductor.aoti_load_package", lambda path: torch.export.load(path).module())
    model, example = Outputs("dict"), {"x": torch.randn(3, 4), "scale": 3.0, "mask": torch.tensor([1.0, 0.0, 1.0])}
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    with torch._inductor.config.patch(quick):
        report = export(model, example, tmp_path / "net.pt2", format="aoti")
    (file,) = report.files
    assert file.failure is None
    assert file.dynamic == ("batch",)
    x = torch.randn(9, 4)
    got = torch._inductor.aoti_load_package(str(tmp_path / "net.pt2"))(x=x, scale=3.0, mask=torch.ones(9))
    torch.testing.assert_close(got["nested"][1], model.eval()(x, 3.0, torch.ones(9))["nested"][1])


def _packaged(program: torch.export.ExportedProgram, *, package_path: str) -> None:
    torch.export.save(program, package_path)


@pytest.mark.parametrize(
    ("kind", "names", "note"),
    [
        ("dict", ["y", "nested_0", "nested_1"], ""),
        ("tuple", ["output_0", "output_2"], ""),
        ("dataclass", ["scores", "best"], "output, a Scores, is a dict in the file"),
        ("named tuple", ["first", "second"], "output, a Both, is a dict in the file"),
        ("with an object", ["y"], "output['name'], a str, is left out: a file returns tensors"),
        ("with a size", ["y"], "output['shape'], a Size, is left out: a file returns tensors"),
    ],
)
@pytest.mark.first_case
def test_outputs_without_anybody_s_class(kind: str, names: list[str], note: str, tmp_path: Path) -> None:
    import onnxruntime

    model = Outputs(kind)
    example = {"x": torch.randn(3, 4), "mask": torch.tensor([1.0, 0.0, 1.0]), "scale": 3.0}
    report = export(model, example, tmp_path / "net", format=("pt2", "onnx"))
    assert report.ok, report
    assert report.notes == ((note,) if note else ())
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    assert [one.name for one in session.get_outputs()] == names
    assert [(one.name, one.shape[0]) for one in session.get_inputs()] == [("x", "batch"), ("mask", "batch")]
    assert not list(model._forward_hooks)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model, example = CASES["LSTM"]()
    model.body.dropout.eval()  # type: ignore[union-attr,operator]
    model.head.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    model(**example).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    modes = [module.training for module in model.modules()]
    flat = [id(weight) for weight in model.body.layers._flat_weights]  # type: ignore[union-attr]
    state = torch.random.get_rng_state()
    assert export(model, example, tmp_path / "net", format=("pt2", "torchscript")).ok
    assert [module.training for module in model.modules()] == modes
    assert [id(weight) for weight in model.body.layers._flat_weights] == flat  # type: ignore[union-attr]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(dict(model.named_parameters())[name].grad, grad) for name, grad in grads.items())  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)
    model(**example).sum().backward()


def test_a_counting_buffer_is_part_of_the_file_and_keeps_its_count(tmp_path: Path) -> None:
    model = CountingBuffer()
    report = export(model, torch.randn(3, 4), tmp_path / "net", format=("pt2", "onnx"))
    assert report.files[0].bit_identical
    assert report.files[1].failure is not None  # an ONNX graph has no state
    assert float(model.count) == 0


def test_a_module_may_write_into_its_input(tmp_path: Path) -> None:
    example = torch.randn(3, 4)
    given = example.clone()
    assert export(Writes(), example, tmp_path / "net").ok
    assert torch.equal(example, given)


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a


def test_one_tensor_given_twice_is_two_inputs_and_an_input_may_be_an_output(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    report = export(Sum(), (x, x), tmp_path / "net", format=("pt2", "onnx"))
    assert report.ok, export_text(report)


def test_tied_weights_count_once_and_constant_examples_are_drawn_from_the_embedding(tmp_path: Path) -> None:
    model = Tied()
    example = {"attention_mask": torch.ones(2, 3, dtype=torch.int64), "tokens": torch.zeros(2, 3, dtype=torch.int64)}
    report = export(model, example, tmp_path / "net", dynamic="length")
    assert (report.parameters, report.weight_bytes) == (120, 480)
    assert report.ok
    assert report.notes == ()  # in particular none that the outputs never differ
    assert sorted(export(model, example, tmp_path / "net").files[0].dynamic) == ["batch"]


def test_large_onnx_weights_stand_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_formats, "ONNX_BYTES_IN_ONE_FILE", 1000)
    (file,) = export(nn.Linear(40, 40), torch.randn(2, 40), tmp_path / "net.onnx", format="onnx").files
    assert file.failure is None
    parts = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(parts) == {"net.onnx", "net.onnx.data"}
    assert sum(parts.values()) == file.bytes


def test_bf16(tmp_path: Path) -> None:
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    report = export(model, torch.randn(3, 8, dtype=torch.bfloat16), tmp_path / "net", format=("pt2", "onnx"))
    assert report.files[0].failure is None
    assert report.files[0].tolerance == 5e-2
    assert report.files[1].failure is not None
    assert "bfloat16" in report.files[1].failure.what


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("BERT", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_transformers_models(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, **sizes)
    )
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **shape))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    example = {"attention_mask": mask, "input_ids": tokens(3, 5)}
    model, formats = {"GPT-2": (gpt2, ("pt2",)), "BERT": (bert, ("pt2", "onnx"))}[name]
    report = export(model, example, tmp_path / "net", format=formats, dynamic="length")
    assert report.ok, export_text(report)
    assert all(file.dynamic == ("batch", "length") for file in report.files)
    assert model.training
    assert any("past_key_values" in note for note in report.notes) == (name == "GPT-2")


def test_a_report_is_frozen_and_reads_as_text_and_json(tmp_path: Path) -> None:
    report = export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net", format=("pt2", "torchscript"))
    document = json.loads(json.dumps(export_document(report), allow_nan=False))
    assert document["flatout"]["document"] == "export"
    assert document["ok"]
    assert document["files"][0]["bit_identical"]
    text = export_text(report)
    assert "dynamic batch" in text
    assert "verified on the example and 6 fresh inputs (batch 1, 2, 3, 4, 7, 27): bit-identical" in text
    assert "batch tested from 1 to 27; no bound was found" in text
    assert "2 of 2 exported and verified in" in text
    with pytest.raises(AttributeError):
        report.model = "other"  # type: ignore[misc]


def test_an_old_file_is_replaced_only_by_a_verified_one(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_text("old")
    model = nn.Linear(4, 2)
    report: ExportReport = export(model, torch.randn(3, 4), path, tolerance=0.0)
    assert report.files[0].path == str(path)
    assert path.read_bytes() != b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["net.pt2"]


def test_a_hooked_model_is_exported_with_its_hook(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_hook(lambda _module, _inputs, output: output + 1)
    x = torch.randn(3, 4)
    assert export(model, x, tmp_path / "net").ok
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(x), model(x))
    assert len(model._forward_hooks) == 1


def test_arrays_as_scikit_learn_gives_them(tmp_path: Path) -> None:
    report = export(nn.Linear(4, 2), np.random.default_rng(0).normal(size=(3, 4)), tmp_path / "net")
    assert report.ok, export_text(report)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "tflite"}, "format is 'tflite'; formats are pt2, aoti, onnx, executorch, torchscript"),
        ({"format": ()}, "no format is given"),
        ({"dynamic": "everything"}, "dynamic is 'everything'"),
        ({"dynamic": "length"}, "have no sequence"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"tolerance": "1e-3"}, "tolerance is '1e-3'; it is a number of at least 0"),
        ({"format": None}, "format is None; formats are pt2"),
        ({"format": [["pt2"]]}, r"format is \['pt2'\]; formats are pt2"),
        ({"example_inputs": np.array([["text"]])}, "an input is an array of <U4; an input holds numbers"),
        ({"path": "net\udcff"}, "torch writes to paths that are UTF-8 text"),
        ({"example_inputs": (torch.randn(3, 4), 1)}, r"forward does not take 2 inputs; it is forward\(input"),
        ({"example_inputs": {"wrong": torch.randn(3, 4)}}, "fails on the example inputs"),
        ({"example_inputs": torch.randn(3, 5)}, "fails on the example inputs: RuntimeError; .*mat1"),
        ({"example_inputs": torch.randn(0, 4)}, "the example inputs are empty"),
        ({"example_inputs": torch.tensor(1.0)}, "have no batch"),
        ({"example_inputs": "abc"}, "example_inputs is 'abc'; it is a tensor, a tuple .*; for example torch.zeros"),
        ({"example_inputs": None}, "example_inputs is None; it is a tensor"),
        ({"example_inputs": [[1.0, 2.0]]}, "example_inputs is a list, without a tensor in it; it is a tensor"),
        ({"example_inputs": torch.zeros(2, 8, device="meta")}, "are on the meta device; the module is run on them"),
        ({"example_inputs": {"other": torch.zeros(2, 8)}}, "name inputs as forward does: the keys are 'other', and it"),
        ({"example_inputs": (object(),)}, r"inputs\[0\]\[0\] is a builtins.object"),
        ({"path": "nowhere/net.pt2"}, "no such folder: nowhere"),
        ({"path": "net.onnx"}, "net.onnx does not end in .pt2"),
        ({"path": "."}, "is a folder"),
        ({"model": "net"}, "model is 'net'; it is a torch.nn.Module"),
        ({"model": nn.Linear(4, 2, device="meta")}, "meta device"),
        ({"model": nn.LazyLinear(4)}, "lazy layers"),
    ],
)
def test_what_cannot_be_asked_for(arguments: dict[str, Any], says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    full: dict[str, Any] = {"model": nn.Linear(4, 2), "example_inputs": torch.randn(3, 4), "path": "net", **arguments}
    with pytest.raises(UsageError, match=says):
        export(**full)
    assert list(tmp_path.iterdir()) == []


def test_formats_share_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    formats: tuple[Format, ...] = ("pt2", "onnx", "torchscript")
    assert export(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "net", format=formats).ok
    assert len(calls) == 1
