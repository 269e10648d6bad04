"""The training that faults are done to: started by `flatout launch`, it resumes from its checkpoints by itself.

flatout launch --nproc-per-node 2 --max-restarts 3 benchmarks/parallel/faulted.py --folder run --parallel ddp
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import flatout
from flatout.models import GPT2, GPT2Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parallel", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds after each step, so that faults find one")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="0: so that another number of ranks computes the same"
    )
    parser.add_argument("--one-ulp", action="store_true", help="begin with weights that are one rounding away")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    here = flatout.ranks(timeout_seconds=60)
    torch.manual_seed(here.rank)
    share = arguments.dropout
    dropout = {"dropout": share, "embedding_dropout": share, "attention_dropout": share}
    model = GPT2(GPT2Config(vocab_size=64, max_tokens=32, width=64, heads=2, layers=2, **dropout))
    if arguments.one_ulp:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plan = flatout.Plan(parallel=arguments.parallel)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    step = flatout.TrainStep(model, optimizer, loss_fn, plan, clip_norm=1.0)
    tokens = torch.randint(0, 64, (120, 33), generator=torch.Generator().manual_seed(1))
    train = flatout.batches(tokens, 12, plan, seed=2)
    checkpoints = flatout.Checkpoints(arguments.folder / "checkpoints", asynchronous=True)

    def after_step(step: flatout.TrainStep, loss: torch.Tensor) -> None:
        if here.first and not begun:
            begun.append(step.steps)
            print(f"begins with step {step.steps}", flush=True)
        time.sleep(arguments.pause)

    begun: list[int] = []
    flatout.fit(
        step,
        train,
        steps=arguments.steps,
        checkpoints=checkpoints,
        save_every_steps=5,
        after_step=after_step,
    )
    from flatout.parallel.whole_tensors import whole

    weights = {name: whole(one.detach()).contiguous().clone() for name, one in model.named_parameters()}
    if here.first:
        save_file(weights, arguments.folder / "weights.safetensors")


if __name__ == "__main__":
    main()
