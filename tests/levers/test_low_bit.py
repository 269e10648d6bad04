"""Moments in 8 bits: nearly the same course, a quarter of the state, everything around the optimizer as before."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import MachineError, UsageError
from flatout.levers import low_bit
from flatout.levers.low_bit import LowBitOptimizer, is_in_codes, low_bit_obstacle
from flatout.plan import Plan
from flatout.train.step import TrainStep
from tests.allocator_record import allocator_recorded, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
LOSS = flatout.supervised(nn.CrossEntropyLoss())
PLAN = Plan(optimizer_state="8bit")
WIDTH = 64


def model() -> nn.Sequential:
    """Two matrices of one shape in whole blocks (one compilation), and parameters that are too small."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def batch(samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.randint(0, 3, (samples,))


def groups(net: nn.Sequential) -> list[dict[str, Any]]:
    """Each with its own rate, decay and epsilon; the last layer of the second has none that is large."""
    return [
        {"params": net[0].parameters(), "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-7},
        {"params": [*net[2].parameters(), *net[4].parameters()], "lr": 1e-3, "betas": (0.8, 0.99)},
    ]


def trained(plan: Plan, make: Any, steps: int = 12) -> tuple[nn.Sequential, Any, list[float]]:
    net = model()
    optimizer = make(groups(net))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    step = TrainStep(net, optimizer, LOSS, plan, scheduler=schedule, clip_norm=None)
    losses = [float(step(batch())) for _ in range(steps)]
    step.close()
    return net, optimizer, losses


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_the_course_is_nearly_that_of_full_moments(make: Any) -> None:
    net, optimizer, losses = trained(PLAN, make)
    plain, other, plainly = trained(Plan(), make)
    assert losses == pytest.approx(plainly, rel=0.03)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    for one, same in zip(net.parameters(), plain.parameters(), strict=True):
        assert (one - same).abs().max() < 1.2e-2  # four learning rates; a second moment of zero would make it hundreds
        state = optimizer.state[one]
        assert {key: (type(value), value.dtype) for key, value in state.items()} == {
            key: (type(value), value.dtype) for key, value in other.state[same].items()
        }
        assert state["step"] == 12


@pytest.mark.usefixtures("uncompiled_torchao")
def test_every_option_of_the_groups_counts() -> None:
    """Against the same run with other options, the weights differ as those of full moments do."""
    changes: list[dict[str, Any]] = [{"lr": 1e-2}, {"betas": (0.5, 0.9)}, {"weight_decay": 5.0}]
    for change in changes:
        ours, plain = (
            trained(plan, lambda parts, change=change: torch.optim.AdamW([{**one, **change} for one in parts]), 6)[0]
            for plan in (PLAN, Plan())
        )
        rate = change.get("lr", 1e-3)
        torch.testing.assert_close(ours[2].weight, plain[2].weight, atol=3 * rate, rtol=0)


def test_a_state_that_was_there_is_taken_over() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(5):
        TrainStep(net, optimizer, LOSS)(batch())
    before = copy.deepcopy(optimizer.state[net[0].weight])
    step = TrainStep(net, optimizer, LOSS, PLAN)
    state = optimizer.state[net[0].weight]
    assert is_in_codes(state["exp_avg"])
    assert not is_in_codes(optimizer.state[net[0].bias]["exp_avg"])
    assert state["step"] == 5
    scale = before["exp_avg"].abs().max()
    torch.testing.assert_close(state["exp_avg"].dequantize(), before["exp_avg"], atol=0.02 * float(scale), rtol=0)
    step.close()
    assert type(state["exp_avg"]) is torch.Tensor


@pytest.mark.usefixtures("uncompiled_torchao")
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    def begin() -> tuple[nn.Sequential, Any, TrainStep]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return net, optimizer, TrainStep(net, optimizer, LOSS, PLAN)

    net, optimizer, step = begin()
    for _ in range(3):
        step(batch())
    with flatout.Checkpoints(tmp_path) as folder:
        folder.save(flatout.capture(model=net, optimizer=optimizer), step=3)
        for _ in range(3):
            step(batch())
        other, resumed, again = begin()
        again(batch())  # its state is in codes already, and replaced
        flatout.restore(folder.load(), model=other, optimizer=resumed)
    for _ in range(3):
        again(batch())
    for one, same in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("plan", [PLAN, Plan(optimizer_state="8bit", optimizer_in_backward=True)])
@pytest.mark.slow
def test_the_forecast_is_what_torch_then_records(plan: Plan) -> None:
    def make() -> Any:
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 3))
        return net, torch.optim.AdamW(net.parameters()), (torch.randn(4, 256), torch.randint(0, 3, (4,)))

    found = flatout.forecast(TrainStep(*make()[:2], LOSS, plan), make()[2])
    warm = make()
    TrainStep(*warm[:2], LOSS, plan)(warm[2])  # compiled
    with allocator_recorded() as peak_in_window:
        net, optimizer, data = make()
        step = TrainStep(net, optimizer, LOSS, plan)
        with window():
            step(data)
            step(data)
    assert found.method == "fake run"
    assert found.peak_bytes == pytest.approx(peak_in_window(), rel=0.03)
    full = flatout.forecast(TrainStep(net, torch.optim.AdamW(net.parameters()), LOSS, Plan()), data)
    assert found.categories["optimizer"] < 0.3 * full.categories["optimizer"]


