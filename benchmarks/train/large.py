"""`python -m benchmarks.train.large`: ResNet-50 and a GPT-2-small training step against the plain fp32 loop.

Contenders take turns, a few steps each; the share of the ceiling is the counted operations of a step over its time and
this machine's fastest matrix product. The peer is Fabric at its best settings (bf16-mixed, channels_last, compile).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout import Plan, TrainStep, supervised
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.models import GPT2, GPT2Config, ResNet, ResNetConfig
from flatout.statistics import compare_paired, median
from flatout.train.flops import count_step

Step = Callable[[], None]


def resnet_batch() -> Any:
    torch.manual_seed(0)
    return torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))


def gpt_batch() -> Any:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50257, (4, 257))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt() -> nn.Module:
    return GPT2(GPT2Config(max_tokens=256, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0))


def plain(model: nn.Module, batch: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loss_fn = supervised(nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, batch: Any, **choices: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), Plan(**choices))
    return lambda: step(batch) and None


def fabric(model: nn.Module, batch: Any, *, channels_last: bool) -> Step:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        batch = batch[0].contiguous(memory_format=torch.channels_last), batch[1]
    wrapped, optimizer = engine.setup(torch.compile(model), torch.optim.AdamW(model.parameters(), 1e-4, fused=True))
    loss_fn = supervised(nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        engine.backward(loss_fn(wrapped, batch))
        optimizer.step()

    return step


def measure(name: str, contenders: dict[str, Callable[[], Step]], rounds: int, ceiling: Any) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    for label, make in contenders.items():
        try:
            steps[label] = make()
        except ImportError as error:
            print(f"  {label}: not installed ({error})")
            continue
        for _ in range(2):
            steps[label]()  # compilation, and the optimizer's state
    finish = count_step()
    steps["plain fp32"]()
    flops = finish()
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(rounds):
        for label, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[label].append(time.perf_counter() - start)
    print(f"{name}: {flops / 1e9:,.0f} GFLOP a step, ceiling {ceiling[0]} {ceiling[1].value / 1e9:,.0f} GFLOP/s")
    rows = {}
    for label, found in seconds.items():
        ratio = compare_paired(seconds["plain fp32"], found)
        share = flops / median(found) / ceiling[1].value
        rows[label] = {"seconds": found, "share_of_ceiling": share, "against_plain": asdict(ratio)}
        against = f"x{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        print(f"  {label:34} {median(found):7.3f} s  {against}  {share:.0%} of the ceiling", flush=True)
    return {"name": name, "flops_per_step": flops, "rows": rows}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.large", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=("resnet", "gpt"))
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    machine = machine_with_ceilings(lambda text: None)
    ceiling = machine.ceilings.best_gemm() if machine.ceilings is not None else None
    if ceiling is None:
        raise SystemExit("no ceiling could be measured here")
    results = []
    if arguments.only != "gpt":
        images = resnet_batch()
        best = {"precision": "bf16", "memory_format": "channels_last", "optimizer": "fused"}
        contenders: dict[str, Callable[[], Step]] = {
            "plain fp32": lambda: plain(ResNet(ResNetConfig()), images),
            "flatout bf16 channels_last": lambda: ours(ResNet(ResNetConfig()), images, **best),
            "flatout, compiled": lambda: ours(ResNet(ResNetConfig()), images, compile="default", **best),
            "Fabric bf16 channels_last compiled": lambda: fabric(ResNet(ResNetConfig()), images, channels_last=True),
        }
        results.append(measure("ResNet-50, batch 16", contenders, arguments.rounds, ceiling))
        gc.collect()
    if arguments.only != "resnet":
        tokens = gpt_batch()
        contenders = {
            "plain fp32": lambda: plain(gpt(), tokens),
            "flatout bf16": lambda: ours(gpt(), tokens, precision="bf16", optimizer="fused"),
            "flatout, compiled": lambda: ours(gpt(), tokens, precision="bf16", optimizer="fused", compile="regional"),
            "Fabric bf16 compiled": lambda: fabric(gpt(), tokens, channels_last=False),
        }
        results.append(measure("GPT-2 124M, 4 x 256 tokens", contenders, arguments.rounds, ceiling))
    if arguments.out:
        document = {"benchmark": "train.large", "machine": machine.to_json(), "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
