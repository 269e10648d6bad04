"""How claims about training are measured: plain torch with and without what the guide advises, in turns in one process.

Each function takes the setup and the seconds for each of its cases, and returns the cases. Nothing of Flatout's own
speed-ups takes part: it is the advice that is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from flatout.bench.claim import Case
from flatout.bench.claim_steps import (
    MODELS,
    RESNET_50,
    Step,
    amp_dtype,
    amp_name,
    compared,
    exactly,
    models_of,
    once_seconds,
    peak_bytes,
    training_step,
    wait_of,
)
from flatout.bench.results import Speedup
from flatout.bench.training import Batch, Training, loss_of
from flatout.bench.workload import Setup, Untyped
from flatout.models import MLP, MLPConfig
from flatout.statistics import median
from flatout.timing import measure

# precision


def amp_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    return [
        Case(
            condition=f"{name} training, {amp_name(setup)}",
            measured=compared(training_step(training, setup), training_step(training, setup, amp=True), setup, seconds),
        )
        for name, training in models_of(setup).items()
    ]


def amp_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    """Without weights and the optimizer's state, which stay in fp32."""
    return [
        Case(
            condition=f"{name}, a step's own memory, {amp_name(setup)}",
            measured=_less_memory(training_step(training, setup), training_step(training, setup, amp=True), setup),
            note="beside weights and optimizer, which stay in fp32",
        )
        for name, training in models_of(setup).items()
    ]


def _less_memory(before: Step, after: Step, setup: Setup) -> Speedup:
    """How many times as little `after` takes."""
    return exactly(peak_bytes(before, setup) / peak_bytes(after, setup))


def amp_accuracy(setup: Setup, seconds: float) -> Sequence[Case]:
    """An MLP that learns a random function with ten classes: the share of the fp32 accuracy that AMP reaches."""
    steps = 100 if setup.quick else 400
    reached = {amp: median([_accuracy(setup, steps, seed, amp=amp) for seed in range(3)]) for amp in (False, True)}
    return [
        Case(
            condition=f"MLP after {steps} steps, three seeds, {amp_name(setup)}",
            measured=exactly(reached[True] / reached[False]),
            note=f"{reached[False]:.1%} right in fp32, {reached[True]:.1%} with AMP",
        )
    ]


def _accuracy(setup: Setup, steps: int, seed: int, *, amp: bool) -> float:
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(setup.device)
    model = MLP(MLPConfig(inputs=64, hidden=(256, 256))).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    dtype = amp_dtype(setup)
    scaler = torch.amp.GradScaler(setup.device, enabled=amp and dtype == torch.float16)
    generator = torch.Generator(setup.device).manual_seed(seed)

    def draw(count: int) -> Batch:
        inputs = torch.randn(count, 64, generator=generator, device=setup.device)
        with torch.no_grad():
            return inputs, teacher(inputs).argmax(1)

    for _ in range(steps):
        inputs, targets = draw(256)
        optimizer.zero_grad()
        with torch.autocast(setup.device, dtype, enabled=amp):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    inputs, targets = draw(4096)
    with torch.no_grad(), torch.autocast(setup.device, dtype, enabled=amp):
        return float((model(inputs).argmax(1) == targets).double().mean())


