"""BehaviourWatch on small loops: it sees the fault in each, and nothing in the healthy ones."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts
from flatout.levers.subject import Subject
from flatout.precision.recurrent import MOST_ERROR, gradient_error
from flatout.profiling.profile import Profile
from flatout.script import behaviour, layers_alone
from flatout.script.behaviour import BehaviourWatch
from flatout.script.behaviour_seen import Behaviour
from flatout.script.gradient_watch import GradientWatch
from flatout.script.layers_alone import ConvolutionTimer
from flatout.script.loss_graph import end_of_graph
from flatout.script.places import Places
from flatout.script.source_facts import SourceFacts, read_source
from flatout.script.tensor_calls import TensorCalls
from flatout.script.update_watch import EXAMINED_STEPS, UpdateWatch

STEPS = 14
HERE = Path(__file__)
Step = Callable[[int], None]

# what the step functions use


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1), *layers)


def data() -> Tensor:
    return torch.randn(16, 6)


def watched(step: Step, *models: nn.Module, steps: int = STEPS) -> Behaviour:
    """`step(n)` is one training step of the loop."""
    subject = Subject(training_only=True)
    for model in models:
        subject.modules.add(model)
        subject.note_training(model)
    step(0)
    watch = BehaviourWatch(str(HERE.parent))
    watch.start(subject)
    for number in range(1, steps + 1):
        step(number)
        watch.step_ended()
    watch.stop()
    found = watch.result()
    assert found.notes == ()
    assert Behaviour.from_json(json.loads(json.dumps(found.to_json()))) == found
    return found


@functools.cache
def own_source() -> SourceFacts:
    return read_source([str(HERE)], str(HERE.parent))


def names(found: Behaviour, *, step_seconds: float = 0.01) -> list[str]:
    """Of the checks that fire, other than those of time, which a test must not judge."""
    profile = Profile(
        name="t", device="cpu", step_kind="optimizer", steps=5, timed_steps=5, warm_up_steps=1,
        step_seconds=step_seconds, profiled_step_seconds=step_seconds, parts=None,
    )  # fmt: skip
    facts = Facts(behaviour=found, profile=profile, source=own_source())
    timed = ("python-time", "logging-time", "disk-time", "plotting-time", "no-seed", "repeated-to")
    return [one.name for one in check_facts(facts) if one.name not in timed]


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have compiled in this process; forwards are not watched then."""
    monkeypatch.setattr(behaviour, "compile_was_asked_for", lambda: False)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """What is patched is put back, by a watch that ends as much as by one that is never stopped."""
    from torch.nn.utils import clip_grad

    owners = (
        nn.Module,
        torch.optim.Optimizer,
        torch.autograd,
        torch.Tensor,
        clip_grad,
        torch.amp.grad_scaler.GradScaler,
    )
    before = [dict(vars(owner)) for owner in owners]
    yield
    gc.collect()
    gc.freeze()
    for owner, known in zip(owners, before, strict=True):
        changed = {name for name, value in vars(owner).items() if known.get(name) is not value}
        pythons = ("__warningregistry__", "__slotnames__")  # of what was warned of, and of what was copied
        assert changed.difference(pythons) == set(), owner


