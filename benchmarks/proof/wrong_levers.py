"""Levers that change what is learned, each in another way. None of them may be accepted at what it claims.

`FAULTS` holds (name, how, scripts on which it does something). Each claims 'reduced', the claim that is easiest to
pass; the proof tries 'within rounding' before that, so one run tells about both. `NOT_DETECTABLE` says beforehand
which of them are within what a claim allows, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.proof.planted import Context, Planted, Step, after_step, before_step, on_modules, replaced

ALL = (
    "mlp_epochs",
    "numpy_batches",
    "cnn_schedule",
    "lstm_text",
    "gpt_accumulated",
    "bf16_already",
    "short",
    "two_optimizers",
)
LOADERS = ("mlp_epochs", "cnn_schedule", "bf16_already", "two_optimizers")
DECAYED = ("numpy_batches", "gpt_accumulated", "cnn_schedule", "bf16_already", "short")
ADAPTIVE = ("mlp_epochs", "numpy_batches", "lstm_text", "gpt_accumulated", "two_optimizers")
DROPOUT = ("mlp_epochs", "gpt_accumulated", "two_optimizers")
MOMENTUM = ("cnn_schedule", "bf16_already", *ADAPTIVE)
BATCHED = tuple(script for script in ALL if script != "short")
"""The short script has the same batch in every step."""
PLAIN_STEP = ("cnn_schedule", "bf16_already")
"""Adam and RMSprop divide by the gradient's size: there a scaled gradient changes nothing."""


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


FAULTS: tuple[tuple[str, Callable[[], Context], tuple[str, ...]], ...] = (
    ("gradient of the first parameter zeroed", lambda: scaled(first, 0.0), ALL),
    ("gradient of the last parameter zeroed", lambda: scaled(last, 0.0), ALL),
    ("gradient of the largest parameter zeroed", lambda: scaled(largest, 0.0), ALL),
    ("gradients of biases zeroed", lambda: scaled(biases, 0.0), ALL),
    ("gradient of the first parameter inverted", lambda: scaled(first, -1.0), ALL),
    ("gradient of the last parameter inverted", lambda: scaled(last, -1.0), ALL),
    ("gradient of the first parameter halved", lambda: scaled(first, 0.5), PLAIN_STEP),
    ("gradient of the last parameter doubled", lambda: scaled(last, 2.0), PLAIN_STEP),
    ("gradients scaled by 0.8", lambda: scaled(every, 0.8), PLAIN_STEP),
    ("gradients scaled by 1.01", lambda: scaled(every, 1.01), PLAIN_STEP),
    ("gradients with noise of their own size", lambda: when(always, noise), ALL),
    ("gradients of one bit", lambda: when(always, few_bits), ALL),
    ("small gradients underflow", lambda: when(always, underflow), ALL),
    ("gradients lost from step 60 on", lambda: when(after(60), lambda p: p.grad.zero_()), ALL),
    ("gradients lost in every tenth step", lambda: when(lambda n: n % 10 == 0, lambda p: p.grad.zero_()), ALL),
    ("gradients lost in step 45", lambda: when(at(45), lambda p: p.grad.zero_()), ALL),
    ("gradients of the step before", stale, ALL),
    ("gradients not cleared", uncleared, ALL),
    ("gradients clipped to 0.02", lambda: clipped(0.02), ALL),
    ("signs instead of gradients", lambda: when(always, lambda p: p.grad.sign_()), ALL),
    ("NaN in one gradient at step 50", lambda: poisoned(50), ALL),
    ("first parameter skipped", lambda: without(first), ALL),
    ("last parameter skipped", lambda: without(last), ALL),
    ("biases skipped", lambda: without(biases), ALL),
    ("weight decay lost", lambda: setting("weight_decay", lambda v: 0.0), DECAYED),
    ("weight decay doubled", lambda: setting("weight_decay", lambda v: 2 * v), DECAYED),
    ("learning rate a tenth less", lambda: rate(0.9), ALL),
    ("learning rate doubled", lambda: rate(2.0), ALL),
    ("schedule ignored", constant_rate, ("cnn_schedule",)),
    ("momentum lost at step 47", lambda: state(at(47), momentum_lost), MOMENTUM),
    ("momentum lost in every step", lambda: state(always, momentum_lost), MOMENTUM),
    ("momentum lost every 20 steps", lambda: state(lambda n: n % 20 == 0, momentum_lost), MOMENTUM),
    ("second moments halved every 10 steps", lambda: state(lambda n: n % 10 == 0, second_moment_lost), ADAPTIVE),
    ("bias correction lost", lambda: state(at(2, 3, 4, 5, 6), young), ADAPTIVE),
    ("betas changed", lambda: setting("betas", lambda v: (0.5, 0.9)), ADAPTIVE),
    ("epsilon of 1e-3", lambda: setting("eps", lambda v: 1e-3), (*ADAPTIVE, "short")),
    ("weights kept in bf16", lambda: after_step(in_bf16), ALL),
    ("weights pulled to zero", lambda: after_step(pulled), ALL),
    ("one update undone", lambda: undone(at(52)), ALL),
    ("every third update undone", lambda: undone(lambda n: n % 3 == 0), ALL),
    ("one update done twice", lambda: twice(44), ALL),
    ("outputs 1 % larger", lambda: output(lambda out: out * 1.01), ALL),
    ("outputs 30 % larger", lambda: output(lambda out: out * 1.3), ALL),
    ("outputs shifted", lambda: output(lambda out: out + 0.05), ("numpy_batches", "short")),
    ("outputs of three bits", lambda: output(coarse), ALL),
    ("inputs of three bits", lambda: inputs(coarse), ("mlp_epochs", "numpy_batches", "cnn_schedule", "bf16_already")),
    ("half of the batch twice", lambda: inputs(half_repeated), ALL),
    ("inputs and targets out of step", lambda: inputs(rolled), ALL),
    ("inputs of the step before", lambda: inputs(previous()), BATCHED),
    ("samples of the first 20 batches for ever", lambda: inputs(remembered(20)), BATCHED),
    ("dropout off", lambda: off("Dropout"), DROPOUT),
    ("batch norm as in evaluation", lambda: off("BatchNorm"), ("cnn_schedule",)),
    ("loss halved", lambda: loss_scaled(0.5), ALL),
    ("loss times a thousand", lambda: loss_scaled(1000.0), ALL),
    ("loss inverted", lambda: loss_scaled(-1.0), ALL),
    ("a torch random number drawn in each step", lambda: drawing(always, torch_number), ALL),
    ("a torch random number drawn in step 40", lambda: drawing(at(40), torch_number), ALL),
    ("a Python random number drawn in step 40", lambda: drawing(at(40), python_number), ALL),
    ("a numpy random number drawn in each step", lambda: drawing(always, numpy_number), ALL),
    ("one batch repeated", lambda: batches(repeated_batch), LOADERS),
    ("one batch dropped", lambda: batches(dropped_batch), LOADERS),
    ("two batches in seven swapped", lambda: batches(swapped_batches), LOADERS),
    ("one label in eight wrong", lambda: batches(wrong_labels), LOADERS),
    ("data rounded to quarters", lambda: batches(rough_data), LOADERS),
)

NOT_DETECTABLE: dict[tuple[str, str], str] = {
    ("gradients scaled by 1.01", "reduced"): "a bias of 1 % is within what 16-bit products may do",
    ("outputs 1 % larger", "reduced"): "a bias of 1 % is within what 16-bit products may do",
}
"""(fault, claim) -> why it may pass."""

LEVERS = tuple(Planted(name, "reduced", make()) for name, make, _ in FAULTS)
