"""Where gradients are freed instead of set to zero, what that is predicted to save, and what is seen of zero_grad."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.levers import gradients_to_none
from flatout.levers.gradients_to_none import GradientsToNone
from flatout.levers.observed import ModuleSeen, Observed, OptimizerSeen
from flatout.machine.ceilings import Ceilings, Peak
from flatout.script.describe import observe
from flatout.script.watch import Watch
from tests.levers.test_catalogue import AMPERE, CPU

LEVER = GradientsToNone()


@pytest.mark.parametrize(
    ("calls", "zeroed"), [([], None), ([True], False), ([False], True), ([True, False, True], True)]
)
def test_what_zero_grad_does_is_seen(calls: list[bool], zeroed: bool | None, watch: Watch) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for freed in calls:
        net(torch.ones(3, 2)).sum().backward()
        optimizer.zero_grad(set_to_none=freed)
    assert observe(watch, threads_at_start=None, rows=()).gradients_zeroed is zeroed


def test_mistakes_in_a_call_are_torchs_to_explain(watch: Watch) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(TypeError, match="zero_grad"):
        optimizer.zero_grad(to_none=False)
    with pytest.raises(TypeError, match="zero_grad"):
        net.zero_grad(False, True)
    assert observe(watch, threads_at_start=None, rows=()).gradients_zeroed


SEEN = Observed(
    optimizers=(OptimizerSeen(kind="SGD", parameters=100),),
    modules=(ModuleSeen(kind="Net", parameters=1_000_000),),
    step_seconds=0.01,
    gradients_zeroed=True,
)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replace(SEEN, gradients_zeroed=False), "frees the gradients already"),
        (replace(SEEN, optimizers=()), "no optimizer"),
        (replace(SEEN, compiled_in_script=True), "compiles"),
        (replace(SEEN, differentiates_twice="train.py mentions create_graph"), "create_graph"),
        (replace(SEEN, captures_graphs="train.py mentions CUDAGraph"), "captured graph"),
    ],
)
def test_it_is_refused(seen: Observed, why: str) -> None:
    assert why in LEVER.applies(CPU, seen).reason


def test_it_is_offered_and_nothing_is_promised_where_no_call_was_seen() -> None:
    assert LEVER.applies(CPU, SEEN).values == ("none",)
    unseen = replace(SEEN, gradients_zeroed=None)
    assert LEVER.applies(CPU, unseen).values == ("none",)  # a run asks after its first step: the call may come later
    assert LEVER.saving(CPU, unseen).most == 0.0


MEASURED = Ceilings(
    device="cpu",
    gemm_flops_per_second={},
    memory_copy_bytes_per_second=Peak(value=1e10, low=1e10, high=1e10, samples=1, unit="B/s", how=""),
    launches_per_second=Peak(value=1e6, low=1e6, high=1e6, samples=1, unit="/s", how=""),
    quick=True,
    threads=1,
    measured_at="",
    torch_version="",
)


def test_the_saving_follows_from_the_gradients_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_to_none, "page_fault_seconds", lambda: 1e-6)
    here, kept = replace(CPU, ceilings=MEASURED), replace(SEEN, page_faults_per_step=0.0)
    saving = LEVER.saving(here, kept)
    assert saving.most == pytest.approx(2 * (16e6 / 1e10 + 200 / 1e6) / 0.01)  # 1.6 ms of memory, 0.2 ms of calls
    assert saving.expected == pytest.approx((1.8e-3 - 300e-6) / 0.01)  # less what looking takes
    assert "18.0% of a step" in saving.why
    given_back = LEVER.saving(here, replace(SEEN, page_faults_per_step=5000.0))
    assert given_back.expected == pytest.approx(saving.expected - 4e6 / 4096 * 1e-6 / 0.01)
    assert given_back.least == saving.least < given_back.expected
    on_gpu = LEVER.saving(replace(AMPERE, ceilings=replace(MEASURED, device="cuda:0")), replace(SEEN, device="cuda:0"))
    assert on_gpu.expected == saving.expected


def test_nothing_measured_nothing_bounded() -> None:
    assert LEVER.saving(CPU, SEEN).expected == 0.01