def healthy(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = (model(data()) - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def test_a_healthy_loop() -> None:
    model = net()
    found = watched(healthy(model, torch.optim.SGD(model.parameters(), 0.01)), model)
    assert names(found) == []
    assert found.steps == STEPS
    (forward,) = found.forwards
    assert (forward.calls, forward.training, forward.grad, forward.used) == (STEPS, True, True, STEPS)
    assert forward.line[0] == "test_behaviour.py"
    assert "model(data())" in forward.line[2]
    assert (found.accumulated_steps, found.zeroed_steps) == (0, STEPS - 1)
    (backward,) = found.backwards
    assert (backward.per_step, backward.scaled, backward.reduction) == (1.0, False, "mean")
    assert len(found.losses) == STEPS
    assert found.weights_move
    assert len(found.gradients[0].layers) == 2
    (clip,) = found.clips
    assert (clip.steps, clip.before_backward) == (STEPS - 1, 0)


def test_models_are_copied_and_saved_as_without_the_watch() -> None:
    images = [nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(1, 2)]
    model, copies = nn.Sequential(nn.Embedding(9, 6), *images, nn.LSTM(6, 4)), []
    scale = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([scale, *model.parameters()], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (model(torch.randint(9, (4, 5)))[0] * scale).square().mean().backward()
        torch.save((model, scale), io.BytesIO())
        copies.append(copy.deepcopy(model))
        optimizer.step()

    watched(step, model)
    assert not any(one._forward_pre_hooks or one._forward_hooks for made in copies for one in made.modules())


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_script_froze_stays_frozen(frozen: bool) -> None:
    if frozen:
        gc.freeze()
    else:
        gc.unfreeze()
    model = net()
    watched(healthy(model, torch.optim.SGD(model.parameters(), 0.01)), model)
    assert (gc.get_freeze_count() > 0) == frozen


def test_gradients_that_are_never_cleared() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step(number: int) -> None:
        model(data()).square().mean().backward()
        optimizer.step()

    assert names(watched(step, model)) == ["missing-zero-grad"]


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("clears", ["one", "both", "module"])
def test_one_of_two_optimizers_is_never_cleared(clears: str, fills: bool) -> None:
    body, head = net(nn.Linear(1, 6)), net()
    optimizers = [torch.optim.SGD(one.parameters(), 1e-3) for one in (body, head)]
    cleared: dict[str, Any] = {"one": optimizers[:1], "both": optimizers, "module": [body, head]}

    def step(number: int) -> None:
        for one in cleared[clears]:
            one.zero_grad(set_to_none=not fills)
        head(body(data())).square().mean().backward()
        for one in optimizers:
            one.step()

    found = [name for name in names(watched(step, body, head)) if name != "zero-grad-fills"]
    assert found == (["missing-zero-grad"] if clears == "one" else [])


@pytest.mark.parametrize("clear", ["none", "zero", "module"])
def test_gradients_that_are_cleared_by_hand(clear: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step(number: int) -> None:
        for parameter in model.parameters():
            if clear == "none":
                parameter.grad = None
            elif clear == "zero" and parameter.grad is not None:
                parameter.grad.zero_()
        if clear == "module":
            model.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()

    assert names(watched(step, model)) == []


def test_sparse_gradients_are_no_gradients_of_0() -> None:
    bag, head = nn.EmbeddingBag(50, 8, mode="mean", sparse=True), nn.Linear(8, 1)
    optimizers = [torch.optim.SparseAdam(list(bag.parameters())), torch.optim.Adam(head.parameters())]

    def step(number: int) -> None:
        for one in optimizers:
            one.zero_grad()
        head(bag(torch.randint(0, 50, (16, 5)))).square().mean().backward()
        for one in optimizers:
            one.step()

    assert names(watched(step, bag, head)) == []


def test_two_optimizers_of_a_gan() -> None:
    maker, judge = net(nn.Linear(1, 6)), net()
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (maker, judge)]

    def step(number: int) -> None:
        made = maker(data())
        optimizers[1].zero_grad()
        loss = judge(data()).mean() - judge(made.detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judge(made).mean().backward()
        optimizers[0].step()

    assert names(watched(step, maker, judge)) == []


def test_a_gradient_penalty_and_a_graph_that_is_used_twice() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(number: int) -> None:
        x = data().requires_grad_()
        out = model(x)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        out.mean().backward(retain_graph=True)
        slope.square().mean().backward()
        optimizer.step()

    found = watched(step, model)
    assert names(found) == []
    assert sorted((one.retained, one.retained_needed) for one in found.backwards) == [(0, 0), (STEPS, STEPS)]


def test_a_graph_that_is_retained_for_nothing() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).mean().backward(retain_graph=True)
        optimizer.step()

    assert names(watched(step, model)) == ["needless-retain-graph"]


def fitting(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    """A closure for LBFGS."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return closure


def test_lbfgs() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = data(), torch.randn(16, 1)
    closure = fitting(model, optimizer, x, y)

    assert names(watched(lambda number: optimizer.step(closure), model)) == []  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("rate", "seen"), [(0.5, []), (0.0, ["loss-not-falling"])])
def test_lbfgs_that_moves_nothing(rate: float, seen: list[str]) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=rate, max_iter=20, tolerance_grad=1e-2)
    x, y = data(), torch.randn(16, 1)
    closure = fitting(model, optimizer, x, y)

    for _ in range(20):
        optimizer.step(closure)  # type: ignore[arg-type]
    found = watched(lambda number: optimizer.step(closure), model)  # type: ignore[arg-type, return-value]
    assert found.weights_move is False
    assert found.stops_where_converged is bool(rate)
    assert names(found) == seen


def test_a_scheduler_after_a_step_with_a_closure() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        return loss.item()

    def step(number: int) -> None:
        optimizer.step(closure=closure) if number % 2 else optimizer.step(closure)
        scheduler.step()

    found = watched(step, model)
    assert [(one.calls, one.between) for one in found.schedulers] == [(STEPS, 0)]


class Spread(Tensor):
    """Stands in for a DTensor: whatever needs more than this rank's part would be a collective."""

    @staticmethod
    def __new__(cls, part: Tensor) -> Spread:
        made: Spread = Tensor._make_wrapper_subclass(cls, (2 * len(part), *part.shape[1:]))
        return made

    def __init__(self, part: Tensor) -> None:
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        assert func is torch.ops.aten.detach.default, f"{func} is a collective"
        return cls(args[0].part)

    def to_local(self) -> Tensor:
        return self.part


def test_of_parameters_that_are_spread_over_ranks_one_part_is_read() -> None:
    model, watch = nn.Linear(3, 4), GradientWatch()
    model.weight, model.bias = (nn.Parameter(Spread(torch.ones(shape))) for shape in ((2, 3), (2,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for one in model.parameters():
        one.grad = Spread(torch.ones_like(one.part))
    watch.reach(model.parameters())
    watch.measure([model], optimizer, {id(one) for one in model.parameters()})
    model.weight.part.add_(1.0)
    watch.compare()
    (found,) = watch.gradients()
    assert [one.rms for one in found.layers] == [pytest.approx((1.0,))]
    assert found.weight_norm == pytest.approx(24**0.5)
    assert watch.unchanged_share == pytest.approx(0.25)
    assert watch.outside_optimizer([optimizer]) is None


def accumulating(model: nn.Module, scale: float) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        for _ in range(4):
            loss = model(data()).square().mean()
            (loss / 4 if scale == 4 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_accumulation() -> None:
    model = net()
    found = watched(accumulating(model, 4), model)
    assert names(found) == []
    assert (found.backwards[0].per_step, found.backwards[0].scaled) == (4.0, True)
    model = net()
    summed = watched(accumulating(model, 1), model)
    assert (summed.backwards[0].scaled, summed.backwards[0].reduction) == (False, "mean")


@pytest.mark.parametrize(("reduction", "seen"), [("mean", "mean"), ("sum", "sum")])
def test_a_loss_of_torchs_is_reduced_as_it_was_asked(reduction: str, seen: str) -> None:
    for loss in (functional.mse_loss, functional.smooth_l1_loss, functional.cross_entropy):
        targets = torch.tensor([0, 1, 2]) if loss is functional.cross_entropy else torch.randn(3, 4)
        made = loss(torch.randn(3, 4, requires_grad=True), targets, reduction=reduction)
        assert end_of_graph(made, scaler=False) == (False, seen)


@pytest.mark.parametrize(("apart", "callers"), [(True, 2), (False, 1)])
def test_passes_that_a_function_makes_for_its_callers(apart: bool, callers: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def backward() -> None:
        model(data()).square().mean().backward()

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(1 if apart else 2):
            backward()
        if apart:
            backward()
        optimizer.step()

    (found,) = watched(step, model).backwards
    assert (found.per_step, found.callers) == (2.0, callers)


def test_a_clip_before_the_gradients_are_there() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss.backward()
        optimizer.step()

    found = watched(step, model)
    assert names(found) == ["clip-before-backward"]
    assert "clip_grad_norm_" in found.clips[0].line[2]


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_clip_of_scaled_gradients(unscaled: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(data()).square().mean()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = watched(step, model)
    assert names(found) == ([] if unscaled else ["clip-before-unscale"])
    assert found.scaler
    assert max(found.losses) < 4.0  # not multiplied by the scale


def test_weights_that_move_after_a_warm_up_from_zero() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > EXAMINED_STEPS + 3))

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        scheduler.step()

    assert watched(step, model, steps=EXAMINED_STEPS).weights_move is False
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > EXAMINED_STEPS + 3))
    assert watched(step, model, steps=EXAMINED_STEPS + 8).weights_move is True


@pytest.mark.parametrize("steps", [True, False])
def test_a_scheduler_that_never_steps(steps: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        if steps:
            scheduler.step()

    found = watched(step, model)
    assert [(one.kind, one.steps) for one in found.idle_schedulers] == ([] if steps else [("StepLR", STEPS)])
    text = "scheduler = StepLR(optimizer, 5)\n" + "scheduler.step()\n" * steps
    known = Facts(behaviour=found, source=SourceFacts.of({"train.py": text}))
    assert ("scheduler-never-steps" in [one.name for one in check_facts(known)]) is not steps


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("in each step", True),
        ("in each step, without momentum", True),
        ("once", False),
        ("twice, in turns", False),
        ("every second step", False),
        ("without state", False),
        ("with a closure", False),
        ("of a new copy", False),
    ],
)
def test_an_optimizer_that_is_made_in_each_step(made: str, found: bool) -> None:
    model = net()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    pair = [torch.optim.Adam(model.parameters()) for _ in range(2)]
    kept: list[torch.optim.Optimizer] = []

    def step(number: int) -> None:
        nonlocal optimizer
        trained = copy.deepcopy(model) if made == "of a new copy" else model
        if made == "twice, in turns":
            optimizer = pair[number % 2]
        elif made != "once" and (made != "every second step" or number % 2):
            kind = torch.optim.RMSprop if made.endswith("momentum") else torch.optim.Adam
            optimizer = kind(trained.parameters())
            kept[:] = [optimizer] if number % 3 else []
        if made == "without state":
            optimizer = torch.optim.SGD(trained.parameters(), 0.01)

        def loss() -> float:
            optimizer.zero_grad()
            value = trained(data()).square().mean()
            value.backward()
            return value.item()

        if made == "with a closure":
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()

    seen = watched(step, model)
    assert ("optimizer-made-in-each-step" in [one.name for one in check_facts(Facts(behaviour=seen))]) is found
    if found:
        ((one,), (line,)) = seen.remade_optimizers, seen.optimizer_lines
        assert (one.kind, one.remade, one.steps, one.line) == (type(optimizer).__name__, STEPS - 1, STEPS, line)


def test_no_hook_is_left_where_a_new_optimizer_has_the_id_of_one_that_is_gone() -> None:
    watch = UpdateWatch(Places(str(HERE.parent)), lambda call: call())
    models = [net(), net()]
    for model in models:
        model(data()).square().mean().backward()
    first, second = (torch.optim.Adam(model.parameters()) for model in models)
    watch._on = True
    watch._judge(first, ("train.py", 1), by_closure=False)
    watch._states[id(second)] = watch._states.pop(id(first))
    watch._judge(second, ("train.py", 1), by_closure=False)
    assert any(parameter._backward_hooks for parameter in models[0].parameters())
    watch.stop()
    assert not any(parameter._backward_hooks for model in models for parameter in model.parameters())


@pytest.mark.parametrize(("last", "found"), [("softmax", True), ("log_softmax", False), ("relu", False)])
def test_a_softmax_before_the_cross_entropy(last: str, found: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    function = {"softmax": nn.Softmax(1), "log_softmax": nn.LogSoftmax(1), "relu": nn.ReLU()}[last]

    def step(number: int) -> None:
        optimizer.zero_grad()
        scores = function(model(data())).unsqueeze(-1).squeeze(-1)
        nn.functional.cross_entropy(scores, torch.randint(3, (16,))).backward()
        optimizer.step()

    assert ("softmax-before-cross-entropy" in names(watched(step, model))) is found


def watched_with(scheduler: Any, model: nn.Module, *, first: bool) -> Behaviour:
    """Steps in which the scheduler comes before its optimizer, or after it."""
    optimizer = scheduler.optimizer

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        for one in (scheduler, optimizer) if first else (optimizer, scheduler):
            one.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return watched(step, model)


@pytest.mark.parametrize(("first", "found"), [(True, ["scheduler-order"]), (False, [])])
def test_the_order_of_a_scheduler(first: bool, found: list[str]) -> None:
    model = net()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.01), 5)
    assert names(watched_with(scheduler, model, first=first)) == found


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """Steps without that of its base class."""

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["own", "restarts", "sequence"])
def test_schedulers_with_a_step_of_their_own(kind: str, first: bool) -> None:
    model, own_step = net(), Halving.step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = made_scheduler(kind, torch.optim.SGD(model.parameters(), 0.01))
    (found,) = watched_with(scheduler, model, first=first).schedulers
    assert (found.calls, found.between) == (STEPS, STEPS - 1 if first else 0)
    assert Halving.step is own_step


def made_scheduler(kind: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    from torch.optim import lr_scheduler

    if kind == "own":
        return Halving(optimizer)
    if kind == "restarts":
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def evaluating(model: nn.Module, *, evaluates: bool, grad: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        model.train()
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        if number % 4 == 3:
            if evaluates:
                model.eval()
            with torch.set_grad_enabled(grad):
                total = 0.0
                for _ in range(5):
                    total += model(data()).mean().item()

    return step


@pytest.mark.parametrize(
    ("evaluates", "grad", "found"),
    [
        (True, False, []),
        (True, True, ["evaluation-with-grad"]),
        (False, False, ["evaluation-in-train-mode"]),
        (False, True, ["evaluation-in-train-mode", "evaluation-with-grad"]),
    ],
)
def test_evaluation(evaluates: bool, grad: bool, found: list[str]) -> None:
    model = net()
    seen = watched(evaluating(model, evaluates=evaluates, grad=grad), model)
    assert names(seen) == found
    assert any("total += model" in one.line[2] for one in seen.forwards)


@pytest.mark.parametrize(
    ("layers", "inputs", "found"),
    [
        ([], "one", []),
        ([], "refilled", ["evaluation-in-train-mode"]),
        ([nn.BatchNorm1d(1)], "one", ["evaluation-in-train-mode"]),
    ],
)
def test_dropout_that_draws_several_samples_of_one_prediction(
    layers: list[nn.Module], inputs: str, found: list[str]
) -> None:
    """Active learning asks with Monte Carlo dropout how sure a model is."""
    model, held = net(*layers), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        if number % 4 == 3:
            with torch.no_grad():
                for _ in range(5):
                    if inputs == "refilled":
                        held.copy_(data())
                    model(held)

    assert names(watched(step, model)) == found


def with_norm(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, width))


@pytest.mark.parametrize("adversarial", [True, False])
def test_samples_of_a_generator_are_no_evaluation(adversarial: bool) -> None:
    generator, judge = with_norm(6), nn.Linear(6, 1)
    of_generator, of_judge = (torch.optim.SGD(one.parameters(), 0.01) for one in (generator, judge))

    def step(number: int) -> None:
        of_judge.zero_grad()
        (judge(generator(data()).detach()).mean() - judge(data()).mean()).backward()
        of_judge.step()
        of_generator.zero_grad()
        made = generator(data())
        (judge(made) if adversarial else made).mean().backward()
        of_generator.step()
        if number % 11 == 10:
            with torch.no_grad():
                generator(data())

    found = watched(step, generator, judge, steps=34)
    assert "evaluation-in-train-mode" not in names(found) if adversarial else "evaluation-in-train-mode" in names(found)


def test_models_of_one_class_are_told_apart() -> None:
    frozen, other = with_norm(1), with_norm(1)
    optimizer = torch.optim.SGD([*frozen.parameters(), *other.parameters()], 0.01)
    frozen.eval()

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = frozen(data()).mean()
        loss = loss + other(data()).mean()
        loss.backward()
        optimizer.step()

    assert "training-in-eval-mode" in names(watched(step, frozen, other))


class FunctionalDropout(nn.Module):
    def __init__(self, rate: float, options: dict[str, bool]) -> None:
        super().__init__()
        self.layer, self.rate, self.options = nn.Linear(6, 1), rate, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x, self.rate, **self.options))  # the line that is named


@pytest.mark.parametrize(
    ("evaluates", "rate", "options", "found"),
    [
        (True, 0.5, {}, ["evaluation-in-train-mode"]),
        (True, 0.0, {}, []),
        (True, 0.5, {"training": True}, []),  # said so: meant
        (False, 0.5, {}, []),  # the mode is not even asked for; nothing says that this is an evaluation
    ],
)
def test_dropout_that_does_not_follow_the_mode(
    evaluates: bool, rate: float, options: dict[str, bool], found: list[str]
) -> None:
    model = FunctionalDropout(rate, options)
    seen = watched(evaluating(model, evaluates=evaluates, grad=False), model)
    assert names(seen) == found
    for finding in check_facts(Facts(behaviour=seen)):
        assert "the line that is named" in finding.lines[0][2]


def test_an_evaluation_lasts_until_the_next_training_step() -> None:
    model, seen = net(), []
    watch = BehaviourWatch(str(HERE.parent))
    watch.start(Subject(training_only=True))
    x = torch.ones(4, 6)
    with torch.no_grad():
        model(x)
    seen.append(watch._sampler.evaluates())
    model(x)
    seen.append(watch._sampler.evaluates())
    watch.stop()
    assert seen == [True, False]


def test_training_that_goes_on_in_evaluation_mode() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        if number == 4:
            model.eval()

    assert names(watched(step, model)) == ["training-in-eval-mode"]


def test_a_frozen_backbone_in_evaluation_mode() -> None:
    backbone, head = net(nn.Linear(1, 4)).eval().requires_grad_(False), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        head(backbone(data())).square().mean().backward()
        optimizer.step()

    assert names(watched(step, backbone, head)) == []


def test_an_average_of_the_weights() -> None:
    model, average = net(), net().requires_grad_(False)
    inner = healthy(model, torch.optim.SGD(model.parameters(), 0.01))

    def step(number: int) -> None:
        inner(number)
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            average(data())

    assert names(watched(step, model)) == []


def test_parameters_that_no_optimizer_has() -> None:
    model = net()
    optimizer = torch.optim.SGD(list(model.parameters())[:2], 0.01)

    def step(number: int) -> None:
        model.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()

    found = watched(step, model)
    assert names(found) == ["parameters-not-in-optimizer"]
    assert found.outside_optimizer is not None
    assert found.outside_optimizer.names == ("3.weight", "3.bias")


def test_gradients_that_are_nothing_but_zeros_do_not_count_as_cleared() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        (model(data()).square().mean() * 0.0).backward()
        optimizer.step()

    found = watched(step, model)
    assert (found.accumulated_steps, found.zeroed_steps) == (0, 0)


class LayersInAList(nn.Module):
    """A module does not register what a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 8)
        self.hidden = [nn.Linear(8, 8)]
        self.end = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        result: Tensor = self.end(x)
        return result


def test_layers_in_a_list_get_no_updates() -> None:
    model = LayersInAList()
    found = watched(healthy(model, torch.optim.SGD(model.parameters(), 0.01)), model)
    assert "parameters-not-in-optimizer" in names(found)
    assert found.outside_optimizer is not None
    assert found.outside_optimizer.module == "LayersInAList"
    assert sorted(found.outside_optimizer.names) == ["hidden[0].bias", "hidden[0].weight"]


def test_weights_of_a_loss_that_no_optimizer_has() -> None:
    model, scale = net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (model(data()).square() * scale.exp()).mean().backward()
        optimizer.step()

    found = watched(step, model)
    assert "parameters-not-in-optimizer" in names(found)
    assert found.outside_optimizer is not None
    assert (found.outside_optimizer.module, found.outside_optimizer.names) == ("", ("one of shape [3]",))


def test_inputs_that_are_optimised_through_a_frozen_model() -> None:
    model, image = net(), nn.Parameter(torch.randn(4, 6))
    model.requires_grad_(False)
    optimizer = torch.optim.SGD([image], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(image).square().mean().backward()
        optimizer.step()

    assert watched(step, model).outside_optimizer is None


def test_parameters_that_are_updated_by_hand() -> None:
    model = net()
    optimizer = torch.optim.SGD(list(model.parameters())[:2], 0.01)

    def step(number: int) -> None:
        model.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in list(model.parameters())[2:]:
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad

    assert names(watched(step, model)) == []


class MakesLayers(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(6, 8), inside
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.LayerNorm(8, elementwise_affine=False)(nn.ReLU()(self.first(x)))
        if not self.inside:
            return self.last(x)
        made: Tensor = nn.Linear(8, 1)(x)
        return made


@pytest.mark.parametrize("inside", [True, False])
def test_layers_made_in_forward(inside: bool) -> None:
    model = MakesLayers(inside=inside)
    optimizer = torch.optim.SGD(model.first.parameters() if inside else model.parameters(), 0.01)
    seen = watched(healthy(model, optimizer), model)
    assert [name for name in names(seen) if name != "parameters-not-in-optimizer"] == (
        ["modules-made-in-forward"] if inside else []
    )
    assert [(one.kind, one.made, one.steps) for one in seen.made_in_forward] == (
        [("Linear", STEPS, STEPS)] if inside else []
    )


@pytest.mark.parametrize("under_fork_rng", [True, False])
def test_a_seed_that_holds_only_while_a_library_trains_is_one(under_fork_rng: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = BehaviourWatch(str(HERE.parent))
    with torch.random.fork_rng():
        torch.seed()
        with torch.random.fork_rng():
            if under_fork_rng:
                torch.manual_seed(1)
            watch.start(Subject(training_only=True))
            for number in range(3):
                healthy(model, optimizer)(number)
                watch.step_ended()
        watch.stop()
        assert watch.result().seeded is under_fork_rng


@pytest.mark.parametrize(
    ("what", "fires"), [("loss", True), ("sum", True), ("in place", True), ("number", False), ("deque", False)]
)
def test_graphs_that_are_kept(what: str, fires: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept: list[Any] = []
    total: Any = torch.zeros(())

    def step(number: int) -> None:
        nonlocal total
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        optimizer.step()
        if what == "sum":
            total = total + loss
        elif what == "in place":
            total += loss
        else:
            kept.append(loss.item() if what == "number" else loss)
        if what == "deque":
            del kept[:-2]

    found = names(watched(step, model))
    assert found == (["graph-kept-by-logging"] if fires else [])


def test_anomaly_detection() -> None:
    model = net()
    inner = healthy(model, torch.optim.SGD(model.parameters(), 0.01))

    def step(number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                inner(number)

    assert names(watched(step, model)) == ["anomaly-mode"]


def test_fp16_without_a_scaler() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(data()).square().mean()
        loss.backward()
        optimizer.step()

    assert names(watched(step, model)) == ["fp16-without-scaler"]


def test_half_weights() -> None:
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data().half()).float().square().mean().backward()
        optimizer.step()

    assert names(watched(step, model)) == ["half-weights"]


def test_a_learning_rate_of_zero() -> None:
    model = net()
    found = watched(healthy(model, torch.optim.SGD(model.parameters(), 0.0)), model)
    assert names(found) == ["loss-not-falling"]


def test_gradients_that_vanish_and_that_explode() -> None:
    def deep(scale: float, activation: type[nn.Module]) -> nn.Module:
        layers = [layer for _ in range(12) for layer in (nn.Linear(8, 8), activation())]
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=scale)
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 1))

    model = deep(0.1, nn.Sigmoid)
    assert names(watched(healthy(model, torch.optim.SGD(model.parameters(), 1e-3)), model)) == ["vanishing-gradients"]
    model = deep(0.35, nn.Tanh)
    assert names(watched(healthy(model, torch.optim.SGD(model.parameters(), 1e-3)), model)) == []


def test_padding() -> None:
    class Tagger(nn.Module):
        def __init__(self, padding: int | None) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(20, 4, padding_idx=padding), nn.Linear(4, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.last(self.table(tokens))
            return out

    def tokens(longest: int) -> Tensor:
        made = torch.randint(1, 20, (16, 40))
        for row, length in enumerate(torch.randint(4, longest + 1, (16,)).tolist()):
            made[row, length:] = 0
        return made

    for padding, longest, found in ((0, 12, ["padding-waste"]), (None, 12, ["padding-waste"]), (None, 40, [])):
        model = Tagger(padding)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(number: int, model: nn.Module = model, optimizer: Any = optimizer, longest: int = longest) -> None:
            optimizer.zero_grad()
            model(tokens(longest) if longest < 40 else torch.randint(1, 20, (16, 40))).square().mean().backward()
            optimizer.step()

        assert names(watched(step, model)) == found


def test_padding_is_that_of_the_embedding_with_the_most_positions() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.place = nn.Embedding(20, 4, padding_idx=0), nn.Embedding(40, 4)
            self.tag = nn.Embedding(9, 4, padding_idx=1)

        def forward(self, words: Tensor, tags: Tensor) -> Tensor:
            places = torch.arange(40).expand(16, 40)
            return self.word(words) + self.place(places) + self.tag(tags).mean(1, keepdim=True)

    model, words = Tagger(), torch.randint(1, 20, (16, 40))
    words[:, 10:] = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(words, torch.ones(16, 6, dtype=torch.long)).square().mean().backward()
        optimizer.step()

    padding = watched(step, model).padding
    assert padding is not None
    assert (padding.share, padding.value, padding.positions) == (0.75, 0, STEPS * 16 * 40)


def test_shapes_are_those_of_one_model_at_one_line() -> None:
    first, second, loss = net(), net(), nn.MSELoss()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        rows = 4 + number % 2
        loss(first(torch.randn(rows, 6)), torch.randn(rows, 1)).backward()
        second(torch.randn(7, 6)).square().mean().backward()
        optimizer.step()

    found = watched(step, first, second)
    assert (found.batch_shapes, sorted(found.example_shapes)) == (2, ["[4, 6]", "[5, 6]"])


def test_a_tensor_that_is_converted_again_and_again() -> None:
    model = net()
    weights = torch.ones(16, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = (model(data()) * weights.to(torch.float32)).square().mean()
        loss.backward()
        optimizer.step()

    (call,) = watched(step, model).calls
    assert (call.method, call.calls, call.repeated) == ("to", STEPS, STEPS - 1)
    assert "weights.to(" in call.line[2]


def test_inference_tensors_have_no_version() -> None:
    model = net()
    with torch.inference_mode():
        weights = torch.ones(16, 1, dtype=torch.float64)
    inner = healthy(model, torch.optim.SGD(model.parameters(), 0.01))

    def step(number: int) -> None:
        inner(number)
        weights.to(torch.float32)

    (call,) = watched(step, model).calls
    assert (call.calls, call.repeated) == (STEPS, 0)


def test_calls_that_wait_for_a_gpu_are_known_while_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seen = TensorCalls(Places(str(HERE.parent)), lambda call: call()), []

    def item(tensor: Tensor) -> float:
        seen.append(calls.waiting)
        return 1.0

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "item", item)
        for on_gpu in (True, False):
            calls.start(on_gpu=on_gpu)
            torch.ones(1).item()
            seen.append(calls.waiting)
            calls.stop()
    assert seen == [True, False, False, False]


class DistributedDataParallel(nn.Sequential):
    """As far as is looked at."""

    find_unused_parameters = True


@pytest.mark.parametrize("in_turns", [True, False])
def test_parameters_that_some_steps_do_not_use(in_turns: bool) -> None:
    model = DistributedDataParallel(nn.Linear(6, 1), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        used = [model[number % 2]] if in_turns and number < STEPS else model
        torch.stack([one(data()) for one in used]).square().mean().backward()
        optimizer.step()

    found = watched(step, model)
    assert found.parallel[0].unused_parameters == (4 if in_turns else 0)
    assert ("needless-find-unused-parameters" in names(found)) is not in_turns


def test_recomputation() -> None:
    from torch.utils.checkpoint import checkpoint

    first, last = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        last(checkpoint(first, data(), use_reentrant=False)).square().mean().backward()
        optimizer.step()

    found = watched(step, first, last)
    assert found.recomputed_seconds
    assert names(found) == []


def test_a_module_in_a_backward_pass_is_no_recomputation() -> None:
    model, helper = net(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + 0 * helper(gradient)

    def step(number: int) -> None:
        optimizer.zero_grad()
        Scaled.apply(model(data())).square().mean().backward()
        optimizer.step()

    assert watched(step, model).recomputed_seconds is None


def test_losses_that_are_not_finite() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e30)
    found = watched(healthy(model, optimizer), model)
    assert found.losses[-1] is None
    assert "loss-not-falling" in names(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_convolutions_are_timed_in_both_formats() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 3, 16, 16)).square().mean().backward()
        optimizer.step()

    timed = watched(step, model).channels_last
    assert timed is not None
    assert timed.layers == 2
    assert timed.contiguous_seconds > 0
    assert 0 < timed.low_ratio < 100


@pytest.mark.parametrize(("inner", "gradients"), [(False, 1), (True, 2)])
def test_convolutions_are_timed_with_the_gradients_that_they_have(inner: bool, gradients: int) -> None:
    """The first layer of a model has none of its input."""
    timer, layer, x = ConvolutionTimer(), nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    timer.note(layer, (x.requires_grad_(inner),))
    with torch.no_grad():
        timer.note(layer, (torch.randn(64, 3, 16, 16),))  # of an evaluation
    wanted: set[tuple[int, int]] = set()
    grad = torch.autograd.grad

    def noted(out: Tensor, inputs: list[Tensor], *rest: Tensor) -> object:
        wanted.add((len(out), len(inputs)))
        return grad(out, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", noted)
        timer.timed("")
    assert wanted == {(2, gradients)}


def test_the_lines_whose_operators_meet_denormals() -> None:
    model, faded = net(), torch.full((64, 64), 1e-40)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (faded * 0.5).sum()  # here
        model(data()).square().mean().backward()
        optimizer.step()

    lines = watched(step, model).denormal_lines
    assert "# here" in lines[0][2]


def test_memory_formats_are_compared_with_one_thread_too() -> None:
    """And the script's number of threads is what it was."""
    torch.set_num_threads(2)
    try:
        timer = ConvolutionTimer()
        timer.note(nn.Conv2d(3, 8, 3), (torch.randn(2, 3, 16, 16),))
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            compared = layers_alone._compared
            patch.setattr(layers_alone, "BUDGET_SECONDS", 600.0)  # a busy machine needs more than it has in a run
            patch.setattr(
                layers_alone,
                "_compared",
                lambda *given: (seen.append(torch.get_num_threads()), compared(*given))[1],
            )
            assert timer.timed("") is not None
        assert seen == [2, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


class Recurrent(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, units, batch_first=True), nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, None])[0][:, -1])


