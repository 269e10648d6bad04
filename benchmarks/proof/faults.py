"""What wrong levers do: to gradients, the optimizer and its state, the forward pass, data and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.proof.planted import Context, Step, after_step, before_step, on_modules, replaced

# gradients


def scaled(which: Callable[[list[Any]], Iterable[Any]], by: float) -> Context:
    def act(step: Step) -> None:
        for parameter in which(step.parameters):
            parameter.grad.mul_(by)

    return before_step(act)


def first(parameters: list[Any]) -> list[Any]:
    return parameters[:1]


def last(parameters: list[Any]) -> list[Any]:
    return parameters[-1:]


def largest(parameters: list[Any]) -> list[Any]:
    return [max(parameters, key=lambda p: p.numel())]


def biases(parameters: list[Any]) -> list[Any]:
    return [p for p in parameters if p.dim() == 1]


def every(parameters: list[Any]) -> list[Any]:
    return parameters


def when(condition: Callable[[int], bool], act: Callable[[Any], Any]) -> Context:
    """`act(parameter)` on every parameter, before the steps whose number meets the condition."""

    def at(step: Step) -> None:
        if condition(step.number):
            for parameter in step.parameters:
                act(parameter)

    return before_step(at)


def noise(parameter: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(parameter.numel())
    spread = parameter.grad.std(correction=0)
    parameter.grad.add_(torch.randn(parameter.shape, generator=generator) * spread)


def few_bits(parameter: Any) -> None:
    import torch

    mantissa, exponent = torch.frexp(parameter.grad)
    parameter.grad.copy_(torch.ldexp((mantissa * 2).trunc() / 2, exponent))


def underflow(parameter: Any) -> None:
    parameter.grad[parameter.grad.abs() < 6e-3] = 0


def stale() -> Context:
    held: dict[int, Any] = {}

    def act(step: Step) -> None:
        for parameter in step.parameters:
            mine = parameter.grad.clone()
            parameter.grad.copy_(held.get(id(parameter), mine))
            held[id(parameter)] = mine

    return before_step(act)


def uncleared() -> Context:
    held: dict[int, Any] = {}

    def act(step: Step) -> None:
        for parameter in step.parameters:
            mine = parameter.grad.clone()
            if id(parameter) in held:
                parameter.grad.add_(held[id(parameter)])
            held[id(parameter)] = mine

    return before_step(act)


def clipped(norm: float) -> Context:
    import torch

    return before_step(lambda step: torch.nn.utils.clip_grad_norm_(step.parameters, norm))


def poisoned(number: int) -> Context:
    def act(step: Step) -> None:
        if step.number == number:
            step.parameters[0].grad.reshape(-1)[0] = float("nan")

    return before_step(act)


def without(which: Callable[[list[Any]], Iterable[Any]]) -> Context:
    def act(step: Step) -> None:
        for parameter in list(which(step.parameters)):
            parameter.grad = None

    return before_step(act)


def as_they_arise(which: Callable[[list[Any]], Iterable[Any]], change: Callable[[Any], Any]) -> Context:
    """`change(parameter)` as soon as a backward pass has its gradient, whoever uses it."""

    def visit(model: Any) -> Callable[[], None]:
        import torch

        def hook(parameter: Any) -> None:
            with torch.no_grad():
                change(parameter)

        chosen = which([p for p in model.parameters() if p.requires_grad])
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in chosen]
        return lambda: [handle.remove() for handle in handles] and None

    return on_modules(visit)


def updates(change: Callable[[Any], Any]) -> Context:
    """`change(gradient)` in place of the gradient that a script adds to its weights by hand."""

    def make(original: Any) -> Any:
        def add_(tensor: Any, other: Any, *, alpha: Any = 1) -> Any:
            return original(tensor, change(other) if alpha < 0 else other, alpha=alpha)

        return add_

    return replaced("torch:Tensor", "add_", make)


# optimizer


def setting(name: str, change: Callable[[Any], Any]) -> Context:
    def act(step: Step) -> None:
        for group in step.optimizer.param_groups:
            if name in group:
                group.setdefault(f"original {name}", group[name])
                group[name] = change(group[f"original {name}"])

    return before_step(act)


def constant_rate() -> Context:
    rates: dict[int, float] = {}

    def act(step: Step) -> None:
        for group in step.optimizer.param_groups:
            group["lr"] = rates.setdefault(id(group), group["lr"])

    return before_step(act)


def rate(by: float) -> Context:
    """The rate is changed for the step and put back, so that schedules go on as they are."""

    def scale(step: Step, factor: float) -> None:
        for group in step.optimizer.param_groups:
            group["lr"] *= factor

    before, after = before_step(lambda step: scale(step, by)), after_step(lambda step: scale(step, 1 / by))
    return both(before, after)


def both(one: Context, other: Context) -> Context:
    import contextlib
    from collections.abc import Iterator

    @contextlib.contextmanager
    def context(subject: Any) -> Iterator[None]:
        with one(subject), other(subject):
            yield

    return context


def state(condition: Callable[[int], bool], change: Callable[[str, Any], Any]) -> Context:
    def act(step: Step) -> None:
        if condition(step.number):
            for entry in step.optimizer.state.values():
                for key, value in entry.items():
                    if hasattr(value, "copy_"):
                        change(key, value)

    return before_step(act)


def momentum_lost(key: str, value: Any) -> None:
    if key in ("exp_avg", "momentum_buffer", "square_avg"):
        value.zero_()


def second_moment_lost(key: str, value: Any) -> None:
    if key in ("exp_avg_sq", "square_avg"):
        value.mul_(0.5)


def young(key: str, value: Any) -> None:
    if key == "step":
        value.fill_(10_000.0)


def in_bf16(step: Step) -> None:
    """Weights kept in 16 bits: updates below their last place vanish."""
    for parameter in step.all_parameters:
        parameter.copy_(parameter.bfloat16())


def pulled(step: Step) -> None:
    for parameter in step.all_parameters:
        parameter.mul_(0.9995)


def undone(condition: Callable[[int], bool]) -> Context:
    held: dict[int, Any] = {}

    def before(step: Step) -> None:
        held.update({id(p): p.detach().clone() for p in step.all_parameters} if condition(step.number) else {})

    def after(step: Step) -> None:
        for parameter in step.all_parameters:
            if id(parameter) in held:
                parameter.copy_(held.pop(id(parameter)))

    return both(before_step(before), after_step(after))


def twice(number: int) -> Context:
    held: dict[int, Any] = {}

    def before(step: Step) -> None:
        if step.number == number:
            held.update({id(p): p.detach().clone() for p in step.all_parameters})

    def after(step: Step) -> None:
        for parameter in step.all_parameters:
            if id(parameter) in held:
                parameter.add_(parameter - held.pop(id(parameter)))

    return both(before_step(before), after_step(after))


# forward


def output(change: Callable[[Any], Any]) -> Context:
    def visit(model: Any) -> Callable[[], None]:
        return model.register_forward_hook(lambda module, args, out: change(out)).remove  # type: ignore[no-any-return]

    return on_modules(visit)


def inputs(change: Callable[[Any], Any]) -> Context:
    def visit(model: Any) -> Callable[[], None]:
        handle = model.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        return handle.remove  # type: ignore[no-any-return]

    return on_modules(visit)


def off(kind: str) -> Context:
    """Layers of this kind work as in evaluation."""

    def visit(model: Any) -> Callable[[], None]:
        chosen = [module for module in model.modules() if type(module).__name__.startswith(kind)]

        def evaluate(module: Any, args: Any) -> None:
            module.training = False

        handles = [module.register_forward_pre_hook(evaluate) for module in chosen]
        return lambda: [handle.remove() for handle in handles] and None

    return on_modules(visit)


def half_repeated(batch: Any) -> Any:
    half = len(batch) // 2
    return batch[:half].repeat(2, *[1] * (batch.dim() - 1))[: len(batch)] if half else batch


def rolled(batch: Any) -> Any:
    return batch.roll(1, 0)


def coarse(value: Any) -> Any:
    """Three bits, straight through."""
    import torch

    mantissa, exponent = torch.frexp(value.detach().float())
    return value + (torch.ldexp((mantissa * 8).round() / 8, exponent).to(value.dtype) - value).detach()


def previous() -> Callable[[Any], Any]:
    held: list[Any] = []

    def change(batch: Any) -> Any:
        held.append(batch)
        return held.pop(0) if len(held) > 1 and held[0].shape == batch.shape else batch

    return change


def remembered(batches: int) -> Callable[[Any], Any]:
    """After so many batches the first ones come again: samples kept from the first epoch."""
    held: list[Any] = []
    served = [0]

    def change(batch: Any) -> Any:
        if len(held) < batches:
            held.append(batch)
            return batch
        served[0] += 1
        kept = held[served[0] % batches]
        return kept if kept.shape == batch.shape else batch

    return change


# loss, data, random numbers


def loss_scaled(by: float) -> Context:
    return lambda subject: subject.around_backward(lambda tensors, run: run(_times(tensors, by)))


def _times(tensors: Any, by: float) -> Any:
    return tensors * by if hasattr(tensors, "backward") else tuple(tensor * by for tensor in tensors)


def drawing(when_: Callable[[int], bool], draw: Callable[[], Any]) -> Context:
    return before_step(lambda step: draw() if when_(step.number) else None)


def torch_number() -> Any:
    import torch

    return torch.rand(1)


def python_number() -> Any:
    import random

    return random.random()


def numpy_number() -> Any:
    import numpy

    return numpy.random.rand()


def batches(change: Callable[[Callable[[], Any], int, dict[str, Any]], Any]) -> Context:
    """`change(next, number, memory)` stands in for a loader's next batch."""
    memory: dict[str, Any] = {"number": 0}

    def make(original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            memory["number"] += 1
            return change(lambda: original(iterator), memory["number"], memory)

        return __next__

    return replaced("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", make)


def repeated_batch(get: Callable[[], Any], number: int, memory: dict[str, Any]) -> Any:
    batch = get()
    if number == 25:
        return memory["last"]
    memory["last"] = batch
    return batch


def dropped_batch(get: Callable[[], Any], number: int, memory: dict[str, Any]) -> Any:
    if number == 25:  # within the second epoch of every script
        get()
    return get()


def swapped_batches(get: Callable[[], Any], number: int, memory: dict[str, Any]) -> Any:
    if number % 7 == 3:
        memory["kept"] = get()
        return get()
    return memory.pop("kept") if "kept" in memory else get()


def wrong_labels(get: Callable[[], Any], number: int, memory: dict[str, Any]) -> Any:
    """One sample in eight gets its neighbour's label."""
    x, y = get()
    y = y.clone()
    y[::8] = y.roll(1)[::8]
    return x, y


def rough_data(get: Callable[[], Any], number: int, memory: dict[str, Any]) -> Any:
    x, y = get()
    return (x * 4).round() / 4, y


def always(number: int) -> bool:
    return True


def at(*numbers: int) -> Callable[[int], bool]:
    return lambda number: number in numbers


def after(number: int) -> Callable[[int], bool]:
    return lambda n: n > number
