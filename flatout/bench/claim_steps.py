"""What the guides' claims are tried on: models, a training step by hand, its time and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from flatout.bench.results import Speedup
from flatout.bench.training import GPT, RESNET, SMALL, Batch, Training, loss_of
from flatout.bench.workload import Setup, Untyped
from flatout.memory.real_run import LimitedRun
from flatout.models import MLP, ConvNet, ConvNetConfig, MLPConfig
from flatout.statistics import compare_paired
from flatout.timing import interleave

Step = Callable[[], object]
MOST_ROUNDS = 40
UNLIMITED_BYTES = 1 << 62


def _large_images(setup: Setup) -> Batch:
    count, size = (2, 64) if setup.reduced else (64, 224) if setup.device == "cuda" else (8, 224)
    return torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,))


RESNET_50 = "ResNet-50"
MODELS = {
    "MLP 784-1024-1024-10": Training(
        model=lambda: MLP(MLPConfig(inputs=784, hidden=(1024, 1024))),
        batch=lambda setup: (torch.randn(128, 784), torch.randint(0, 10, (128,))),
    ),
    "ConvNet on 32 x 32": Training(
        model=lambda: ConvNet(ConvNetConfig(height=32, width=32)),
        batch=lambda setup: (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))),
        images=True,
    ),
    "GPT of 4 layers, width 128": SMALL,
    RESNET_50: Training(model=RESNET.model, batch=_large_images, images=True),
}


def models_of(setup: Setup) -> dict[str, Training]:
    """What training claims are tried on there: small models, and on a GPU some that fill it."""
    return {**MODELS, "GPT-2 124M": GPT} if setup.device == "cuda" else MODELS


def compared(before: Step, after: Step, setup: Setup, seconds: float) -> Speedup:
    """How many times as fast `after` is."""
    found = interleave(
        {"before": before, "after": after},
        rounds=MOST_ROUNDS,
        synchronize=wait_of(setup),
        max_seconds=seconds,
        warmup=2,
    )
    return Speedup.of(compare_paired(found["before"].samples_seconds, found["after"].samples_seconds))


def wait_of(setup: Setup) -> Step | None:
    """What waits until the device is done; None: calls return no earlier."""
    return torch.cuda.synchronize if setup.device == "cuda" else None


def once_seconds(step: Step, setup: Setup) -> float:
    """Of a single call, until the device is done."""
    began = time.perf_counter()
    step()
    if (wait := wait_of(setup)) is not None:
        wait()
    return time.perf_counter() - began


def exactly(ratio: float) -> Speedup:
    """A ratio that does not vary."""
    return Speedup(ratio=ratio, low=None, high=None, pairs=1)


def training_step(
    training: Training,
    setup: Setup,
    *,
    amp: bool = False,
    compiled: str | None = None,
    channels_last: bool = False,
    set_to_none: bool = True,
    model_of: Callable[[nn.Module], Callable[..., object]] | None = None,
) -> Step:
    """A step of AdamW. amp: as the guides write it, fp16 with a gradient scaler on a GPU; bf16 on a CPU."""
    model, batch = training.start(setup, channels_last=channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    called: Untyped = model if model_of is None else model_of(model)
    if compiled is not None:
        called = torch.compile(called, mode=compiled)
    dtype = amp_dtype(setup)
    scaler = torch.amp.GradScaler(setup.device, enabled=amp and dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(setup.device, dtype, enabled=amp):
            loss = loss_of(called, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def peak_bytes(step: Step, setup: Setup) -> int:
    """The most that tensors hold during a step, beyond what they hold before."""
    step()  # the optimizer's state is there from now on
    if setup.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with LimitedRun("cpu", UNLIMITED_BYTES) as run:
        step()
    return run.peak_bytes


def amp_dtype(setup: Setup) -> torch.dtype:
    """What mixed precision means there."""
    return torch.float16 if setup.device == "cuda" else torch.bfloat16


def amp_name(setup: Setup) -> str:
    return "fp16 with a scaler" if setup.device == "cuda" else "bf16"
