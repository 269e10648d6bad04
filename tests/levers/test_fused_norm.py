"""Batch norms by Flatout's kernel: what is fused, what finds the activations as torch would have made them, the same
training, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flatout import Plan, TrainStep, supervised
from flatout.errors import MachineError, ScriptError
from flatout.kernels.native import native
from flatout.levers import fused_norm
from flatout.levers.fused_norm import FusedNorm
from flatout.levers.lazy_norm import LazyNorm
from flatout.levers.subject import Subject

pytestmark = pytest.mark.skipif(native("batch_norm").library is None, reason=native("batch_norm").reason)

Follow = Callable[[Tensor, Tensor], Tensor]
"""What a model does with normalised activations and another tensor like them."""


@pytest.fixture(autouse=True)
def small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm, "LEAST_ELEMENTS", 1)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each ReLU that was computed with its batch norm: was something added?"""
    from flatout.levers.lazy_norm import Source

    found: list[bool] = []
    computed = Source.computed

    def noted(self: Source, *, relu: bool) -> Tensor:
        if relu:
            found.append(self.addend is not None)
        return computed(self, relu=relu)

    monkeypatch.setattr(Source, "computed", noted)
    return found


class Norm(nn.Module):
    """A convolution, a batch norm and what follows it."""

    def __init__(self, follow: Follow, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, **options)
        if self.norm.affine:
            nn.init.normal_(self.norm.weight, 1.0, 0.3)
            nn.init.normal_(self.norm.bias, 0.0, 0.3)
        self.follow = follow

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.follow(self.norm(self.conv(x)), other)


def trained(model: nn.Module, on: bool, inputs: tuple[Tensor, ...], steps: int = 2) -> list[Tensor]:
    """The output, all gradients and all buffers after some calls."""
    subject = Subject()
    subject.modules.add(model)
    inputs = tuple(one.detach().clone().requires_grad_() for one in inputs)
    found: list[Tensor] = []
    with FusedNorm().apply(subject, "fused") if on else torch.enable_grad():
        for _ in range(steps):
            out = subject.call(model, lambda: model(*inputs))
            assert type(out) is Tensor
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
            (out * weights).sum().backward()
            found.append(out.detach().clone())
    gradients = [one.grad for one in (*model.parameters(), *inputs) if one.grad is not None]
    return [*found, *gradients, *(one.clone() for one in model.buffers())]


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 3, 6, 5), torch.randn(4, 8, 6, 5)


