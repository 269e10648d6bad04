"""Ways to train one model with several ranks: by hand with torch's own DDP and FSDP2, by Accelerate, and by TrainStep.

Each returns a function that takes one step on this rank's share of a batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import flatout
from flatout.models import GPT2, GPT2Config

Step = Callable[[Tensor], object]


def model_of(width: int, layers: int) -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=512, max_tokens=128, width=width, heads=width // 32, layers=layers))


def loss_of(model: Callable[..., Any], batch: Tensor) -> Tensor:
    """`batch` [samples, tokens + 1]: each token from those before it."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def _loop(model: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp_by_hand(model: GPT2) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(wrapped, _optimizer(model))


def fsdp_by_hand(model: GPT2) -> Step:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _loop(model, _optimizer(model))


def accelerate(model: GPT2) -> Step:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    prepared, optimizer = accelerator.prepare(model, _optimizer(model))

    def step(batch: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(prepared, batch)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def _train_step(kind: Literal["ddp", "zero1", "fsdp"]) -> Callable[[GPT2], Step]:
    def make(model: GPT2) -> Step:
        return flatout.TrainStep(model, _optimizer(model), loss_of, flatout.Plan(parallel=kind))

    return make


CONTENDERS: dict[str, Callable[[GPT2], Step]] = {
    "DDP by hand": ddp_by_hand,
    "flatout ddp": _train_step("ddp"),
    "flatout zero1": _train_step("zero1"),
    "FSDP2 by hand": fsdp_by_hand,
    "flatout fsdp": _train_step("fsdp"),
} | ({"Accelerate (DDP)": accelerate} if importlib.util.find_spec("accelerate") is not None else {})
PAIRS = (
    ("flatout ddp", "DDP by hand"),
    ("flatout fsdp", "FSDP2 by hand"),
    ("flatout ddp", "Accelerate (DDP)"),
    ("flatout zero1", "DDP by hand"),
)
"""What is set beside what."""
