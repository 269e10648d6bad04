"""What levers do to the numbers, and that nothing of them stays."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Lever
from flatout.levers.subject import Subject
from flatout.plan import Plan
from flatout.precision.denormals import flush_denormals, flushed_everywhere, flushed_here
from flatout.train.step import TrainStep

VALUES = {
    "batched fetch": "batched",
    "malloc retains memory": "retain",
    "flush denormals": True,
    "threads": 2,
    "optimizer": "fused",
    "cudnn.benchmark": True,
    "channels_last": "channels_last",
    "fused batch norm": "fused",
    "autocast": "bf16",
    "matmul precision": "medium",
}


pytestmark = pytest.mark.usefixtures("one_thread")


def lever(name: str) -> Lever:
    return next(one for one in LEVERS if one.name == name)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)  # a bias before a normalisation has noise for a gradient
        self.norm = torch.nn.BatchNorm2d(4)
        self.last = torch.nn.Linear(4 * 16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.norm(self.conv(x))).flatten(1))
        return out


ADAM: Callable[..., Any] = lambda p: torch.optim.Adam(p, lr=1e-3)  # noqa: E731
SGD: Callable[..., Any] = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3, dampening=0.1)  # noqa: E731
RMS: Callable[..., Any] = lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5)  # noqa: E731


class Training:
    """A small network on random images, with handles in a subject."""

    def __init__(self, make: Callable[..., Any] = ADAM) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(self.model.parameters())
        self.subject = Subject()
        self.subject.modules.add(self.model)
        self.subject.optimizers.add(self.optimizer)
        self.x, self.y = torch.randn(8, 3, 6, 6), torch.randint(0, 2, (8,))

    def steps(self, count: int) -> None:
        for _ in range(count):
            out = self.subject.call(self.model, lambda: self.model(self.x))
            assert out.dtype == torch.float32
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(out, self.y).backward()
            self.optimizer.step()

    def layouts(self) -> list[Any]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [tensor.stride() for tensor in tensors]

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def global_state() -> list[Any]:
    onednn: Any = torch.backends.mkldnn
    backends = [onednn, onednn.matmul, onednn.conv, onednn.rnn, torch.backends.cuda.matmul]
    return [
        torch.get_num_threads(),
        flushed_here(),
        torch.get_float32_matmul_precision(),
        *(backend.fp32_precision for backend in backends),
        torch.backends.cudnn.benchmark,
        _MapDatasetFetcher.fetch,
        torch.is_autocast_enabled("cpu"),
        torch.nn.functional.batch_norm,
    ]


@pytest.mark.parametrize("name", VALUES)
def test_nothing_stays(name: str) -> None:
    training = Training()
    training.steps(2)
    before, layouts, state = global_state(), training.layouts(), training.optimizer.state_dict()["param_groups"]
    with lever(name).apply(training.subject, VALUES[name]):
        training.steps(2)
        assert training.optimizer.state_dict()["param_groups"] == state
    assert global_state() == before
    assert training.layouts() == layouts
    assert training.optimizer.state_dict()["param_groups"] == state
    assert (training.subject.wrappers, training.subject.backward_wrappers) == ([], [])
    assert training.model._compiled_call_impl is None
    training.steps(1)


@pytest.mark.parametrize("value", ["fused", "foreach"])
@pytest.mark.parametrize("make", [ADAM, SGD, RMS])
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("layout", [False, True])
def test_optimizer_equals_plain(value: str, make: Callable[..., Any], first: int, layout: bool) -> None:
    plain, training = Training(make), Training(make)
    plain.steps(25)
    training.steps(first)
    with lever("optimizer").apply(training.subject, value):
        if layout:
            with lever("channels_last").apply(training.subject, "channels_last"):
                training.steps(15)
                assert training.model.conv.weight.is_contiguous()
                for parameter, state in training.optimizer.state.items():
                    assert all(v.stride() == parameter.stride() for v in state.values() if v is not None and v.dim())
        else:
            training.steps(15)
    training.steps(10 - first)
    torch.testing.assert_close(training.weights(), plain.weights(), rtol=1e-4, atol=2e-5)
    assert training.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]


def test_a_model_that_is_not_watched_keeps_its_moments() -> None:
    training = Training()
    training.subject.modules._references.clear()
    plain = Training()
    plain.steps(6)
    with lever("channels_last").apply(training.subject, True), lever("optimizer").apply(training.subject, "fused"):
        training.steps(6)
    torch.testing.assert_close(training.weights(), plain.weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [ADAM, SGD])
def test_gradients_that_lie_otherwise_and_layers_that_thaw(make: Callable[..., Any]) -> None:
    def run(fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(3))]
        optimizer, subject = make(parameters), Subject()
        subject.optimizers.add(optimizer)
        with lever("optimizer").apply(subject, "fused") if fused else torch.enable_grad():
            for step in range(4):
                parameters[0].grad = torch.randn(4, 3).t()
                parameters[1].grad = torch.randn(3) if step > 1 else None
                optimizer.step()
        return [p.detach() for p in parameters]

    torch.testing.assert_close(run(True), run(False))


def test_parameters_with_gaps_and_tensor_rates_are_not_for_every_kernel() -> None:
    from flatout.levers.fused_optimizer import see_optimizer

    assert not see_optimizer(ADAM([torch.nn.Parameter(torch.randn(4, 4)[:, :2])])).can_fuse
    assert see_optimizer(ADAM([torch.nn.Parameter(torch.randn(4, 4).t())])).can_fuse
    assert not see_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))).can_foreach
    assert see_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], fused=True)).obstacle


def test_flags_are_gone_although_a_step_raised() -> None:
    training = Training()
    training.steps(1)

    def fail() -> float:
        raise KeyError

    with lever("optimizer").apply(training.subject, "fused"), pytest.raises(KeyError):
        training.optimizer.step(fail)
    assert training.optimizer.param_groups[0]["fused"] is None


def test_denormals_in_every_thread() -> None:
    torch.set_num_threads(2)
    with flush_denormals():
        assert flushed_everywhere()
    assert ((torch.full((1 << 18,), 1e-40) * 0.5) != 0).all()


def test_threads_that_the_plan_adds_flush_no_denormals_afterwards() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    plan = Plan(threads=2, flush_denormals=True)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), lambda model, x: model(x).sum(), plan)
    assert flushed_everywhere()
    step.close()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert ((torch.full((1 << 18,), 1e-40) * 0.5) != 0).all()


def test_settings_of_steps_that_overlap_end_with_the_last_of_them() -> None:
    torch.set_num_threads(2)
    first, second = (
        TrainStep(model, torch.optim.SGD(model.parameters()), lambda model, x: model(x).sum(), plan)
        for plan in (Plan(threads=1, flush_denormals=True), Plan(threads=3, flush_denormals=True))
        for model in (torch.nn.Linear(2, 2),)
    )
    first.close()
    assert torch.get_num_threads() == 3
    assert flushed_everywhere()
    second.close()
    assert torch.get_num_threads() == 2
    assert not flushed_here()
    assert ((torch.full((1 << 18,), 1e-40) * 0.5) != 0).all()


def test_settings_of_steps_in_two_threads_end_in_each() -> None:
    torch.set_num_threads(2)

    def made(threads: int) -> TrainStep:
        model = torch.nn.Linear(2, 2)
        plan = Plan(threads=threads, flush_denormals=True)
        return TrainStep(model, torch.optim.SGD(model.parameters()), lambda model, x: model(x).sum(), plan)

    def elsewhere() -> None:
        before = torch.get_num_threads(), flushed_here()
        step = made(3)
        opened.set()
        closed.wait(60)
        step.close()
        there.append((torch.get_num_threads(), flushed_here()) == before)

    opened, closed, there = threading.Event(), threading.Event(), list[bool]()
    other = threading.Thread(target=elsewhere)
    step = made(1)
    other.start()
    assert opened.wait(60)
    step.close()
    here = torch.get_num_threads(), flushed_here()
    closed.set()
    other.join()
    assert here == (2, False)
    assert there == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_denormals_that_the_script_flushes_stay_so(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(True)
    try:
        with flush_denormals():
            assert flushed_everywhere()
        assert flushed_here()
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(before)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on the CPU needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_dropout_equals_eager() -> None:
    from torch._inductor import config

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    subject, x = Subject(), torch.randn(2, 4)
    subject.modules.add(model)
    torch.manual_seed(1)
    plain = model(x)
    before = config.fallback_random
    with lever("torch.compile").apply(subject, "default"):
        torch.manual_seed(1)
        compiled = model(x)
    torch.testing.assert_close(compiled, plain)
    assert model._compiled_call_impl is None
    assert config.fallback_random == before


def test_what_a_first_compilation_builds_is_found_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache, config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, config.cpp.vec_isa_ok
    subject = Subject()
    with lever("torch.compile").apply(subject, "default"):
        assert Path(codecache._HEADER_DIR).parent == tmp_path
        assert Path(codecache._HEADER_LOCK_DIR).parent == Path(codecache._HEADER_DIR)
    assert (codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, config.cpp.vec_isa_ok) == before
