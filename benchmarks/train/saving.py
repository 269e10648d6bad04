"""`python -m benchmarks.train.saving`: how long checkpoints block training, written at once or in the background.

A GPT of some ten million parameters trains in windows of steps, each with one checkpoint (model, AdamW's moments, data
position, random states), in turn with none, in the foreground and in the background. Two figures: the share of the
time spent inside capture and save, and what a whole window took longer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from flatout import Checkpoints, TrainStep, batches, capture
from flatout.machine.detect import detect
from flatout.models import GPT2, GPT2Config
from flatout.statistics import compare_paired, median

MODES = ("none", "foreground", "background")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60, help="of a window, with one checkpoint")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=1024, max_tokens=64, width=384, heads=6, layers=5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    step = TrainStep(model, optimizer, loss_fn)
    source = batches(torch.randint(0, 1024, (4096, 65)), 8)
    endless = (batch for _ in range(10**9) for batch in source)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    blocked: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        keepers = {mode: Checkpoints(Path(folder) / mode, asynchronous=mode == "background") for mode in MODES}
        for turn in range(arguments.rounds + 1):
            for mode in MODES:
                start, standing = time.perf_counter(), 0.0
                for i in range(arguments.steps):
                    step(next(endless))
                    if i == 0 and mode != "none":
                        before = time.perf_counter()
                        state = capture(model=model, optimizer=optimizer, data=source)
                        keepers[mode].save(state, step=step.steps)
                        standing = time.perf_counter() - before
                total = time.perf_counter() - start
                keepers[mode].wait()
                if turn:
                    seconds[mode].append(total)
                    blocked[mode].append(standing / total)
        latest = keepers["background"].latest()
        size_bytes = latest.size_bytes if latest is not None else 0
        for keeper in keepers.values():
            keeper.close()
    print(f"a checkpoint of {size_bytes / 1e6:.0f} MB every {arguments.steps} steps ({median(seconds['none']):.1f} s)")
    rows = {}
    for mode in MODES[1:]:
        found = compare_paired(seconds["none"], seconds[mode])
        rows[mode] = {"blocked_share": blocked[mode], "seconds": seconds[mode], "against_none": asdict(found)}
        print(
            f"  {mode}: blocked {median(blocked[mode]):.2%} of the time; the window takes "
            f"{1 / found.ratio - 1:+.1%} ({1 / found.high - 1:+.1%} to {1 / found.low - 1:+.1%})"
        )
    if arguments.out:
        document = {"benchmark": "train.saving", "machine": detect().to_json(), "checkpoint_bytes": size_bytes}
        arguments.out.write_text(json.dumps({**document, "modes": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
