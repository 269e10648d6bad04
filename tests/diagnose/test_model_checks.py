"""Models as they are written: what is wrong with one is named at its line, and the corrected one is left alone."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flatout
from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts
from flatout.diagnose.finding import Finding
from flatout.diagnose.model_checks import CHECKS
from flatout.diagnose.model_facts import ModelFacts
from flatout.diagnose.model_reading import read_model
from flatout.errors import UsageError
from flatout.infer.model_source import load_model
from flatout.report.model_text import model_text

HEAD = "import pathlib\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


def module(init: str, forward: str = "return x", *, name: str = "Net") -> str:
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + textwrap.indent(textwrap.dedent(init).strip(), " " * 8)
        + "\n    def forward(self, x):\n"
        + textwrap.indent(textwrap.dedent(forward).strip(), " " * 8)
        + "\n"
    )


def found(source: str, folder: Path, made: str = "Net") -> list[Finding]:
    """Of the model that `made` names in a file of this text."""
    place = folder / str(len(list(folder.iterdir())))  # another one each time: Python may not see a quick change
    place.mkdir()
    (place / "net.py").write_text(HEAD + source)
    model, _ = load_model(f"{place / 'net.py'}:{made}")
    return check_facts(Facts(model=read_model(model, str(place))), CHECKS)


GELU = module("", "return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))", name="Gelu") + module(
    "self.act = Gelu()", "return self.act(x)"
)
CONVOLUTIONS = "self.body = nn.Sequential(nn.Conv2d(3, 8, {0}), nn.ReLU(), nn.Conv2d(8, 8, {0}), nn.Conv2d(8, 8, {0}))"

FAULTY = {
    "modules in a list": (
        "unregistered-modules",
        module(
            "self.layers = [nn.Linear(8, 8) for _ in range(3)]",
            "for layer in self.layers:\n    x = layer(x)\nreturn x",
        ),
        "self.layers = [nn.Linear(8, 8) for _ in range(3)]",
    ),
    "parameters in a dict": (
        "unregistered-modules",
        module(
            'self.weights = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}',
            'return x * self.weights["a"]',
        ),
        'self.weights = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}',
    ),
    "modules in a list of lists": (
        "unregistered-modules",
        module(
            """
            self.blocks = []
            for _ in range(2):
                self.blocks.append([nn.Linear(8, 8), nn.Linear(8, 8)])
            """
        ),
        "self.blocks = []",
    ),
    "a mask that does not move": (
        "unregistered-tensors",
        module("self.mask = torch.tril(torch.ones(8, 8))", "return x * self.mask"),
        "self.mask = torch.tril(torch.ones(8, 8))",
    ),
    "a tensor that computes besides": (
        "unregistered-tensors",
        module("self.t = torch.ones(8)", "x = x.view(-1, self.t.shape[0])\nreturn x * self.t"),
        "self.t = torch.ones(8)",
    ),
    "a tensor that should be a parameter": (
        "unregistered-tensors",
        module("self.scale = torch.ones(8, requires_grad=True)", "return x * self.scale"),
        "self.scale = torch.ones(8, requires_grad=True)",
    ),
    "no activation": (
        "linear-after-linear",
        module("self.body = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))", "return self.body(x)"),
        "self.body = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))",
    ),
    "a bias before batch norm": (
        "bias-before-norm",
        module("self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())", "return self.body(x)"),
        "self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())",
    ),
    "half weights": ("half-model", module("self.out = nn.Linear(8, 2)\nself.half()", "return self.out(x)"), None),
    "a softmax at the end": (
        "softmax-at-end",
        module("self.out = nn.Linear(8, 2)\nself.final = nn.Softmax(dim=-1)", "x = self.out(x)\nreturn self.final(x)"),
        "self.final = nn.Softmax(dim=-1)",
    ),
    "a softmax function at the end": (
        "softmax-at-end",
        module("self.out = nn.Linear(8, 2)", "return torch.softmax(self.out(x), 1)"),
        "return torch.softmax(self.out(x), 1)",
    ),
    "a softmax function before the end": (
        "softmax-at-end",
        module("self.out = nn.Linear(8, 2)", "x = F.softmax(self.out(x), dim=1)\nreturn x"),
        "x = F.softmax(self.out(x), dim=1)",
    ),
    "GELU by hand": ("layer-written-by-hand", GELU, "class Gelu(nn.Module):"),
    "convolutions": (
        "channels-last-unmeasured",
        module(CONVOLUTIONS.format(3), "return self.body(x)"),
        None,
    ),
}

HEALTHY = {
    "a ModuleList": module("self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))"),
    "layers registered and listed": module(
        "self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\nself.layers = [self.a, self.b]"
    ),
    "layers added by add_module": module(
        """
        self.layers = []
        for number in range(2):
            layer = nn.Linear(8, 8)
            self.add_module(f"layer{number}", layer)
            self.layers.append(layer)
        """
    ),
    "a frozen teacher kept out": module(
        "self.out = nn.Linear(8, 2)\nself.teachers = [nn.Linear(8, 2).requires_grad_(False) for _ in range(2)]"
    ),
    "its own parameters()": module(
        "self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]",
        "return x\ndef parameters(self, recurse=True):\n    return (p for l in self.layers for p in l.parameters())",
    ).replace("\n        def parameters", "\n    def parameters"),
    "a buffer": module('self.register_buffer("mask", torch.ones(8, 8))', "return x * self.mask"),
    "a tensor that forward moves": module("self.mask = torch.ones(8)", "return x * self.mask.to(x.device)"),
    "a tensor of which forward moves a part": module(
        "self.mask = torch.ones(8, 8)", "return x * self.mask[:4].bool().to(x.device)"
    ),
    "a tensor that as_tensor moves": module(
        "self.mean = torch.ones(3)", "return x - torch.as_tensor(self.mean, device=x.device)"
    ),
    "a tensor that is copied to another's device": module("self.t = torch.ones(3)", "return x - x.new_tensor(self.t)"),
    "a tensor whose numbers are read": module(
        "self.sizes = torch.tensor([1, 2])", "a, b = self.sizes.tolist()\nreturn x.split([a, int(self.sizes[1])], 1)"
    ),
    "a tensor whose shape is read": module(
        "self.t = torch.zeros(3)", "return x.view(len(self.t), self.t.shape[0], self.t.size(0))"
    ),
    "a state that forward assigns": module(
        "self.state = torch.zeros(8)", "self.state = self.state + x.detach()\nreturn x + self.state"
    ),
    "a number": module("self.scale = torch.tensor(0.5)", "return x * self.scale"),
    "a tensor that is only kept": module("self.seen = torch.ones(8)"),
    "an activation between": module(
        "self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))", "return self.body(x)"
    ),
    "low rank": module("self.body = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64))", "return self.body(x)"),
    "a loop over the layers": module(
        "self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))",
        "for layer in self.body:\n    x = F.relu(layer(x))\nreturn x",
    ),
    "one of the two is frozen": module(
        "self.body = nn.Sequential(nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 4))", "return self.body(x)"
    ),
    "no bias": module(
        "self.body = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))", "return self.body(x)"
    ),
    "a layer norm": module("self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))", "return self.body(x)"),
    "a frozen batch norm": module(
        "self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\nself.eval()", "return self.body(x)"
    ),
    "half weights for inference": module("self.out = nn.Linear(8, 2)\nself.half().eval()", "return self.out(x)"),
    "softmax inside": module(
        "self.gate, self.soft, self.out = nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2)",
        "return self.out(x * self.soft(self.gate(x)))",
    ),
    "softmax for predictions alone": module(
        "self.out, self.soft = nn.Linear(8, 2), nn.Softmax(-1)",
        "x = self.out(x)\nif not self.training:\n    return self.soft(x)\nreturn x",
    ),
    "a softmax function for predictions alone": module(
        "self.out = nn.Linear(8, 2)",
        "x = self.out(x)\nif not self.training:\n    return F.softmax(x, 1)\nreturn x",
    ),
    "a log_softmax function at the end, for nll_loss": module(
        "self.out = nn.Linear(8, 2)", "return F.log_softmax(self.out(x), 1)"
    ),
    "1x1 convolutions": module(CONVOLUTIONS.format(1), "return self.body(x)"),
    "fused attention": module(
        "self.q = nn.Linear(8, 8)", "q = self.q(x)\nreturn F.scaled_dot_product_attention(q, q, q)"
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_named_at_its_line(fault: str, tmp_path: Path) -> None:
    name, source, line = FAULTY[fault]
    findings = found(source, tmp_path)
    assert [one.name for one in findings] == [name]
    if line is not None:
        file, number, text = findings[0].lines[0]
        assert file == "net.py"
        assert text == line
        assert (HEAD + source).splitlines()[number - 1].strip() == line
    assert findings[0].remedy


@pytest.mark.parametrize("model", HEALTHY)
def test_a_healthy_model_is_left_alone(model: str, tmp_path: Path) -> None:
    assert [one.title for one in found(HEALTHY[model], tmp_path)] == []


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_a_model_that_is_compiled_or_wrapped_is_checked_as_the_one_inside(wrap: Callable[..., nn.Module]) -> None:
    seen = read_model(wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))))
    assert seen.kind == "Sequential"
    assert [(one.first, one.second) for one in seen.linear_pairs] == [("Sequential.0", "Sequential.1")]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_script_module_is_not_said_to_be_fine() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="not checked"):
        read_model(scripted)
    seen = read_model(nn.Sequential(nn.Linear(4, 4), scripted))
    assert seen.without_source == ("Sequential.1",)
    text = model_text("net.py:make", seen, [])
    assert "not checked, because a ScriptModule has no source: Sequential.1" in text


def test_a_layer_that_is_called_twice_in_a_row_is_named_twice_and_counts_once() -> None:
    layer = nn.Linear(8, 8)
    seen = read_model(nn.Sequential(layer, layer))
    assert [(one.first, one.second, one.saved_bytes) for one in seen.linear_pairs] == [
        ("Sequential.0", "Sequential.1", 0)
    ]
    final = nn.Softmax(-1)
    last = read_model(nn.Sequential(final, layer, final)).last
    assert last is not None
    assert last.path == "Sequential.2"


def test_of_no_parameters_nothing_is_trainable() -> None:
    assert "ReLU (net.py:make) · 0 parameters\n" in model_text("net.py:make", read_model(nn.ReLU()), [])


def test_numbers_are_those_of_the_model(tmp_path: Path) -> None:
    missed = found(FAULTY["modules in a list"][1], tmp_path)[0]
    assert f"misses {3 * (8 * 8 + 8)} trainable parameters" in missed.title
    assert "nn.ModuleList" in missed.remedy
    wide = found(FAULTY["no activation"][1], tmp_path)[0]
    assert wide.cost_bytes == 4 * ((8 * 16 + 16 + 16 * 4 + 4) - (8 * 4 + 4))
    biased = found(FAULTY["a bias before batch norm"][1], tmp_path)[0]
    assert biased.cost_bytes == 4 * 8


def test_a_bias_that_two_layers_share_counts_once() -> None:
    layer = nn.Linear(8, 8)
    facts = read_model(nn.Sequential(layer, nn.ReLU(), layer))
    assert facts.parameters == 8 * 8 + 8


def test_a_channels_last_model_has_chosen_its_format(tmp_path: Path) -> None:
    source = module(CONVOLUTIONS.format(3) + "\nself.to(memory_format=torch.channels_last)", "return self.body(x)")
    assert [one.title for one in found(source, tmp_path)] == []


@pytest.mark.parametrize("what", ["changed after it was imported", "made at run time", "defined twice"])
def test_a_class_whose_source_is_not_certain_is_no_ground_for_a_finding(what: str, tmp_path: Path) -> None:
    source = module("self.mask = torch.ones(8, 8)", "return x * self.mask")
    if what == "made at run time":
        source = f"exec('''\n{source}''')\n"
    if what == "defined twice":
        source = f"{source}if torch.ones(1).sum() == 2:\n" + textwrap.indent(source, "    ")
    if what == "changed after it was imported":
        source += "pathlib.Path(__file__).write_text('')\n"
    assert [one.title for one in found(source, tmp_path)] == []


@pytest.mark.parametrize("name", ["MLP", "ConvNet", "ResNet", "Bert", "GPT2"])
def test_our_own_models_are_fine(name: str) -> None:
    with torch.device("meta"):
        facts = read_model(getattr(flatout.models, name)(getattr(flatout.models, f"{name}Config")()))
    findings = check_facts(Facts(model=facts), CHECKS)
    assert [one.name for one in findings if one.severity != "note"] == []


def test_facts_survive_json() -> None:
    facts = read_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Softmax(-1)))
    assert ModelFacts.from_json(facts.to_json()) == facts
