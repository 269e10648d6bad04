"""What the compile lever compiles, seen by a backend that counts the graphs it is given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from flatout.levers.compile import Compile, compile_in_place
from flatout.levers.subject import Subject
from flatout.machine.detect import detect
from flatout.script.describe import observe
from flatout.script.watch import Watch


class Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize(
    "make", [Users, lambda: nn.Sequential(nn.Linear(4, 4), Users(), nn.GELU()), lambda: nn.Linear(4, 4)]
)
def test_a_model_is_one_graph_whoever_wrote_its_class(make: Any) -> None:
    """module.compile() alone passes over torch's own classes, and says nothing."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make()
    x = torch.randn(3, 4)
    expected = model(x)
    names = list(model.state_dict())
    compile_in_place(model, backend=backend)
    assert torch.equal(model(x), expected)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names
    model._compiled_call_impl = None
    model(x)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.compile as it is, but without its code generator; yields the graphs that it was given."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    original = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda call, **options: original(call, backend=backend))
    yield graphs
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_only_training_is_compiled_and_a_late_hook_is_heard(quick_compiler: list[Any]) -> None:
    model, x = Users(), torch.randn(3, 4)
    subject = Subject(training_only=True)
    subject.modules.add(model)
    with Compile().apply(subject, "default"):
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        torch.func.vmap(model)(x)
        assert not quick_compiler
        model.train()
        loss = model(x).sum()
        assert quick_compiler
        loss.backward(retain_graph=True)
        loss.backward()
        heard: list[Any] = []
        with model.inner[0].register_forward_hook(lambda module, args, out: heard.append(out.detach())):
            model(x)
        assert len(heard) == 1
    assert model._compiled_call_impl is None


def test_scripts_that_differentiate_gradients_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    script.write_text("loss.backward()\n")
    watch = Watch()
    assert observe(watch, threads_at_start=None, rows=()).differentiates_twice == ""
    script.write_text("torch.autograd.grad(loss, x, create_graph=late)\n")
    seen = replace(observe(watch, threads_at_start=None, rows=()), compiled_in_script=False)
    verdict = Compile().applies(detect(), seen)
    assert not verdict
    assert verdict.reason.startswith("train.py mentions create_graph, and compiled code has no gradient")
