"""Gradients that are freed where a script asks for zeros: each loop gives the same with the lever and without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.levers.gradients_to_none import GradientsToNone
from flatout.script.watch import Watch

LEVER = GradientsToNone()
Loop = Callable[[list[Tensor]], None]


class Net(nn.Module):
    """Two layers, of which the second is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, second: bool = True) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden) if second else hidden


def made(kind: Any = torch.optim.SGD, **settings: Any) -> tuple[Net, Any]:
    net = Net()
    return net, kind(net.parameters(), **(settings or {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}))


def loss(net: Net, step: int, *, second: bool = True) -> Tensor:
    return net(torch.randn(6, 5, generator=torch.Generator().manual_seed(step)), second=second).square().mean()


def slot(parameter: Tensor) -> Tensor | None:
    """What torch holds as its gradient, past everybody."""
    found: Tensor | None = torch.Tensor.grad.__get__(parameter)  # type: ignore[attr-defined]
    return found


def state_of(net: Net, optimizer: Any) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [one.detach().clone() for one in (*net.parameters(), *states)]


def usual(kept: list[Tensor], kind: Any = torch.optim.SGD, **settings: Any) -> None:
    net, optimizer = made(kind, **settings)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss(net, step).backward()
        optimizer.step()
    kept += state_of(net, optimizer)


def adam(kept: list[Tensor]) -> None:
    usual(kept, torch.optim.AdamW, lr=1e-2)