def tf32(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for size in (1024, 4096, 8192):
        a, b = (torch.randn(size, size, device="cuda") for _ in "ab")

        def product(precision: str, a: Tensor = a, b: Tensor = b) -> Step:
            def run() -> None:
                torch.backends.cuda.matmul.fp32_precision = precision
                a @ b

            return run

        measured = compared(product("ieee"), product("tf32"), setup, seconds)
        cases.append(Case(condition=f"products of {size} x {size}", measured=measured))
    return cases


# compilation


def compile_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    found = []
    for name, training in models_of(setup).items():
        compiled = training_step(training, setup, compiled="default")
        first_seconds = once_seconds(compiled, setup)
        speedup = compared(training_step(training, setup), compiled, setup, seconds)
        found.append(
            Case(
                condition=f"{name} training, fp32",
                measured=speedup,
                note=f"the first step took {first_seconds:.0f} s, with what was compiled before in a cache",
            )
        )
    return found


def first_call(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as long the first call of a compiled model takes as later ones."""
    training = MODELS["MLP 784-1024-1024-10"]
    model, (inputs, _) = training.start(setup)
    compiled = torch.compile(model)
    torch.compiler.reset()  # other claims may have compiled it already
    with torch.no_grad():
        first = once_seconds(lambda: compiled(inputs), setup)
        later = measure(lambda: compiled(inputs), synchronize=wait_of(setup), max_seconds=seconds).median_seconds
    note = f"{first:.1f} s, then {later * 1e6:.0f} µs; a cache on disk shortens it"
    return [Case(condition="MLP inference", measured=exactly(first / later), note=note)]


def reduce_overhead(setup: Setup, seconds: float) -> Sequence[Case]:
    return [
        Case(
            condition=f"{name} training",
            measured=compared(
                training_step(training, setup, compiled="default"),
                training_step(training, setup, compiled="reduce-overhead"),
                setup,
                seconds,
            ),
        )
        for name, training in models_of(setup).items()
    ]


# layouts, gradients, memory


def channels_last(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for name in ("ConvNet on 32 x 32", RESNET_50):
        training = MODELS[name]
        for amp in (False, True):
            before = training_step(training, setup, amp=amp)
            after = training_step(training, setup, amp=amp, channels_last=True)
            dtype = amp_name(setup) if amp else "fp32"
            cases.append(Case(condition=f"{name} training, {dtype}", measured=compared(before, after, setup, seconds)))
    return cases


def set_to_none(setup: Setup, seconds: float) -> Sequence[Case]:
    """Whole steps: what the option does to `zero_grad` alone is not what a user waits for."""
    return [
        Case(
            condition=f"{name}, a whole training step",
            measured=compared(
                training_step(training, setup, set_to_none=False), training_step(training, setup), setup, seconds
            ),
        )
        for name, training in models_of(setup).items()
    ]


class _Deep(nn.Module):
    """Blocks whose activations are most of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(24)))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


_DEEP = Training(model=_Deep, batch=lambda setup: (torch.randn(2048, 256), torch.randint(0, 10, (2048,))))


def _checkpointed(model: Untyped) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        out: Tensor = model.head(checkpoint_sequential(model.blocks, 6, x.requires_grad_(), use_reentrant=False))
        return out

    return call


def checkpointing_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    plain, less = training_step(_DEEP, setup), training_step(_DEEP, setup, model_of=_checkpointed)
    return [Case(condition="24 linear layers in 6 segments", measured=_less_memory(plain, less, setup))]


def checkpointing_time(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as long a step takes."""
    plain, less = training_step(_DEEP, setup), training_step(_DEEP, setup, model_of=_checkpointed)
    return [Case(condition="24 linear layers in 6 segments", measured=compared(less, plain, setup, seconds))]


def accumulation_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    """One batch, against the same in four parts whose gradients are added."""
    model, (inputs, targets) = _DEEP.start(setup)

    def step(parts: int) -> Step:
        def run() -> None:
            model.zero_grad()
            for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (loss_of(model, (part, wanted)) / parts).backward()

        return run

    measured = _less_memory(step(1), step(4), setup)
    return [Case(condition="24 linear layers, batch 2,048 as 4 x 512", measured=measured)]


def without_gradients(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for name in ("MLP 784-1024-1024-10", "GPT of 4 layers, width 128", "ResNet-50"):
        model, (inputs, _) = MODELS[name].start(setup)
        model.eval()
        before, after = _forward(model, inputs, contextlib.nullcontext), _forward(model, inputs, torch.inference_mode)
        measured = _less_memory(before, after, setup)
        cases.append(Case(condition=f"{name}, memory of a forward pass", measured=measured))
    return cases


def _forward(model: nn.Module, inputs: Tensor, mode: Callable[[], contextlib.AbstractContextManager[object]]) -> Step:
    kept: list[Tensor] = []

    def run() -> None:
        kept.clear()
        with mode():
            kept.append(model(inputs))

    return run
