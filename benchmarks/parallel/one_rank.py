"""One rank of the matrix: trains the models one after the other, and writes what they came to.

python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.parallel.one_rank --strategy fsdp --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

import flatout
from benchmarks.parallel.models import CASES, Case
from flatout.parallel.whole_tensors import whole
from flatout.strategies.facts import plan_of

BATCH = 16
MICRO_BATCHES = 4
"""Of a pipeline: at least as many as ranks."""


def train(case: Case, strategy: str | None, steps: int, *, nudged: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """({"losses", "samples", "norms"} of each step, final parameters). nudged: a seed of signs by which each weight is
    moved by one rounding error before the first step; 0: none."""
    here = flatout.ranks()
    torch.manual_seed(1 if here.first else 100 + here.rank)  # every rank has to begin with rank 0's weights
    model = case.make()
    if nudged:
        _nudge(model, nudged)
    model.to(here.device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    plan = flatout.Plan() if strategy is None else plan_of(strategy, here.count)
    if strategy == "pipeline":
        plan = plan.with_choice("micro_batches", MICRO_BATCHES, "")
    terms = {"count_terms": case.count_terms} if case.of_tokens else {}
    step = flatout.TrainStep(model, optimizer, case.loss, plan, clip_norm=1.0, scheduler=schedule, **terms)
    train_data = flatout.batches(case.data(), BATCH, plan, seed=3, device=here.device)
    seen: dict[str, list[Any]] = {"losses": [], "samples": [], "norms": []}
    while step.steps < steps:
        for batch in train_data:
            loss = step(batch)
            seen["losses"].append(_mean(loss))
            seen["samples"].append(sorted(_gathered(batch[2].tolist())))
            seen["norms"].append(float(step.gradient_norm))
            if step.steps == steps:
                break
    names = [name for name, _ in model.named_parameters()]
    state = model.state_dict()  # whole tensors where ranks have parts of their own; a collective
    return seen, {name: whole(state[name].detach()).cpu().contiguous().clone() for name in names}


def _nudge(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            signs = torch.randint(0, 2, one.shape, generator=generator) * 2 - 1
            one.mul_(1 + torch.finfo(one.dtype).eps * signs)


def _mean(loss: Tensor) -> float:
    if not distributed.is_initialized():
        return float(loss)
    loss = loss.clone()
    distributed.all_reduce(loss)
    return float(loss) / distributed.get_world_size()


def _gathered(numbers: list[int]) -> list[int]:
    if not distributed.is_initialized():
        return numbers
    every: list[list[int]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(every, numbers)
    return sorted({number for part in every for number in part})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel.one_rank", description=__doc__)
    parser.add_argument("--strategy")
    parser.add_argument("--models", nargs="+", default=list(CASES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--nudged", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        try:
            seen, parameters = train(CASES[name], arguments.strategy, arguments.steps, nudged=arguments.nudged)
        except flatout.FlatoutError as refusal:  # on all ranks alike
            seen, parameters = {"refused": str(refusal)}, {}
        if flatout.ranks().first:
            (arguments.out / f"{name}.json").write_text(json.dumps(seen))
            save_file(parameters, arguments.out / f"{name}.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
