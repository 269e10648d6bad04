"""What the compile lever compiles, seen by a backend that counts the graphs it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout.levers.compile import compile_in_place


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