def check_same(make: Callable[[], nn.Module], inputs: tuple[Tensor, ...] | None = None) -> None:
    inputs = images() if inputs is None else inputs
    for one, other in zip(trained(make(), True, inputs), trained(make(), False, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def in_place(y: Tensor, other: Tensor) -> Tensor:
    y += other
    return functional.relu(y, inplace=True)


def result_ignored(y: Tensor, other: Tensor) -> Tensor:
    torch.relu_(y)
    return y * 2


FUSED: dict[str, tuple[Follow, bool]] = {
    "relu": (lambda y, other: torch.relu(y), False),
    "functional.relu": (lambda y, other: functional.relu(y), False),
    "functional.relu in place": (lambda y, other: functional.relu(y, inplace=True), False),
    "nn.ReLU": (lambda y, other: nn.ReLU()(y), False),
    "nn.ReLU in place": (lambda y, other: nn.ReLU(inplace=True)(y), False),
    "a method": (lambda y, other: y.relu(), False),
    "a method in place": (lambda y, other: y.relu_(), False),
    "in place, result ignored": (result_ignored, False),
    "added": (lambda y, other: torch.relu(y + other), True),
    "added on the left": (lambda y, other: torch.relu(other + y), True),
    "added by a function": (lambda y, other: functional.relu(torch.add(other, y)), True),
    "added in place": (in_place, True),
    "added by a method": (lambda y, other: y.add_(other).relu_(), True),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name: str, fused: list[bool]) -> None:
    follow, added = FUSED[name]
    check_same(lambda: Norm(follow))
    assert fused == [added] * 2


class Doubled(torch.autograd.Function):
    """Code below Python, as far as __torch_function__ can see."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def below_after_relu(y: Tensor, other: Tensor) -> Tensor:
    functional.relu(y, inplace=True)
    return doubled(y)


def below_after_addition(y: Tensor, other: Tensor) -> Tensor:
    y += other
    return doubled(y)


def below_after_scaling(y: Tensor, other: Tensor) -> Tensor:
    y.mul_(other)
    return doubled(y) + y


doubled: Callable[[Tensor], Tensor] = Doubled.apply

OTHERS: dict[str, Follow] = {
    "nothing": lambda y, other: y,
    "another operation": lambda y, other: functional.silu(y) * other,
    "a scaled addition": lambda y, other: torch.relu(torch.add(y, other, alpha=2)),
    "an addition into another tensor": lambda y, other: added_into(y, other),
    "an argument by name": lambda y, other: torch.relu(input=torch.add(input=y, other=other)) + torch.neg(input=y),
    "a change by name": lambda y, other: torch.neg_(input=y) + y,
    "a number added": lambda y, other: torch.relu(y + 1),
    "a broadcast addition": lambda y, other: torch.relu(y + other[:1]),
    "a wider addend": lambda y, other: torch.relu(y + other.double()).float(),
    "used before and after": lambda y, other: torch.sigmoid(y) + torch.relu(y) + y,
    "two additions": lambda y, other: torch.relu(y + other + other.flip(0)),
    "in place": lambda y, other: y.mul_(2).relu_() + y,
    "a view": lambda y, other: torch.relu(y.flatten(1))[:, :9],
    "joined": lambda y, other: torch.cat([y, torch.relu(y)], 1),
    "an item set": lambda y, other: item_set(y),
    "below Python": lambda y, other: doubled(y) + y,
    "below Python, after ReLU in place": below_after_relu,
    "below Python, after an addition": below_after_addition,
    "below Python, after another change": below_after_scaling,
    "below Python, of a sum": lambda y, other: doubled(y + other) + torch.relu(y),
    "detached": lambda y, other: y.detach() * other + y.data + torch.relu(y),
    "without gradients": lambda y, other: without_gradients(y) + torch.relu(y + other),
    "another batch norm": lambda y, other: torch.relu(functional.batch_norm(y, None, None, training=True)),
    "two of them": lambda y, other: torch.relu(y + functional.batch_norm(other, None, None, training=True)),
    "checkpointed": lambda y, other: recomputed(y),
    "checkpointed, and used besides": lambda y, other: torch.sigmoid(y) * recomputed(y),
    "read in inference mode": lambda y, other: read_in_inference_mode(y),
    "ReLU in place without gradients": lambda y, other: relu_without_gradients(y),
    "added without gradients": lambda y, other: torch.relu(added_without_gradients(y, other)) * y,
    "added in place without gradients": lambda y, other: torch.relu(added_without_gradients(y, other, inplace=True)),
    "in another layout": lambda y, other: torch.relu(y + channels_last(other)).view(-1) * 2,
    "an inference tensor added": lambda y, other: torch.relu(y + made_in_inference_mode(other)),
    "a hook after a sum": lambda y, other: hooked_after_sum(y, other),
    "a hook of its node": lambda y, other: hooked_by_node(y),
    "below Python, after ReLU6 in place": lambda y, other: doubled(functional.relu6(y, inplace=True)) + doubled(y),
    "below Python, after an item was set": lambda y, other: item_set(y) + doubled(y),
    "changed past autograd": lambda y, other: changed_past_autograd(y),
    "a view changed": lambda y, other: view_changed(y),
}


def channels_last(other: Tensor) -> Tensor:
    return other.contiguous(memory_format=torch.channels_last)


def read_in_inference_mode(y: Tensor) -> Tensor:
    with torch.inference_mode():
        assert y.abs().max() > 0
    return torch.relu(y)


def made_in_inference_mode(other: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.ones_like(other)


def relu_without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        torch.relu_(y)
    return y * 2


def added_without_gradients(y: Tensor, other: Tensor, inplace: bool = False) -> Tensor:
    with torch.no_grad():
        return y.add_(other) if inplace else y + other


def hooked_after_sum(y: Tensor, other: Tensor) -> Tensor:
    z = y + other
    y.register_hook(lambda gradient: gradient * 2)
    return torch.relu(z)


def hooked_by_node(y: Tensor) -> Tensor:
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return torch.relu(y)


def changed_past_autograd(y: Tensor) -> Tensor:
    y.data.mul_(2)
    return torch.relu(y)


def view_changed(y: Tensor) -> Tensor:
    first = y[:, :3]
    first.mul_(3)
    return torch.relu(y)


def added_into(y: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = torch.add(y, other, out=torch.empty_like(other))
    return out + torch.relu(y)


def item_set(y: Tensor) -> Tensor:
    y[0, 0] = 0
    return torch.relu(y)


def without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.relu(y) * 2


def recomputed(y: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda one: torch.relu(one) * 3, y, use_reentrant=False)
    return out


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_use_finds_what_torch_would_have_made(name: str) -> None:
    check_same(lambda: Norm(OTHERS[name]))


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.5, "eps": 0.1}],
    ids=str,
)
def test_settings_of_the_layer(options: dict[str, Any]) -> None:
    check_same(lambda: Norm(in_place, **options))


class Block(nn.Module):
    """As in a ResNet whose shortcut has a batch norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm1(self.conv(x))
        out += self.norm2(x)
        return self.relu(out)  # type: ignore[no-any-return]


def test_a_shortcut_with_a_batch_norm(fused: list[bool]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block())

    check_same(make, images()[1:])
    assert fused == [True] * 4


def test_vectors_and_volumes(fused: list[bool]) -> None:
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
    deep = nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ReLU())
    check_same(lambda: copy.deepcopy(flat), (torch.randn(32, 5),))
    check_same(lambda: copy.deepcopy(deep), (torch.randn(2, 2, 5, 6, 7),))
    assert len(fused) == 4


def test_channels_last(fused: list[bool]) -> None:
    x, other = (one.contiguous(memory_format=torch.channels_last) for one in images())
    check_same(lambda: Norm(in_place).to(memory_format=torch.channels_last), (x, other))
    assert len(fused) == 2


def test_under_autocast() -> None:
    """With the addition rounded once instead of twice, which now and then changes what ReLU lets pass."""
    x, other = images()

    def make() -> nn.Module:
        model = Norm(lambda y, _: torch.relu(y + other.bfloat16()).float())
        forward = model.forward

        def cast(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(*inputs)

        model.forward = cast  # type: ignore[method-assign]
        return model

    found, wanted = trained(make(), True, (x, other)), trained(make(), False, (x, other))
    for one, right in zip(found, wanted, strict=True):
        assert (one - right).double().norm() <= 0.25 * right.double().norm()


def test_hooks_see_activations_and_gradients() -> None:
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    for on in (True, False):
        model = Norm(lambda y, other: torch.relu(y))

        def hook(module: object, inputs: object, out: Tensor, on: bool = on) -> None:
            seen[on].append(out.detach().clone())
            out.register_hook(lambda gradient: seen[on].append(gradient.clone()))

        model.norm.register_forward_hook(hook)
        trained(model, on, images(), steps=1)
    assert len(seen[True]) == 2
    for one, other in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_evaluation_and_calls_without_gradients_are_torchs() -> None:
    model, subject = Norm(lambda y, other: torch.relu(y)), Subject()
    subject.modules.add(model)
    x, other = images()
    wanted = copy.deepcopy(model)
    with FusedNorm().apply(subject, "fused"):
        with torch.no_grad():
            assert torch.equal(model(x, other), wanted(x, other))
        assert torch.equal(subject.call(model.eval(), lambda: model(x, other)), wanted.eval()(x, other))
    assert torch.equal(model.norm.running_var, wanted.norm.running_var)


def test_what_the_kernel_does_not_read_is_torchs(fused: list[bool]) -> None:
    check_same(lambda: Norm(in_place).double(), tuple(one.double() for one in images()))
    check_same(lambda: Norm(lambda y, other: torch.relu(y[:, :, ::2])))
    assert not fused


def test_torchs_errors() -> None:
    model, subject = nn.BatchNorm1d(4), Subject()
    subject.modules.add(model)
    with FusedNorm().apply(subject, "fused"):
        for wrong in (torch.randn(1, 4), torch.randn(8, 5)):
            with pytest.raises((ValueError, RuntimeError), match=r"Expected more than 1 value|running_mean should"):
                subject.call(model, lambda wrong=wrong: model(wrong.requires_grad_()))


class Conditional(nn.Module):
    """A batch norm whose scale and shift lie in other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shifts = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.linspace(-1, 1, 24).view(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = torch.zeros(8), torch.ones(8)
        y = functional.batch_norm(x, mean, variance, self.scale.expand(8), self.shifts[:, 1], training=True)
        return torch.relu(y)


class Frozen(nn.Module):
    """One whose parameters are frozen while its result is used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        self.norm.requires_grad_(False)
        y = torch.relu(y)
        self.norm.requires_grad_(True)
        return y


class Evaluated(nn.Module):
    """One that is called in evaluation and in training before one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        evaluated: Tensor = self.norm.eval()(x)
        return torch.relu(self.norm.train()(x)) + evaluated


class Transposed(nn.Module):
    """One of sequences whose channels come last, and whose result is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x.flatten(2).transpose(1, 2)[:, :5])).view(len(x), -1)


