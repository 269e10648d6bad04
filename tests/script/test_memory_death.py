"""What is told of a run that died of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from flatout.levers.subject import Subject
from flatout.script.memory_death import MemoryDeath, inspect_death

HERE = os.path.dirname(__file__)
MIB = 1 << 20


class Net(nn.Module):
    def __init__(self, message: str | None) -> None:
        super().__init__()
        self.first, self.message = nn.Linear(64, 64), message

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        wide = torch.cat([hidden] * 64)
        if self.message is not None:
            raise torch.OutOfMemoryError(self.message)
        out: torch.Tensor = wide.square().mean()
        return out


def died(message: str | None, subject: Subject) -> Exception:
    net = Net(None)
    optimizer = torch.optim.Adam(net.parameters())
    subject.modules.add(net)
    subject.optimizers.add(optimizer)
    batch = torch.randn(64, 64)
    net(batch).backward()
    optimizer.step()
    net.message = message
    subject.loaders.add(torch.utils.data.DataLoader(batch, batch_size=64))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        net(batch)
    return caught.value


def test_who_held_the_memory_and_what_a_smaller_batch_would_have_done() -> None:
    subject = Subject()
    error = died("CUDA out of memory. Tried to allocate 512.00 KiB. GPU 0 has a total capacity of ...", subject)
    death = inspect_death(error, subject)
    assert death is not None
    assert death.requested_bytes == 512 << 10
    weights = (64 * 64 + 64) * 4
    assert death.categories["weights"] == death.categories["gradients"] == weights
    assert death.categories["optimizer"] == 2 * weights + 2 * 4
    assert death.part == "forward"
    assert death.line.startswith(__file__)
    wide = next(one for one in death.holders if one.name == "wide")
    assert wide.size_bytes == 64 * 64 * 64 * 4
    assert wide.line.startswith(__file__)
    assert any("flatout memory" in text for text in death.advice)
    assert death.to_json()["held_bytes"] == death.held_bytes


def test_a_tensor_larger_than_everything_is_named_as_such() -> None:
    subject = Subject()
    death = inspect_death(died("you tried to allocate 999999999999 bytes", subject), subject)
    assert death is not None
    assert "larger than everything that was held" in death.advice[0]


def test_a_lazy_layer_that_was_never_called_holds_nothing() -> None:
    lazy = torch.nn.LazyLinear(3)
    death = inspect_death(died("", Subject()), Subject())
    assert death is not None
    assert lazy.has_uninitialized_params()


def test_without_a_size_in_the_message() -> None:
    subject = Subject()
    death = inspect_death(died("", subject), subject)
    assert death is not None
    assert death.requested_bytes is None
    assert death.message == "OutOfMemoryError"


@pytest.mark.parametrize("error", [None, ValueError("x"), RuntimeError("shapes")])
def test_another_end_is_not_memory_s(error: Any) -> None:
    assert inspect_death(error, Subject()) is None


def test_the_graph_is_named_by_what_keeps_it() -> None:
    x = torch.randn(256, 256, requires_grad=True)
    kept = torch.tanh(x * 2)
    death = None
    try:
        raise MemoryError
    except MemoryError as error:
        death = inspect_death(error, Subject())
    assert isinstance(death, MemoryDeath)
    assert kept.grad_fn is not None
    assert any("TanhBackward0" in one.name or one.name == "kept" for one in death.holders)


def test_the_end_of_memory_is_found_behind_the_error_that_the_script_made_of_it() -> None:
    error = ValueError("the script's own")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    death = inspect_death(error, Subject())
    assert death is not None
    assert death.requested_bytes == 2048 * MIB


def test_where_pythons_objects_took_the_memory_no_measure_for_tensors_is_advised() -> None:
    death = inspect_death(MemoryError(), Subject())
    assert death is not None
    assert len(death.advice) == 1
    assert death.advice[0].startswith("Python objects took the memory")


def test_an_optimizer_of_the_scripts_own_is_the_optimizer() -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    optimizer = Greedy([torch.zeros(3, requires_grad=True)], 0.1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    death = inspect_death(caught.value, Subject())
    assert death is not None
    assert death.part == "optimizer"


class Closed(Mapping[str, Any]):
    """As a file's: what it lists cannot be read any more."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError("closed file")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Strange:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


def test_variables_that_cannot_be_looked_into_do_not_end_the_report() -> None:
    def train() -> None:
        closed, strange, held = Closed(), Strange(), torch.zeros(1 << 20)  # noqa: F841
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    try:
        train()
    except torch.OutOfMemoryError as error:
        found = inspect_death(error, Subject())
    assert found is not None
    assert "held" in [one.name for one in found.holders]