@pytest.mark.parametrize(("dtype", "units"), [(torch.bfloat16, 1024), (torch.bfloat16, 20), (torch.float32, 1024)])
@pytest.mark.first_case
def test_lstm_layers_in_16_bits_are_tried(dtype: torch.dtype, units: int) -> None:
    """With 1,024 units oneDNN's gradients are wrong on a processor with AMX."""
    model = Recurrent(units)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    half = dtype == torch.bfloat16

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = (model(data()) - 1).float().square().mean()
        loss.backward()
        optimizer.step()

    found = watched(step, model)
    if not half:
        assert found.recurrent == ()
        return
    (seen,) = found.recurrent
    assert (seen.inputs, seen.units, seen.dtype) == (6, units, "bfloat16")
    assert seen.gradient_error == gradient_error(6, units, torch.bfloat16) > 0
    assert ("wrong-lstm-gradients" in names(found)) == (seen.gradient_error > MOST_ERROR)


def test_weights_in_bfloat16_count_as_well_and_evaluation_does_not() -> None:
    model = Recurrent(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int, dtype: torch.dtype = torch.float32) -> None:
        optimizer.zero_grad()
        (model(data().to(dtype)) - 1).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(data().to(dtype))

    assert watched(step, model).recurrent == ()
    model.bfloat16()
    (seen,) = watched(functools.partial(step, dtype=torch.bfloat16), model).recurrent
    assert (seen.units, seen.dtype) == (20, "bfloat16")