@pytest.mark.parametrize("kind", [Conditional, Frozen, Evaluated, Transposed])
def test_layers_that_are_called_otherwise(kind: type[nn.Module]) -> None:
    check_same(kind, images()[1:])


@pytest.mark.parametrize(
    "ask",
    [
        lambda y, out: y.register_hook(lambda gradient: gradient * 2),
        lambda y, out: y.retain_grad(),
        lambda y, out: torch.autograd.grad(out.sum(), [y]),
    ],
    ids=["register_hook", "retain_grad", "autograd.grad"],
)
def test_a_gradient_that_the_fused_operation_does_not_have_is_refused(ask: Callable[[Tensor, Tensor], object]) -> None:
    model, subject = Norm(lambda y, other: asked(y, torch.relu(y))), Subject()
    subject.modules.add(model)

    def asked(y: Tensor, out: Tensor) -> Tensor:
        ask(y, out)
        return out

    with FusedNorm().apply(subject, "fused"), pytest.raises(ScriptError, match="after its ReLU was computed"):
        subject.call(model, lambda: model(*images()))


def test_an_input_that_changes_meanwhile_is_refused() -> None:
    def follow(y: Tensor, other: Tensor) -> Tensor:
        shortcut = other * 1
        y = y + shortcut
        shortcut.zero_()
        return torch.relu(y)

    model, subject = Norm(follow), Subject()
    subject.modules.add(model)
    x, other = images()
    other.requires_grad_()
    with FusedNorm().apply(subject, "fused"), pytest.raises(ScriptError, match='normalization = "fused"'):
        subject.call(model, lambda: model(x, other))


