"""`python -m benchmarks.train.kills`: a run killed at random moments ends with the weights of an undisturbed one.

The run has dropout, shuffling, a schedule, accumulation, fp16 with loss scaling and asynchronous checkpoints after
every step, so kills fall into saves too. Each child is killed (SIGKILL) at a random moment of its steps until the
wanted number of kills is reached; the last child runs to its end. A lost or repeated sample would change the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from flatout import Checkpoints, Plan, TrainStep, batches, fit, supervised
from flatout.machine.detect import detect

SAMPLES, BATCH, EPOCHS = 600, 8, 16


def train(folder: Path | None) -> list[torch.Tensor]:
    """The run's final weights; with a folder it is resumed from there and saves there."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * SAMPLES // BATCH)
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(2))
    plan = Plan(precision="fp16", micro_batches=2)
    loss_fn = supervised(nn.CrossEntropyLoss())
    step = TrainStep(model, optimizer, loss_fn, plan, clip_norm=1.0, scheduler=scheduler)
    source = batches((x, x[:, :4].argmax(1)), BATCH, seed=3)
    if folder is None:
        fit(step, source, epochs=EPOCHS)
    else:
        with Checkpoints(folder, keep_last=2, asynchronous=True) as checkpoints:
            print("begins", flush=True)
            fit(step, source, epochs=EPOCHS, checkpoints=checkpoints, save_every_steps=1)
    return [parameter.detach() for parameter in model.parameters()]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.child:
        torch.save(train(arguments.child / "run"), arguments.child / "weights.pt")
        return 0
    expected = train(None)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kills, restarts = _kill(Path(folder), arguments.kills, random.Random(arguments.seed))
        weights = torch.load(Path(folder) / "weights.pt")
    same = all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    seconds = time.perf_counter() - began
    verdict = "bit-identical to" if same else "DIFFERENT from"
    print(f"{kills} kills, {restarts} starts, {seconds:.0f} s: the final weights are {verdict} the undisturbed run's")
    if arguments.out:
        found = {"kills": kills, "starts": restarts, "bit_identical": same, "seconds": seconds}
        document = {"benchmark": "train.kills", "machine": detect().to_json(), **found}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if same else 1


def _kill(folder: Path, kills: int, chance: random.Random) -> tuple[int, int]:
    """Start and kill until that many kills hit a running child, then let it end. (kills, starts)."""
    done = starts = 0
    while True:
        starts += 1
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train.kills", "--child", str(folder)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        if done < kills:
            time.sleep(chance.uniform(0.0, 0.12))
            if child.poll() is None:
                child.kill()
                done += 1
        child.communicate()
        if child.returncode == 0:
            return done, starts
        if done >= kills and child.returncode != -9:
            raise SystemExit(f"a child left with code {child.returncode}")


if __name__ == "__main__":
    sys.exit(main())