@pytest.mark.parametrize(("dtype", "fused"), [("bfloat16", True), ("bfloat16", None), ("float32", True)])
def test_a_fused_sgd_whose_kernel_does_not_store_updates(dtype: str, fused: bool | None) -> None:
    model = nn.Linear(8, 64).to(getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=fused)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8, dtype=model.weight.dtype)).float().square().mean().backward()
        optimizer.step()

    before = model.weight.detach().clone()
    found = watched(step, model)
    trains = float((model.weight != before).float().mean()) > 0.5
    assert trains or (fused and dtype == "bfloat16")
    assert found.untrained_dtypes == (() if trains else (dtype,))
    assert ("fused-sgd-in-16-bits" in names(found)) == (not trains)


def test_zeros_in_place_of_none() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(data()).square().mean().backward()
        optimizer.step()

    found = watched(step, model)
    assert found.zero_grad_fills
    assert found.accumulated_steps == 0
    assert found.zero_grad_line is not None
    assert "zero_grad(set_to_none=False)" in found.zero_grad_line[2]


def test_an_error_of_ours_ends_the_watching_and_not_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.script import update_watch

    def broken(root: Tensor, scaler: bool) -> tuple[bool, str]:
        raise ValueError("no such graph")

    monkeypatch.setattr(update_watch, "end_of_graph", broken)
    model = net()
    step = healthy(model, torch.optim.SGD(model.parameters(), 0.01))
    subject = Subject(training_only=True)
    subject.modules.add(model)
    watch = BehaviourWatch(str(HERE.parent))
    watch.start(subject)
    step(0)
    watch.step_ended()
    assert watch.done
    watch.stop()
    assert watch.result().notes == ("the watching ended early: ValueError: no such graph (broken)",)


