"""A batch that does not fit is split and tried again: the same gradients, the same random numbers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from flatout.errors import MachineError
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.plan import Plan
from flatout.train.loss import supervised
from flatout.train.step import TrainStep
from tests.processes import Python


class Limited(nn.Module):
    """Runs out of memory, as torch says it on the CPU, for more than `limit` samples at once: late, after some work."""

    def __init__(self, limit: int, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32) if norm else nn.Tanh(), nn.Dropout(0.0))
        self.head, self.limit = nn.Linear(32, 4), limit
        self.draws: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        self.draws.append(float(torch.rand(())))
        if len(x) > self.limit:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 42")
        return self.head(hidden)


def step_of(model: nn.Module, plan: Plan | None = None) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)


def batch(samples: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(1)), torch.arange(samples) % 4


def test_gradients_random_numbers_and_the_size_that_was_found() -> None:
    free, tight = Limited(100), Limited(4)
    torch.manual_seed(7)
    expected = step_of(free)(batch())
    step = step_of(tight)
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="did not fit; from now on it is split into"):
        loss = step(batch())
    torch.testing.assert_close(loss, expected)
    for one, other in zip(free.parameters(), tight.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.grad, other.grad)
    assert step.micro_batches == 4
    assert tight.draws[0] == tight.draws[1] == tight.draws[2] == free.draws[0]  # each try began from the same state
    step(batch())  # no warning, no further try
    assert step.state_dict()["micro_batches"] == 4


@pytest.mark.slow
def test_a_failed_try_leaves_nothing() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    model = Limited(100)
    step, inputs = step_of(model), batch()
    step(inputs)
    step.finish()  # some losses are kept until they are looked at
    before = tensors()
    model.limit = 4
    with pytest.warns(UserWarning, match="did not fit"):
        step(inputs)
    step.finish()
    assert tensors() <= before


def test_layers_that_mix_samples_are_told_of_or_refused() -> None:
    model = Limited(4, norm=True)
    before = model.body[1].running_mean.clone()
    with pytest.warns(UserWarning, match="not exact: body.1 mixes the samples of a batch"):
        step_of(model)(batch())
    reference = Limited(100, norm=True)
    step_of(reference, Plan(micro_batches=4))(batch())
    torch.testing.assert_close(model.body[1].running_mean, reference.body[1].running_mean)  # not those of failed tries
    assert not torch.equal(model.body[1].running_mean, before)
    with pytest.raises(MachineError, match=r"body.1 mixes the samples"):
        step_of(Limited(4, norm=True), Plan(out_of_memory="exact"))(batch())


@pytest.mark.slow
def test_the_end_is_said_clearly() -> None:
    with (
        pytest.warns(UserWarning, match="did not fit"),
        pytest.raises(MachineError, match="a single sample of this batch does not fit"),
    ):
        step_of(Limited(0))(batch())
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        step_of(Limited(4), Plan(out_of_memory="raise"))(batch())


REAL = """
import resource, warnings, torch
from torch import nn
from flatout.train.loss import supervised
from flatout.train.step import TrainStep
torch.set_num_threads(1)
def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)])
x = torch.randn(72_000, 128)  # each activation is more than the 32 MiB up to which malloc may keep what is freed
y = torch.randn(72_000, 128)
def train(model):
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.MSELoss()))
    return float(step((x, y))), step.micro_batches
free = net()
loss, parts = train(free)
assert parts == 1
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
tight = net()
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    again, parts = train(tight)
assert parts > 1, parts
assert abs(again - loss) < 1e-5 * loss
for one, other in zip(free.parameters(), tight.parameters()):
    torch.testing.assert_close(one, other)
print("split into", parts)
"""


@pytest.mark.slow
def test_a_real_limit_is_survived(python: Python) -> None:
    run = python("-c", REAL)
    assert run.returncode == 0, run.stderr
    assert "split into" in run.stdout


class Counting(Limited):
    """Its forward pass writes buffers in three ways, of which torch counts one."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("uncounted", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.in_place += 1
        self.uncounted.data += 1
        self.replaced = self.replaced + 1
        return super().forward(x)


def test_a_failed_try_leaves_no_trace_in_buffers() -> None:
    """Neither in the first step nor in a later one, when it is known which of them change."""
    for first in (4, 14):
        model = Counting(first)
        step = step_of(model)
        step(batch(4))
        model.limit = 4
        with pytest.warns(UserWarning, match="did not fit"):
            step(batch())
        assert step.micro_batches == 4
        counted = [float(one) for one in (model.in_place, model.uncounted, model.replaced, model.kept)]
        assert counted == [5.0, 5.0, 5.0, 0.0]


def test_a_batch_that_cannot_be_split_is_not_blamed_for_its_sizes() -> None:
    def loss(model: Any, given: Any) -> Any:
        return nn.functional.cross_entropy(model(given["x"]), given["y"])

    model = Limited(4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    x, y = batch()
    with pytest.raises(MachineError, match=r"a batch does not fit into the memory of cpu; it cannot be split: .* size"):
        step({"x": x, "y": y, "classes": torch.arange(4)})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("any"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_says_that_memory_is_out(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_smaller_batch_has_parts_as_large_as_those_that_fit() -> None:
    """An epoch's last batch would get parts of one sample, on which batch norm fails."""
    model = Limited(16, norm=True)
    step = step_of(model)
    with pytest.warns(UserWarning, match="a batch of 64 did not fit; from now on it is split into"):
        step(batch(64))
    assert step.micro_batches == 4
    model.draws.clear()
    step(batch(5))
    assert len(model.draws) == 1
    model.limit = 3  # its samples are larger than those before
    with pytest.warns(UserWarning, match="a batch of 6 did not fit"):
        step(batch(6))
    assert step.micro_batches == 4
    resumed = step_of(model)
    resumed.load_state_dict(step.state_dict())
    model.draws.clear()
    resumed(batch(5))
    assert len(model.draws) == 2


def test_a_part_that_fails_is_no_surprise() -> None:
    with (
        pytest.warns(UserWarning, match="did not fit"),
        pytest.raises(
            MachineError, match="a batch of 2 does not fit, and a part of it fails: ValueError: Expected more"
        ),
    ):
        step_of(Limited(1, norm=True))(batch(2))


class Late(Limited):
    """Its average begins after some calls."""

    def __init__(self, first: int) -> None:
        super().__init__(100)
        self.register_buffer("average", torch.zeros(()))
        self.first, self.calls = first, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls >= self.first:
            self.average += 1
        return super().forward(x)


def test_a_buffer_that_changes_later_is_put_back_or_the_batch_is_refused() -> None:
    model = Late(3)
    step = step_of(model)
    for _ in range(3):
        step(batch(8))
    model.limit = 4
    with pytest.warns(UserWarning, match="did not fit"):
        step(batch(8))
    assert float(model.average) == 3.0  # two parts; the failed attempt does not count
    model = Late(3)
    step = step_of(model)
    for _ in range(2):
        step(batch(8))
    model.limit = 4
    with pytest.raises(MachineError, match="the failed attempt has changed the buffer average of Late"):
        step(batch(8))


def test_a_buffer_of_inference_mode_does_not_stop_training() -> None:
    model = Limited(4)
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(3))
    with pytest.warns(UserWarning, match="did not fit"):
        step_of(model)(batch(8))
