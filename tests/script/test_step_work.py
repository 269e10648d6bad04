"""What one step computes: operations, and denormal numbers among what they take and give."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.flops import OperationCount
from flatout.levers.observed import StepWork
from flatout.machine import process_memory
from flatout.machine.process_memory import minor_faults, page_fault_seconds
from flatout.script import step_work
from flatout.script.step_work import follow_step
from tests.odd_defaults import odd_defaults


def step(scale: float = 1.0) -> StepWork:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), scale * torch.randn(16, 8)
    finish = follow_step()
    model(batch).square().mean().backward()
    return finish()


def test_operations_are_counted() -> None:
    found = step()
    assert found.flops_per_step == 2 * 16 * (8 * 4 * 2 + 4 * 2 * 3)  # no gradient of the inputs
    assert found.operations_per_step > 10
    assert found.denormal_share == 0


def test_weights_whose_memory_was_freed_are_not_read() -> None:
    """As FSDP2 frees what it has gathered, and passes the tensors on."""
    gathered = torch.ones(4)
    gathered.untyped_storage().resize_(0)
    finish = follow_step()
    gathered.view(2, 2)
    assert finish().operations_per_step == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own rules for the derivatives
def test_the_zeros_of_forward_mode_are_not_read() -> None:
    """They have no memory: reading them would end the process."""
    weight = torch.randn(4, requires_grad=True)
    finish = follow_step()
    torch.func.jvp(lambda x: x * weight, (torch.ones(4),), (torch.ones(4),))
    assert finish().denormal_share == 0


def test_inference_mode_hides_nothing() -> None:
    model = nn.Linear(8, 4)
    finish = follow_step()
    with torch.inference_mode():
        model(torch.ones(16, 8))
    assert finish().flops_per_step == 2 * 16 * 8 * 4


def test_products_that_are_large_enough_for_bf16_kernels_are_told_from_small_ones() -> None:
    assert step().large_share == 0
    model, x = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16)), torch.zeros(1024, 512)
    finish = follow_step()
    model(x).square().mean().backward()
    assert finish().large_share == pytest.approx(2 * 512 / (2 * 512 + 3 * 16))  # no gradient of the inputs


@pytest.mark.parametrize("by_position", [False, True])
def test_scores_of_ignored_targets_are_told_from_those_that_count(by_position: bool) -> None:
    body, head = nn.Linear(8, 16), nn.Linear(16, 2048)  # a vocabulary of 2,001, rounded up
    targets = torch.full((4, 6), -100)
    targets[:, :2] = 7
    finish = follow_step()
    scores = head(body(torch.ones(4, 6, 8)))[..., :2001]
    if by_position:
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), targets)
    else:
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    loss.backward()
    of_body, of_head = 2 * 8 * 16, 3 * 16 * 2048  # no gradient of the inputs
    assert finish().ignored_share == pytest.approx(of_head * 4 / 6 / (of_body + of_head))


def test_targets_of_a_narrow_layer_and_all_that_count_are_no_reason() -> None:
    for classes, target in ((2048, 3), (100, -100)):
        finish = follow_step()
        scores = nn.Linear(16, classes)(torch.ones(4, 16))
        nn.functional.cross_entropy(scores, torch.tensor([target, 3, 3, 3])).backward()
        assert finish().ignored_share == 0


def test_a_run_counts_in_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error in a formula, as for operations of an extension, is none of that run."""
    monkeypatch.setattr(OperationCount, "of", lambda *arguments: 1 / 0)
    finish = follow_step(counts_flops=False)
    torch.ones(4, 4) @ torch.ones(4, 4)
    found = finish()
    assert (found.flops_per_step, found.large_share) == (None, None)
    assert found.operations_per_step > 0


def test_denormal_numbers_are_met() -> None:
    share = step(1e-39).denormal_share
    assert share is not None
    assert share > 0.1


def test_what_denormal_numbers_cost_is_measured_in_fp32_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the script's default dtype and device are."""
    timed: list[torch.Tensor] = []

    def one_second(work: Callable[[], torch.Tensor]) -> float:
        timed.append(work())
        return 1.0

    monkeypatch.setattr(step_work, "_seconds", one_second)
    values = torch.full((300,), 1e-40)
    with odd_defaults():
        finish = follow_step()
        values.abs()
        assert finish().denormal_slowdown == 1.0
    assert {(one.dtype, one.device.type) for one in timed} == {(torch.float32, "cpu")}


@pytest.mark.parametrize(
    "values",
    [torch.full((300, 400), 1e-40), torch.full((300, 400), 1e-40).t(), torch.full((2, 3, 70, 80), 1e-40)[:, :, ::2]],
)
def test_of_large_and_of_strided_tensors_a_part_is_looked_at(values: torch.Tensor) -> None:
    finish = follow_step()
    values.abs()
    assert finish().denormal_share == 1


def test_other_tensors_are_left_alone() -> None:
    finish = follow_step()
    torch.zeros(3, dtype=torch.int64) + 1
    torch.zeros(3, dtype=torch.float64) + 1e-310
    torch.zeros(0) + 1
    with torch.sparse.check_sparse_tensor_invariants(True):
        torch.sparse_coo_tensor([[0]], [1.0], (2,)).coalesce()
    share = finish().denormal_share
    assert share in (None, 0)


def test_a_page_fault_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_fault_seconds() > 0
    times, faults = iter([0.0, 9.0, 10.0, 12.0, 20.0, 24.0]), iter([0, 1000, 1000, 2000, 2000, 3000])
    monkeypatch.setattr(process_memory, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(process_memory, "minor_faults", lambda: next(faults))
    assert page_fault_seconds.__wrapped__() == 2e-3  # the quickest of three times


def test_page_faults_are_counted() -> None:
    before = minor_faults()
    torch.zeros(1 << 24)
    assert minor_faults() > before