def test_a_watch_that_never_started_has_a_result() -> None:
    watch = BehaviourWatch("/")
    watch.stop()
    assert watch.result().steps == 0


def test_predictions_and_targets_that_are_broadcast_against_each_other() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(32, 6), torch.randn(32)

    def step(targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = nn.MSELoss()(model(x), targets)  # the line that is named
        loss.backward()
        optimizer.step()

    (found,) = watched(lambda number: step(y), model).broadcast_losses
    assert (found.predictions, found.targets, found.calls) == ("[32, 1]", "[32]", STEPS)
    assert "the line that is named" in found.line[2]
    assert not watched(lambda number: step(y[:, None]), model).broadcast_losses
    assert not watched(lambda number: step(y[:1]), model).broadcast_losses  # one number for all


@pytest.mark.parametrize(
    ("shape", "options", "calls"),
    [
        ((32,), {}, STEPS),
        ((32,), {"reduction": "none"}, STEPS),
        ((1, 32), {"reduction": "none"}, 0),  # each pair is meant
        ((1, 32), {}, STEPS),
    ],
)
def test_losses_by_pair(shape: tuple[int, ...], options: dict[str, str], calls: int) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(32, 6), torch.randn(shape)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.functional.mse_loss(input=model(x), target=y, **options).mean().backward()  # type: ignore[arg-type]
            with torch.no_grad():
                nn.functional.mse_loss(model(x), y)
        optimizer.step()

    assert sum(one.calls for one in watched(step, model).broadcast_losses) == calls


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda p, y: (p - y).pow(2).mean(), ("[32, 1]", "[32]")),
        (lambda p, y: 0.5 * (y - torch.sigmoid(p)).abs().sum() / 32, ("[32, 1]", "[32]")),
        (lambda p, y: ((p - y) ** 2).mean().sqrt() + 0.1 * p.pow(2).mean(), ("[32, 1]", "[32]")),
        (lambda p, y: (p.squeeze(1) - y[:, None]).pow(2).mean(), ("[32]", "[32, 1]")),
        (lambda p, y: (p - y[:, None]).pow(2).mean(), None),
        (lambda p, y: (p[:, 0] - y).pow(2).mean(), None),
        (lambda p, y: (p - 0.5).pow(2).mean(), None),
        (lambda p, y: (p[:, 0][:, None] - y).abs().mean(), None),  # pairs are meant: of a dimension made for them,
        (lambda p, y: (p - p.T).abs().mean(), None),  # of predictions with each other,
        (lambda p, y: torch.exp(-((p - y) ** 2)).mean(), None),  # in a kernel,
        (lambda p, y: 2 * (p - y).abs().mean() - (p - p.T).abs().mean(), None),  # in a distance of distributions,
        (lambda p, y: ((p - y) ** 2 * (y[:, None] > y)).mean(), None),  # and with a weight for each
    ],
)
def test_losses_by_hand_of_each_prediction_with_each_target(loss: Any, found: tuple[str, str] | None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(32, 6), torch.randn(32)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    seen = watched(step, model).broadcast_losses
    assert [(one.predictions, one.targets) for one in seen] == ([found] if found else [])


def test_a_loss_that_no_weight_leads_to() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int, *, moves: bool = False) -> None:
        optimizer.zero_grad()
        torch.tensor(model(data()).mean().item(), requires_grad=True).backward()
        optimizer.step()
        if moves:
            with torch.no_grad():  # as an optimizer without gradients does
                model.weight.add_(0.1)

    assert names(watched(step, model)) == ["loss-not-falling"]
    found = watched(lambda number: step(number, moves=True), model)
    assert found.weights_move
    assert names(found) == []


