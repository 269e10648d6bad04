"""What a followed step knows: FLOPs with known answers, bytes, modules, lines, phases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from flatout.flops import OperationCount
from flatout.profiling import following
from flatout.profiling.following import FollowedOperator, OperatorFollower

HERE = str(Path(__file__).parent)


def follow(work: Callable[[], object]) -> OperatorFollower:
    with OperatorFollower(prefer=HERE) as follower:
        work()
    assert follower.fault == ""
    return follower


def flops(operators: list[FollowedOperator], phase: str) -> float:
    return sum(one.flops or 0.0 for one in operators if one.phase == phase)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        out: torch.Tensor = self.last(hidden)
        return out


def test_a_step_by_phase_module_and_line() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        loss = model(torch.randn(5, 6)).sum()
        loss.backward()
        optimizer.step()

    found = follow(step)
    forward = 2 * 5 * (6 * 8 + 8 * 4)
    assert flops(found.operators, "forward") == forward
    assert flops(found.operators, "backward") == 2 * forward - 2 * 5 * 6 * 8  # the input needs no gradient
    assert {one.phase for one in found.operators} == {"forward", "backward", "optimizer", "other"}
    products = [one for one in found.operators if one.flops]
    assert [one.origin.module for one in products if one.phase == "forward"] == ["Net.first", "Net.last"]
    assert {one.origin.module for one in products if one.phase == "backward"} == {"Net.first", "Net.last"}
    lines = {one.origin.module: one.origin.line for one in products if one.phase == "backward"}
    forward_lines = {one.origin.module: one.origin.line for one in products if one.phase == "forward"}
    assert lines == forward_lines
    assert all(line.startswith(__file__) for line in lines.values())
    assert {one.origin.function for one in products} == {"forward"}
    assert {path: module.calls for path, module in found.modules.items()} == {"Net": 1, "Net.first": 1, "Net.last": 1}
    assert found.modules["Net.first"].kind == "Linear"


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: nn.Linear(5, 7)(torch.randn(3, 5)), 2 * 3 * 5 * 7),
        (lambda: nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 6, 6)), 2 * 2 * 4 * 4 * 4 * 3 * 9),
        (lambda: nn.Embedding(10, 4)(torch.tensor([[1, 2]])), 0),
        (lambda: nn.LSTM(5, 7)(torch.randn(3, 4, 5)), 2 * 12 * (28 * 5 + 28 * 7)),
    ],
)
def test_forward_flops_have_known_answers(work: Callable[[], object], expected: int) -> None:
    assert flops(follow(work).operators, "forward") == expected


def test_attention_forward_and_backward() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    attend = nn.functional.scaled_dot_product_attention
    found = follow(lambda: attend(q, k, v).sum().backward())
    forward = 2 * (2 * 2 * 4 * 8 * 8 * 16)
    assert (flops(found.operators, "other"), flops(found.operators, "backward")) == (forward, 2.5 * forward)


def test_an_embedding_reads_what_it_returns_and_its_gradient_has_no_products() -> None:
    table = nn.Embedding(1000, 4)
    found = follow(lambda: table(torch.tensor([1, 2])).sum().backward())
    lookup = next(one for one in found.operators if one.name == "aten::embedding")
    assert lookup.size_bytes == 2 * (2 * 4 * 4) + 2 * 8  # rows read and written, and the indices
    assert sum(one.flops or 0 for one in found.operators) == 0


def test_bytes_count_arguments_and_results_and_no_views() -> None:
    x = torch.ones(10, 20)
    found = follow(lambda: (x.t(), x + x[0]))
    sizes = {one.name: one.size_bytes for one in found.operators}
    assert sizes["aten::t"] == 0
    assert sizes["aten::add"] == 4 * (200 + 20 + 200)


def test_bytes_of_what_changes_its_arguments() -> None:
    x, lists = torch.ones(10), [[torch.ones(10), torch.ones(10)] for _ in range(2)]

    def work() -> None:
        x.add_(1)
        x.copy_(torch.arange(10.0))
        x.zero_()
        torch._foreach_add_(*lists)
        torch._foreach_zero_(lists[0])

    sizes = {one.name: one.size_bytes for one in follow(work).operators}
    assert (sizes["aten::add_"], sizes["aten::copy_"], sizes["aten::zero_"]) == (80, 80, 40)
    assert (sizes["aten::_foreach_add_"], sizes["aten::_foreach_zero_"]) == (240, 80)


def test_evaluation_and_loading_are_phases_of_their_own() -> None:
    model = nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader([torch.ones(4)] * 4, batch_size=2)

    def work() -> None:
        with torch.no_grad():
            for batch in loader:
                model(batch)

    found = follow(work)
    assert {one.phase for one in found.operators if one.name == "aten::stack" or "cat" in one.name} == {"data"}
    assert {one.phase for one in found.operators if one.flops} == {"evaluation"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_belongs_to_its_module(reentrant: bool) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    x = torch.randn(4, 8, requires_grad=True)
    model = Checkpointed()
    found = follow(lambda: model(x).sum().backward())
    again = [one for one in found.operators if one.phase == "backward" and one.name == "aten::addmm"]
    assert sorted(one.origin.module for one in again) == ["Checkpointed.blocks.0.0", "Checkpointed.blocks.1.0"]
    backward = [one for one in found.operators if one.phase == "backward" and one.name == "aten::mm"]
    assert {one.origin.module for one in backward} == {"Checkpointed.blocks.0.0", "Checkpointed.blocks.1.0"}
    assert "Checkpointed" in found.modules
    assert "Sequential" not in found.modules


def test_an_error_of_the_work_passes_and_nothing_stays_behind() -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), OperatorFollower():
        work()
    assert not nn.modules.module._global_forward_pre_hooks


def test_two_outermost_modules_of_one_class_are_told_apart() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    found = follow(lambda: b(a(torch.ones(1, 2))))
    assert list(found.modules) == ["Linear", "Linear#2"]


def test_operators_in_inference_mode_are_those_of_any_other() -> None:
    model, x = Net(), torch.randn(5, 6)
    found: list[list[str]] = []
    for mode in (torch.no_grad, torch.inference_mode):

        def work(mode: Any = mode) -> None:
            with mode():
                model(x)

        follower = follow(work)
        found.append([one.name for one in follower.operators])
        assert flops(follower.operators, "evaluation") == 2 * 5 * (6 * 8 + 8 * 4)
    assert found[0] == found[1]


def test_a_formula_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    of = OperationCount.of

    def failing(self: OperationCount, operation: Any, *given: Any) -> float | None:
        if operation is torch.ops.aten.relu.default:
            raise ValueError("odd tensor")
        return of(self, operation, *given)

    monkeypatch.setattr(OperationCount, "of", failing)
    found = follow(lambda: Net()(torch.randn(5, 6)))
    assert flops(found.operators, "forward") == 2 * 5 * (6 * 8 + 8 * 4)
    assert found.incomplete == "FLOPs of aten::relu cannot be counted: ValueError: odd tensor"


def test_a_step_that_is_too_long_is_known_to_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(lambda: torch.ones(2) + 1).incomplete == ""
    monkeypatch.setattr(following, "MOST_OPERATORS", 1)
    assert follow(lambda: torch.ones(2) + 1).incomplete == "a step has more than 1 operators"


def test_a_higher_order_operator_is_one_whose_parts_are_unknown() -> None:
    x = torch.ones(2)
    found = follow(lambda: torch.ops.higher_order.cond(True, torch.sin, torch.cos, (x,)))
    assert "higher_order::cond" in [one.name for one in found.operators]
    assert found.incomplete == "higher_order::cond does not show the operators that it calls"


def test_modules_of_other_threads_are_none_of_the_step() -> None:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=nn.ReLU(), args=(x,))
            other.start()
            other.join()
            return x + 1

    model = Outer()
    found = follow(lambda: model(torch.ones(2)))
    assert list(found.modules) == ["Outer"]


def test_a_module_that_is_gone_lends_its_name_to_no_other() -> None:
    found = follow(lambda: [nn.Linear(2, 2)(torch.ones(1, 2)) for _ in range(10)])
    assert list(found.modules) == ["Linear", *(f"Linear#{number}" for number in range(2, 11))]