@pytest.mark.usefixtures("uncompiled_torchao")
def test_accumulation_clipping_and_scaling_go_with_it() -> None:
    for choices in ({"micro_batches": 2}, {"nonfinite": "skip"}, {"precision": "bf16"}, {"optimizer": "fused"}):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        in_backward = {} if "micro_batches" in choices else {"clip_norm": 1.0}
        step = TrainStep(net, optimizer, LOSS, Plan(optimizer_state="8bit", **choices), **in_backward)  # type: ignore[arg-type]
        first, *_, last = [float(step(batch())) for _ in range(10)]
        assert last < 0.5 * first
        assert not step.rolled_back
        step.close()


def test_what_has_no_such_moments_is_refused() -> None:
    net = model()
    with pytest.raises(UsageError, match="the optimizer is SGD"):
        TrainStep(net, torch.optim.SGD(net.parameters(), 0.1), LOSS, PLAN)
    with pytest.raises(UsageError, match="maximize"):
        TrainStep(net, torch.optim.Adam(net.parameters(), maximize=True), LOSS, PLAN)
    small = nn.Linear(4, 3)
    with pytest.raises(UsageError, match="at least 4096 elements"):
        TrainStep(small, torch.optim.Adam(small.parameters()), LOSS, PLAN)


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    assert low_bit_obstacle(optimizer) is None
    monkeypatch.setattr(low_bit.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"torchao is not installed; .*pip install torchao"):
        TrainStep(net, optimizer, LOSS, PLAN)


def test_a_namesake_of_torchs_optimizer_is_told_from_it() -> None:
    namesake = type("AdamW", (torch.optim.AdamW,), {"__module__": "library.optimizers"})
    found = low_bit_obstacle(namesake(model().parameters()))
    assert found == "the optimizer is library.optimizers.AdamW, not torch.optim.Adam or AdamW"


def test_a_kernel_that_does_not_compile_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.optim.adam

    def fails(*args: Any) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

    monkeypatch.setattr(torchao.optim.adam.torch, "compile", lambda *args, **kwargs: fails)
    net = model()
    step = TrainStep(net, torch.optim.Adam(net.parameters()), LOSS, PLAN)
    with pytest.raises(MachineError, match="does not compile"):
        step(batch())


@pytest.mark.slow
def test_moments_that_are_taken_over_are_never_zero_where_they_were_not() -> None:
    """A few large gradients beside many small ones: divided by a second moment of zero, these would leap."""
    weights = []
    for held_in_codes in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(WIDTH, WIDTH, bias=False)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        gradient = torch.randn(WIDTH, WIDTH) * torch.logspace(-5, 0, WIDTH)
        for number in range(6):
            step = LowBitOptimizer(optimizer).step if number == 5 and held_in_codes else optimizer.step
            before = net.weight.detach().clone()
            net.weight.grad = gradient * (1 + 0.1 * number)
            step()
        weights.append(net.weight.detach() - before)
    plain, ours = weights
    assert ours.abs().max() < 2 * plain.abs().max()  # one that leaps moves by hundreds of learning rates


@pytest.mark.usefixtures("uncompiled_torchao")
def test_the_optimizers_own_state_dict_is_plain() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = TrainStep(net, optimizer, LOSS, PLAN)
    step(batch())
    held = optimizer.state[net[0].weight]
    saved = optimizer.state_dict()
    assert is_in_codes(held["exp_avg"])  # saving changed nothing
    assert all(type(value) is torch.Tensor for entry in saved["state"].values() for value in entry.values())
    assert torch.equal(saved["state"][0]["exp_avg"], held["exp_avg"].dequantize())
    optimizer.load_state_dict(saved)
    step(batch())
    assert is_in_codes(optimizer.state[net[0].weight]["exp_avg"])
    step.close()
    assert not optimizer._optimizer_state_dict_post_hooks


@pytest.mark.usefixtures("uncompiled_torchao")
def test_hooks_before_a_step_see_every_parameter_as_it_was() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = TrainStep(net, optimizer, LOSS, PLAN)
    before = [one.detach().clone() for one in net.parameters()]
    seen: list[bool] = []

    def look(optimizer: Any, *_: Any) -> None:
        (group,) = optimizer.param_groups
        seen.extend(torch.equal(one, other) for one, other in zip(group["params"], before, strict=True))

    optimizer.register_step_pre_hook(look)
    step(batch())
    assert seen == [True] * len(before)
    assert not any(torch.equal(one, other) for one, other in zip(net.parameters(), before, strict=True))
    assert len(optimizer._optimizer_step_pre_hooks) == 1