def test_gradients_of_vectors_are_measured_beside_those_of_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch.softmax(model(torch.randn(16, 6)), 1).mean().backward()  # over one column: always 1
        optimizer.step()

    (found,) = watched(step, model).gradients
    assert len(found.largest_vectors) == len(found.norms) > 8
    assert not any((*found.norms, *found.largest_vectors))


def test_what_another_thread_does_is_none_of_the_loop() -> None:
    """As an agent that acts, or a model that is evaluated, beside the training."""
    model, other = net(), net()
    inner = healthy(model, torch.optim.SGD(model.parameters(), 0.01))
    others = torch.optim.SGD(other.parameters(), 0.01)
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            go_on.wait(60)
            return x

    waiting = Waiting()

    def beside() -> None:
        torch.ones(4, dtype=torch.float64).to(torch.float32)
        other(data()).square().mean().backward()
        others.step()
        other.zero_grad()
        waiting(torch.ones(1))

    def step(number: int) -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        inside.wait(60)
        inner(number)
        go_on.set()
        thread.join()
        inside.clear()
        go_on.clear()

    found = watched(step, model)
    assert [(one.calls, one.training) for one in found.forwards] == [(STEPS, True)]
    assert [one.per_step for one in found.backwards] == [1.0]
    assert (found.calls, len(found.optimizer_lines)) == ((), 1)