def of_the_module(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(4):
        loss(net, step).backward()
        optimizer.step()
        net.zero_grad(set_to_none=False)
    kept += state_of(net, optimizer)


def layers_without_gradient(kept: list[Tensor]) -> None:
    """Momentum and decay move what got a gradient of zeros; what has none stays where it is."""
    net, optimizer = made()
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        loss(net, step, second=step % 3 == 1).backward()
        optimizer.step()
        kept += state_of(net, optimizer)


def steps_without_backward(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        if step % 2 == 0:
            loss(net, step).backward()
        optimizer.step()
        kept += state_of(net, optimizer)


def accumulation(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(9):
        loss(net, step, second=step % 2 == 0).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    kept += state_of(net, optimizer)


def reads_between(kept: list[Tensor]) -> None:
    """Clips and logs before and after the backward pass, with and without None in mind."""
    net, optimizer = made()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        if step:
            kept += [one.grad.norm() for one in net.parameters() if one.grad is not None]
            kept.append(torch.tensor(sum(hasattr(one, "grad") and one.grad is not None for one in net.parameters())))
        loss(net, step, second=step == 1).backward()
        kept.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        kept.append(torch.tensor(sum(one.grad is not None for one in net.parameters())))
        optimizer.step()
    kept += state_of(net, optimizer)


def changes_of_zeros(kept: list[Tensor]) -> None:
    """Decay put into the gradient before the backward pass adds to it."""
    net, optimizer = made()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for one in net.parameters() if step else ():
            assert one.grad is not None
            one.grad.data.add_(one.data, alpha=0.1)
        loss(net, step).backward()
        optimizer.step()
    kept += state_of(net, optimizer)


def set_by_hand(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        for number, one in enumerate(net.parameters()):
            if (step + number) % 4 == 0:
                one.grad = torch.ones_like(one)
            elif (step + number) % 4 == 1:
                one.grad = None
            elif (step + number) % 4 == 2:
                del one.grad
        if step % 2:
            loss(net, step, second=False).backward()
        kept.append(torch.tensor([one.grad is not None for one in net.parameters()]))
        optimizer.step()
    kept += state_of(net, optimizer)


def held(kept: list[Tensor], hold: Callable[[Tensor], Any]) -> None:
    """The gradients of the second step are held in some form, and looked at ever after."""
    net, optimizer = made()
    views: list[Any] = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        kept += [_values(one) for one in views]
        loss(net, step).backward()
        kept += [_values(one) for one in views]
        if step == 1:
            views = [hold(one.grad) for one in net.parameters() if one.grad is not None]
        optimizer.step()
    kept += state_of(net, optimizer)


def _values(held: Any) -> Tensor:
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor([]).set_(held).clone()  # type: ignore[call-overload,no-any-return]
    return torch.as_tensor(held).clone()


def flattened(kept: list[Tensor]) -> None:
    """All gradients lie in one tensor, which is what the script clips."""
    net, optimizer = made()
    flat, start = torch.zeros(sum(one.numel() for one in net.parameters())), 0
    for one in net.parameters():
        one.grad, start = flat[start : start + one.numel()].view_as(one), start + one.numel()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss(net, step).backward()
        flat.mul_(0.5)
        kept.append(flat.clone())
        optimizer.step()
    kept += state_of(net, optimizer)


def shared_with_another_model(kept: list[Tensor]) -> None:
    """As asynchronous workers do: the other model's weights have the very same gradients."""
    net, optimizer = made()
    other = Net()
    stepping = torch.optim.SGD(other.parameters(), 0.1)
    loss(net, 0).backward()
    for own, others in zip(net.parameters(), other.parameters(), strict=True):
        others.grad = own.grad
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss(net, step).backward()
        stepping.step()
        kept += state_of(other, stepping)


def hooks_that_read(kept: list[Tensor]) -> None:
    net, optimizer = made()

    def read(gradient: Tensor) -> None:
        if net.first.weight.grad is not None:
            kept.append(net.first.weight.grad.clone())

    net.first.weight.register_hook(read)
    net.second.weight.register_hook(read)
    net.second.weight.register_post_accumulate_grad_hook(lambda one: kept.append(one.grad.clone()))  # type: ignore[union-attr]
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss(net, step).backward()
        loss(net, step + 9).backward()
        optimizer.step()


class SameMemory(torch.autograd.Function):
    """Gives its gradient in the same memory each time, as a graph that was captured does."""

    memory = torch.zeros(4)

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        SameMemory.memory.copy_(gradient * x)
        return SameMemory.memory.detach(), None


def gradients_in_memory_of_somebody(kept: list[Tensor]) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.grad = torch.zeros(4)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        for number in range(1, 3):
            SameMemory.apply(weight, torch.arange(4.0) * number + step).sum().backward()  # type: ignore[no-untyped-call]
        kept.append(weight.grad.clone())
        optimizer.step()
    kept.append(weight.detach())


def sparse_after_dense(kept: list[Tensor]) -> None:
    table = nn.Embedding(6, 3, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        out = table(torch.tensor([step, 1])).sum()
        (out if step % 2 else out + table.weight.square().sum()).backward()
        assert table.weight.grad is not None
        kept.append(table.weight.grad.to_dense().clone())
        kept.append(torch.tensor(table.weight.grad.is_sparse))


def read_in_inference_mode(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        with torch.inference_mode():
            kept += [one.grad.clone() for one in net.parameters() if one.grad is not None]
        loss(net, step).backward()
        optimizer.step()
    kept += state_of(net, optimizer)


def frozen_on_the_way(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        net.second.requires_grad_(step < 2)
        loss(net, step).backward()
        optimizer.step()
    kept += state_of(net, optimizer)


def another_format_on_the_way(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        if step == 2:
            net.double()
        x = torch.ones(2, 5, dtype=net.first.weight.dtype)
        net(x, second=step < 2).square().mean().backward()
        kept += [one.grad.clone() for one in net.parameters() if one.grad is not None]
    kept += [one.detach() for one in net.parameters()]


def closures(kept: list[Tensor]) -> None:
    net, optimizer = made(torch.optim.LBFGS, lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        found = loss(net, 1)
        found.backward()
        return found

    for _ in range(3):
        kept.append(torch.as_tensor(optimizer.step(closure)).detach())
    kept += [one.detach() for one in net.parameters()]


def two_models_in_turns(kept: list[Tensor]) -> None:
    (first, steps_first), (second, steps_second) = made(), made(torch.optim.Adam, lr=0.1)
    for step in range(4):
        steps_first.zero_grad(set_to_none=False)
        steps_second.zero_grad(set_to_none=False)
        loss(first, step).backward()
        steps_first.step()
        if step % 2:
            (loss(first, step) + loss(second, step)).backward()
        steps_second.step()
    kept += [*state_of(first, steps_first), *state_of(second, steps_second)]


def freed_by_the_script_too(kept: list[Tensor]) -> None:
    net, optimizer = made()
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        if step % 3 == 1:
            optimizer.zero_grad(set_to_none=True)
        net.zero_grad(False)
        loss(net, step, second=step % 2 == 0).backward()
        kept.append(torch.tensor([one.grad is not None for one in net.parameters()]))
        optimizer.step()
    kept += state_of(net, optimizer)


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        usual, adam, of_the_module, layers_without_gradient, steps_without_backward, accumulation, reads_between,
        changes_of_zeros, set_by_hand, flattened, shared_with_another_model, hooks_that_read,
        gradients_in_memory_of_somebody, sparse_after_dense, read_in_inference_mode, frozen_on_the_way,
        another_format_on_the_way, closures, two_models_in_turns, freed_by_the_script_too,
    )
}  # fmt: skip
HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda one: one,
    "a view": lambda one: one.view(-1),
    "detached": lambda one: one.detach(),
    "data": lambda one: one.data,
    "an array": lambda one: one.numpy(),
    "memory": lambda one: one.untyped_storage(),
}
LOOPS |= {f"held: {name}": lambda kept, hold=hold: held(kept, hold) for name, hold in HOLDS.items()}  # type: ignore[misc]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("watched", [True, False])
def test_every_loop_is_the_same_to_the_bit(name: str, watched: bool, watch: Watch) -> None:
    """watched: False where backward runs in a place or thread that the watch does not follow."""
    plain: list[Tensor] = []
    with_lever: list[Tensor] = []
    LOOPS[name](plain)
    if not watched:
        watch.disable()
    with LEVER.apply(watch.subject, "none"):
        LOOPS[name](with_lever)
    assert len(plain) == len(with_lever)
    assert plain
    for one, other in zip(plain, with_lever, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("whose", ["optimizer", "module"])
def test_gradients_are_freed_and_written_anew(whose: str, watch: Watch) -> None:
    net, optimizer = made()
    loss(net, 0).backward()
    with LEVER.apply(watch.subject, "none"):
        (optimizer if whose == "optimizer" else net).zero_grad(set_to_none=False)
        assert [slot(one) for one in net.parameters()] == [None] * 4
        assert net.first.bias.grad is not None
        assert not net.first.bias.grad.any()
        loss(net, 0, second=False).backward()
        assert slot(net.second.weight) is None  # until somebody asks
        assert slot(net.first.weight) is not None
        optimizer.step()
        assert slot(net.second.weight) is not None
        optimizer.zero_grad(set_to_none=False)
    assert not any(one.grad is None or one.grad.any() for one in net.parameters())
    assert watch.subject.incidents == []


def test_gradients_that_are_held_elsewhere_are_told(watch: Watch) -> None:
    with LEVER.apply(watch.subject, "none"):
        flattened([])
    assert watch.subject.incidents == [
        ("gradients set to None", "gradients are held elsewhere too, or are not plain tensors: they are set to zero")
    ]


def test_a_model_whose_gradients_were_freed_can_go(watch: Watch) -> None:
    net, optimizer = made()
    loss(net, 0).backward()
    with LEVER.apply(watch.subject, "none"):
        optimizer.zero_grad(set_to_none=False)
        gone = weakref.ref(net.first.weight)
        del net, optimizer
        gc.collect()
        assert gone() is None
        usual([])


def test_an_attribute_of_somebody_over_ours_stays(watch: Watch) -> None:
    with LEVER.apply(watch.subject, "none"):
        ours = vars(nn.Parameter)["grad"]
        theirs = property(ours.fget, ours.fset, ours.fdel)
        nn.Parameter.grad = theirs  # type: ignore[assignment,misc]
    assert vars(nn.Parameter)["grad"] is theirs
    usual([])
    del nn.Parameter.grad
