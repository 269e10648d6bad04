"""Loops as strangers write them: which steps are found in them, and that watching changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.data.fetch import batched_fetch
from flatout.script import runner as runner_module
from flatout.script import watch as watch_module
from flatout.script.describe import breakdown, observe
from flatout.script.runner import Runner
from flatout.script.spans import KINDS
from flatout.script.watch import Watch
from flatout.torch_private.loading import BaseIterator


def net(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))


def batch() -> torch.Tensor:
    return torch.randn(5, 3)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """Watches this process's torch, until the test ends."""
    before = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad, DataLoader.__iter__
    runner = Runner()
    runner._torch_imported(torch)
    yield runner
    assert runner.fault is None
    runner.watch.uninstall()
    after = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad, DataLoader.__iter__
    for now, original in zip(after, before, strict=True):  # where torch.compile knows a function by ours, ours stays
        assert now is original or ("torch._dynamo" in sys.modules and now.__wrapped__ is original)


def optimizer_loop(steps: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(batch()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def endless(steps: int) -> None:
    model, done = net(), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        model(batch()).mean().backward()
        optimizer.step()
        done += 1
        if done == steps:
            break


def accumulation(steps: int, passes: int = 12) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        for _ in range(passes):
            (model(batch()).mean() / passes).backward()
        optimizer.step()
        optimizer.zero_grad()


def gan(steps: int, critics: int = 1) -> None:
    generator, critic = net(), net(1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.RMSprop(critic.parameters())
    for _ in range(steps):
        for _ in range(critics):
            of_critic.zero_grad()
            fake = generator(batch()).detach()
            real = torch.randn(5, 1, requires_grad=True)
            (slope,) = torch.autograd.grad(
                outputs=critic(real), inputs=real, grad_outputs=torch.ones(5, 1), create_graph=True, retain_graph=True
            )
            (critic(fake).mean() - critic(real).mean() + (slope.norm() - 1) ** 2).backward()
            of_critic.step()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-1, 1)
        of_generator.zero_grad()
        (-critic(generator(batch())).mean()).backward()
        of_generator.step()


def several_optimizers(steps: int) -> None:
    model = net()
    optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    for _ in range(steps):
        model(batch()).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def lbfgs(steps: int) -> None:
    model, x = net(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


class Wrapping(torch.optim.Optimizer):
    """As closure-style frameworks wrap: an Optimizer around another one, whose closure runs the pass."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrapped_optimizer(steps: int) -> None:
    model = net()
    optimizer = Wrapping(torch.optim.Adam(model.parameters()))
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.inner.zero_grad()
            loss = model(batch()).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def two_phases(steps: int) -> None:
    model = net()
    for rate in (0.1, 0.01):
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for _ in range(steps // 2):
            model(batch()).mean().backward()
            optimizer.step()
        del optimizer


def manual_data(steps: int) -> None:
    model = net()
    for _ in range(steps):
        model.zero_grad()
        model(batch()).mean().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


def manual_no_grad(steps: int) -> None:
    w, b = torch.zeros(3, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    for _ in range(steps):
        loss = (batch() @ w + b - 1).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in (w, b):
                weight -= 0.1 * weight.grad
                weight.grad = None


def manual_makemore(steps: int) -> None:
    weights = [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)]
    for _ in range(steps):
        for p in weights:
            p.grad = None
        (batch() @ weights[0] + weights[1]).square().mean().backward()
        for p in weights:
            p.data += -0.1 * p.grad


def functional(steps: int) -> None:
    w = torch.zeros(3, 1, requires_grad=True)
    for _ in range(steps):
        (slope,) = torch.autograd.grad((batch() @ w - 1).square().mean(), w)
        w = (w - 0.1 * slope).detach().requires_grad_()


def functional_backward(steps: int) -> None:
    w = torch.zeros(3, 1, requires_grad=True)
    for _ in range(steps):
        (batch() @ w - 1).square().mean().backward()
        w = (w - 0.1 * w.grad).detach().requires_grad_()


def checkpointed(steps: int) -> None:
    from torch.utils.checkpoint import checkpoint

    model = net()
    for _ in range(steps):
        model.zero_grad()
        x = batch().requires_grad_()
        checkpoint(model, x, use_reentrant=True).mean().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


def exception_inside_a_step(steps: int) -> None:
    first, second = net(), net()
    optimizer = torch.optim.SGD(first.parameters(), 0.1)

    def fails() -> float:
        raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        optimizer.step(fails)
    del optimizer
    gc.collect()
    other = torch.optim.SGD(second.parameters(), 0.1)
    for _ in range(steps):
        second(batch()).mean().backward()
        other.step()


def never_trains(steps: int) -> None:
    model = net()
    with torch.no_grad():
        for _ in range(steps):
            model(batch())


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        (optimizer_loop, "optimizer"),
        (endless, "optimizer"),
        (accumulation, "optimizer"),
        (gan, "optimizer"),
        (lambda steps: gan(steps, critics=5), "optimizer"),
        (several_optimizers, "optimizer"),
        (lbfgs, "optimizer"),
        (wrapped_optimizer, "optimizer"),
        (two_phases, "optimizer"),
        (exception_inside_a_step, "optimizer"),
        (manual_data, "manual"),
        (manual_no_grad, "manual"),
        (manual_makemore, "manual"),
        (checkpointed, "gradient"),  # the weights are hidden from the outer pass; its passes still count
        (functional, "gradient"),
        (functional_backward, "gradient"),
    ],
)
def test_steps_of_a_loop(runner: Runner, loop: Callable[[int], None], kind: str) -> None:
    loop(30)
    runner.ended()
    assert (runner.watch.finder.kind, runner.record.steps) == (kind, 30)


def test_a_script_that_never_trains_has_no_step(runner: Runner) -> None:
    never_trains(5)
    assert (runner.watch.finder.kind, runner.record.steps) == (None, 0)
    assert len(runner.watch.subject.modules) == 0


def test_a_window_tells_where_the_time_goes(runner: Runner) -> None:
    data = DataLoader(TensorDataset(torch.randn(200, 3)), batch_size=5, shuffle=True)
    held_out = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=5)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in data:
        model(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for (y,) in held_out:
                model(y)
    rows = [*runner.record.rows, *runner.watch.close_window()]
    assert rows
    for row in rows:
        assert set(row.parts) == {"data", "forward", "backward", "optimizer", "evaluation", "other"}
        assert sum(row.parts.values()) == pytest.approx(row.seconds)
        assert row.backwards == 1
        assert all(seconds >= 0 for seconds in row.parts.values())
    parts = breakdown(rows)
    assert set(parts) == set(KINDS)
    seen = observe(runner.watch, threads_at_start=None, rows=rows)
    assert [loader.samples for loader in seen.loaders] == [200]  # the one that feeds training
    assert (seen.modules[0].linears, seen.optimizers[0].kind, seen.step_kind) == (2, "SGD", "optimizer")


@pytest.mark.parametrize("function", ["grad", "vmap"])
def test_gradients_that_a_loss_is_made_of_take_a_backward_passs_time(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAML's inner steps, gradient penalties and `torch.func.grad` are no Python of the script's own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = torch.autograd.grad

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return plain(*args, **kwargs)

    def per_sample(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    monkeypatch.setattr(torch.autograd, "grad", slow)
    watch = Watch()
    watch.install(torch)
    watch.rows = []
    try:
        for _ in range(3):
            if function == "grad":
                x = batch().requires_grad_()
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                slope.square().mean().backward()
            else:
                weights = {name: weight.detach() for name, weight in model.named_parameters()}
                slopes = torch.func.vmap(torch.func.grad(per_sample), in_dims=(None, 0))(weights, batch())
                for name, weight in model.named_parameters():
                    weight.grad = slopes[name].mean(0)
            optimizer.step()
        rows = watch.close_window()
    finally:
        watch.uninstall()
    assert [row.parts["backward"] >= 0.01 for row in rows] == [True] * 3
    assert [row.backwards for row in rows] == [function == "grad"] * 3  # the others are parts of a loss


def test_a_teacher_belongs_to_the_step_and_an_averaged_model_to_evaluation() -> None:
    model, teacher, averaged = net(), net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = Watch()
    watch.install(torch)
    watch.rows = []
    try:
        for step in range(20):
            with torch.no_grad():
                wanted = teacher(batch())
            (model(batch()) - wanted).square().mean().backward()
            optimizer.step()
            if step % 10 == 4:
                with torch.no_grad():
                    for _ in range(5):
                        averaged(batch())
        evaluated = [index for index, row in enumerate(watch.close_window()) if row.parts.get("evaluation")]
    finally:
        watch.uninstall()
    assert evaluated == [0, 5, 15]  # in the first step it is not known yet


def test_a_model_that_is_evaluated_with_its_weights_frozen_first_is_known(runner: Runner) -> None:
    """As a solver of differential equations is, whose residuals need gradients of the inputs in evaluation too."""
    model = net()
    model.requires_grad_(False)
    model(batch().requires_grad_())
    model.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(batch()).mean().backward()
        optimizer.step()
    assert model in runner.watch.subject.modules


def test_losses_and_random_numbers_are_the_same() -> None:
    def train() -> list[Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for _ in range(3):
            for (x,) in DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4, shuffle=True):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return [*losses, *torch.get_rng_state().tolist()]

    plain = train()
    runner = Runner()
    runner._torch_imported(torch)
    watched = train()
    runner.watch.uninstall()
    runner.ended()
    assert runner.record.steps == 30
    assert watched == plain


def test_calls_and_mistakes_are_passed_on(runner: Runner) -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(outputs=x.sum(), inputs=x)[0].tolist() == [1, 1]
    torch.autograd.backward(tensors=[x.sum(), x.prod()], grad_tensors=[None, None])
    torch.autograd.backward(root for root in [x.sum()])
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(x * 2), torch.ones(2))
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'tensors'"):
        torch.autograd.backward()  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert isinstance(net(), nn.Module)
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_a_class_that_runs_forward_past_torchs_call_has_a_forward_pass(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of GPyTorch. Outside of windows the class is as it was."""
    monkeypatch.setattr(watch_module, "compile_was_asked_for", lambda: False)  # another test may have compiled

    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            return x * self.weight

    own, model = Past.__call__, Past()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        model(batch()).mean().backward()
        optimizer.step()
    rows = [*runner.record.rows, *runner.watch.close_window()]
    assert rows
    assert all(row.parts.get("forward", 0.0) >= 0.01 for row in rows)
    assert Past.__call__ is own


def test_a_module_that_compares_by_value_works(runner: Runner) -> None:
    @dataclasses.dataclass
    class Scale(nn.Module):
        factor: float

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    with pytest.raises(TypeError, match="unhashable"):
        hash(Scale.__new__(Scale))
    scale = Scale(2.0)
    assert scale(torch.ones(1)).item() == 2.0
    runner.watch.open_window()
    optimizer_loop(1)
    for _ in range(2):
        with torch.no_grad():
            assert scale(torch.ones(1)).item() == 2.0
    runner.watch.close_window()


def test_a_model_that_is_dropped_is_freed(runner: Runner) -> None:
    for loop in (optimizer_loop, manual_no_grad):
        loop(5)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(batch()).mean().backward()
        optimizer.step()
    gone = [weakref.ref(model), weakref.ref(next(model.parameters())), weakref.ref(optimizer)]
    copied = copy.deepcopy(model)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert len(runner.watch.subject.modules) == 0
    assert copied(batch()).shape == (5, 1)


def test_other_threads_are_left_alone(runner: Runner) -> None:
    def work() -> None:
        torch.set_grad_enabled(True)
        optimizer_loop(5)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runner.watch.steps == 0
    optimizer_loop(5)
    assert runner.watch.steps == 5


def test_compiled_code_is_traced_as_if_nobody_watched(runner: Runner) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).relu()

    model = Inner()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own code
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        @torch.compile(backend="eager", fullgraph=True)
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).mean()

        whole = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            (loss_of(batch()) + whole(batch()).mean()).backward()
            optimizer.step()
        stepping = torch.compile(optimizer.step, backend="eager")
        model(batch()).mean().backward()
        stepping()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
        assert not [reason for reason in torch._dynamo.utils.counters["graph_break"] if "flatout" in reason]
        assert not [reason for reason in torch._dynamo.utils.counters["graph_break"] if "get_ident" in reason]
        torch._dynamo.reset()
    assert runner.record.steps >= 4


def test_an_error_of_ours_is_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    runner._torch_imported(torch)

    def fail(seconds: float, steps: int) -> None:
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(runner.record, "add_steps", fail)
    optimizer_loop(5)
    assert runner.fault == "Flatout could not watch this script: ZeroDivisionError: a defect of ours"
    assert not runner.watch.enabled
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_what_a_handler_of_the_script_raises_is_the_scripts(runner: Runner) -> None:
    """Wherever it comes: an alarm that ends training must not be lost because it went off in a function of ours."""

    class Late(Exception):
        pass

    def late(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGUSR1, late)
    try:
        runner.at_second.append(lambda now: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(Late):
            optimizer_loop(5)
        runner.at_second.clear()
    finally:
        signal.signal(signal.SIGUSR1, before)
    optimizer_loop(5)
    assert runner.watch.enabled


class Ticks:
    """A clock by which a step takes 0.1 ms, however busy the machine is."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now


@pytest.mark.parametrize("steps", [40, 41, 57, 100])
def test_steps_that_are_let_pass_are_counted(runner: Runner, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Quick steps are looked at several at a time; the count is exact all the same."""
    monkeypatch.setattr(runner_module, "time", Ticks())
    optimizer_loop(80)  # past the first window
    runner.watch.resume()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runner.watch.finder.optimizer_stepped(id(optimizer))  # it leads from now on
    before = runner.watch.finder.steps
    runner.watch.suspend(boundary_every=16)
    assert runner.watch.suspended
    boundaries = runner.record.timed
    for _ in range(steps):
        model(batch()).mean().backward()
        optimizer.step()
    assert 0 < runner.record.timed - boundaries <= steps // 16 + 1
    runner.ended()
    assert runner.record.steps == before + steps


def test_another_optimizer_wakes_a_watch_that_lets_steps_pass(runner: Runner) -> None:
    optimizer_loop(40)
    optimizer_loop(200)
    runner.ended()
    assert runner.record.steps == 240


def test_a_short_phase_with_another_optimizer_is_counted_too(runner: Runner) -> None:
    optimizer_loop(60)
    assert runner.watch.suspended
    optimizer_loop(30)
    runner.ended()
    assert runner.record.steps == 90


def test_an_optimizer_that_is_gone_is_forgotten(runner: Runner) -> None:
    """In cross-validation each fold has its own, which often lies where that of an earlier fold was: its steps were
    taken for those of one that takes turns with the leader."""
    for steps in (60, 30, 30):
        optimizer_loop(steps)
        gc.collect()
        assert runner.watch.finder.optimizers == 0
        assert runner.watch.finder.leader is None
    runner.ended()
    assert runner.record.steps == 120


def test_a_loader_may_return_any_iterator(runner: Runner) -> None:
    class Listed(DataLoader[torch.Tensor]):
        def _get_iterator(self) -> Any:
            return iter([torch.ones(2, 3), torch.zeros(2, 3)])  # takes no weak references

    assert len(list(Listed(TensorDataset(torch.zeros(4, 3))))) == 2


def test_a_loader_that_is_made_anew_for_every_epoch_feeds_training(runner: Runner) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(12, 3))
    seen: list[int] = []
    runner.watch.at_boundary.append(
        lambda: seen.append(len(observe(runner.watch, threads_at_start=None, rows=()).loaders))
    )
    for _ in range(3):
        for (x,) in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for (x,) in DataLoader(data, batch_size=6):
                model(x)
        gc.collect()
    assert set(seen[1:]) <= {1, 2}, seen


@pytest.mark.parametrize("fold", [gan, functools.partial(gan, critics=5), wrapped_optimizer])
@pytest.mark.parametrize("boundary_every", [1, 16])
def test_folds_are_counted_whenever_the_watch_lets_steps_pass(boundary_every: int, fold: Callable[[int], None]) -> None:
    """Also from the first step of the critic of a new fold on, which could be the one that ends the steps."""
    watch = Watch()
    watch.install(torch)
    try:
        fold(20)
        watch.at_boundary.append(lambda: watch.suspend(boundary_every))
        for _ in range(3):
            fold(20)
        watch.count_passed()
    finally:
        watch.uninstall()
    assert watch.finder.steps == 80


@pytest.mark.parametrize("compiled", [False, True])
def test_batched_fetch_lets_the_watch_take_its_wrapper_off_and_put_it_back(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """While it held on to the wrapper, every batch went through it and through the profiler's record. What compiled
    code may call stays on."""
    monkeypatch.setattr(watch_module, "compile_was_asked_for", lambda: compiled)
    watch = Watch()
    watch.install(torch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True)

    def train() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    def code_of_next() -> CodeType:  # a reference to the function itself would count
        found: CodeType = BaseIterator.__next__.__code__
        return found

    try:
        with batched_fetch():
            train()
            watch.suspend()
            assert watch.suspended
            train()
            assert code_of_next().co_filename == inspect.getfile(torch.utils.data.dataloader)
            assert (torch.nn.Module.__call__.__code__.co_filename == inspect.getfile(Watch)) is compiled
            watch.resume()
            assert not watch.suspended
            assert code_of_next().co_filename == inspect.getfile(Watch)
            train()
    finally:
        watch.uninstall()
    assert watch.finder.steps == 9


class LikeATensor:
    """To torch; it holds one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tuple(one.tensor for one in arg) if isinstance(arg, tuple) else arg for arg in args[:1]]
        return func(*given, *args[1:], **(kwargs or {}))


def test_a_pass_from_what_torch_takes_for_a_tensor() -> None:
    weight, watch = torch.ones(2, requires_grad=True), Watch()
    watch.install(torch)
    try:
        torch.autograd.backward(LikeATensor((weight * 3).sum()))  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(LikeATensor((weight * 2).sum()), weight)  # type: ignore[arg-type]
    finally:
        watch.uninstall()
    assert weight.grad is not None
    assert (weight.grad.tolist(), gradient.tolist(), watch.backwards) == ([3.0, 3.0], [2.0, 2.0], 2)


class InAThread(torch.autograd.Function):
    """Its backward runs another pass in a thread, as autograd does for a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        ctx.others = others
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        thread = threading.Thread(target=torch.autograd.backward, args=[ctx.others])
        thread.start()
        thread.join()
        return gradient, None


def test_levers_act_on_what_is_recomputed_in_autograds_thread() -> None:
    from torch.utils.checkpoint import checkpoint

    def lever(module: nn.Module, call: Callable[[], object]) -> object:
        calls.append((module, threading.current_thread() is threading.main_thread()))
        return call()

    calls: list[tuple[nn.Module, bool]] = []
    block, head, watch = net(), net(), Watch()
    watch.install(torch)
    try:
        with watch.subject.around_calls(lever):
            inner: Any = checkpoint(block, batch(), use_reentrant=False)
            InAThread.apply(head(batch()), [inner.sum()]).sum().backward()
    finally:
        watch.uninstall()
    assert calls == [(block, True), (head, True), (block, False)]