def test_weights_may_change_before_the_activations_are_used() -> None:
    kept: list[Tensor] = []
    model, subject = Norm(lambda y, other: kept.append(y) or torch.relu(y)), Subject()  # type: ignore[func-returns-value]
    subject.modules.add(model)
    x, other = images()
    wanted = copy.deepcopy(model.norm)(model.conv(x)).detach()
    with FusedNorm().apply(subject, "fused"):
        subject.call(model, lambda: model(x, other))
    with torch.no_grad():
        model.norm.weight.zero_()
    assert isinstance(kept[0], LazyNorm)
    torch.testing.assert_close(kept[0].detach(), wanted, rtol=1e-4, atol=1e-5)


def test_transforms_of_functions_are_torchs() -> None:
    x, other = images()
    model, subject = Norm(lambda y, _: torch.relu(y), track_running_stats=False), Subject()
    subject.modules.add(model)

    def loss(x: Tensor) -> Tensor:
        out: Tensor = model(x, other).square().sum()
        return out

    with FusedNorm().apply(subject, "fused"):
        found = subject.call(model, lambda: torch.func.grad(loss)(x))
    torch.testing.assert_close(found, torch.func.grad(loss)(x))


def test_torchs_function_is_there_afterwards() -> None:
    before = functional.batch_norm
    with FusedNorm().apply(Subject(), "fused"):
        assert functional.batch_norm is not before
    assert functional.batch_norm is before


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.reentrant = nn.ModuleList([Block(), Block()]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_the_model_checkpoints(reentrant: bool) -> None:
    check_same(lambda: Checkpointed(reentrant), images()[1:])


@pytest.mark.parametrize("how", ["block", "selective"])
def test_blocks_that_the_plan_checkpoints(how: Any) -> None:
    def trained_by(plan: Plan) -> list[Tensor]:
        model = nn.Sequential(Checkpointed(None), nn.Flatten(), nn.Linear(240, 3))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(functional.cross_entropy), plan)
        for _ in range(3):
            step(((images()[1]), torch.tensor([0, 1, 2, 0])))
        assert step.rolled_back == []
        step.close()
        return [*model.parameters(), *model.buffers()]

    torch.manual_seed(0)
    found = trained_by(Plan(normalization="fused", activation_checkpointing=how))
    torch.manual_seed(0)
    for one, other in zip(found, trained_by(Plan()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm, "_obstacle", lambda: "the kernel is not available: no C++ compiler")
    with pytest.raises(MachineError, match="no C\\+\\+ compiler"), FusedNorm().apply(Subject(), "fused"):
        pass


def test_a_training_step_learns_the_same() -> None:
    def losses(plan: Plan) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = nn.Sequential(net, nn.Linear(8, 3))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(functional.cross_entropy), plan)
        batch = images()[1], torch.tensor([0, 1, 2, 0])
        found = [float(step(batch)) for _ in range(8)]
        assert step.rolled_back == []
        step.close()
        return found

    plain = losses(Plan())
    assert losses(Plan(normalization="fused")) == pytest.approx(plain, rel=1e-3)
    assert losses(Plan(normalization="fused", micro_batches=2)) == pytest.approx(
        losses(Plan(micro_batches=2)), rel=1e-3
    )