def started_in_a_pass(function: Callable[[], object]) -> threading.Thread:
    """A thread that calls it as one of autograd's for a GPU calls hooks."""

    def hook(gradient: Tensor) -> None:
        function()

    root = torch.ones(1, requires_grad=True) * 2
    root.register_hook(hook)
    thread = threading.Thread(target=root.backward, args=[torch.ones(1)])
    thread.start()
    return thread


def test_a_pass_in_autograds_thread_is_the_loops_as_on_a_gpu() -> None:
    watch, noted = BehaviourWatch(str(HERE.parent)), list[bool]()
    for in_pass in (False, True):
        watch._forward.in_backward = in_pass
        started_in_a_pass(functools.partial(watch._guard, functools.partial(noted.append, in_pass))).join()
    beside = threading.Thread(target=watch._guard, args=[lambda: noted.append(False)])  # while the pass goes on
    beside.start()
    beside.join()
    assert noted == [True]


def test_what_another_thread_begins_in_a_pass_is_not_around_the_next_forward() -> None:
    model, other = net(), nn.Flatten()
    inside, go_on = threading.Event(), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def waits(*_: object) -> None:
        inside.set()
        go_on.wait(60)

    other.register_forward_hook(waits)

    def step(number: int) -> None:
        thread = threading.Thread(target=other, args=[torch.ones(2, 2)])

        def begins(gradient: Tensor) -> None:
            thread.start()
            inside.wait(60)

        loss = model(data()).square().mean()
        loss.register_hook(begins)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        go_on.set()
        thread.join()
        inside.clear()
        go_on.clear()

    assert sum(one.calls for one in watched(step, model).forwards) == 2 * STEPS


def test_threads_of_autograd_that_overlap_leave_no_mark() -> None:
    """As of several GPUs: lines of the script would no longer be sampled."""
    watch = BehaviourWatch(str(HERE.parent))
    watch._forward.in_backward = True

    def started() -> tuple[threading.Thread, threading.Event]:
        inside, ends = threading.Event(), threading.Event()

        def waits() -> None:
            inside.set()
            ends.wait(60)

        thread = started_in_a_pass(lambda: watch._guard(waits))
        inside.wait(60)
        return thread, ends

    for thread, ends in [started(), started()]:
        ends.set()
        thread.join()
    assert (watch._sampler.own, watch._calls.own) == (False, False)


def test_a_backward_pass_from_a_complex_number() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (weight * (1 + 1j)).sum().backward(torch.tensor(1 + 0j))
        optimizer.step()

    found = watched(step)
    assert (found.losses, found.backwards[0].calls) == ((), STEPS)
