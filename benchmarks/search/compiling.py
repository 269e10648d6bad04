"""How long does a first compilation take? Seconds of a first step under the lever torch.compile, and by torch alone.

    python -m benchmarks.search.compiling [--repeats 3] [--out results.json]

Each model is compiled in a process of its own, with nothing in torch's caches and then again with what that left: by
the lever and by torch.compile alone, in turns. A search expects
`flatout.levers.first_compilation.usual_compile_seconds`, which is printed beside what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatout.environment import trial_environment
from flatout.levers.compile import Compile, repeated_blocks
from flatout.levers.first_compilation import usual_compile_seconds
from flatout.levers.observed import ModuleSeen, Observed
from flatout.levers.subject import Subject
from flatout.machine.detect import detect
from flatout.models import GPT2, MLP, GPT2Config, MLPConfig, ResNet, ResNetConfig
from flatout.script.step_work import follow_step

HOW = ("torch", "lever")


def gpt2(layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = GPT2(GPT2Config(vocab_size=65, max_tokens=64, width=96, heads=3, layers=layers))
    return model, torch.randint(0, 65, (8, 64)), torch.randint(0, 65, (8, 64))


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    return ResNet(ResNetConfig(classes=10, stages=(1, 1, 1))), torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], str]] = {
    "mlp": (lambda: (MLP(MLPConfig(inputs=64)), torch.randn(32, 64), torch.randint(0, 10, (32,))), "default"),
    "gpt2, 2 blocks": (lambda: gpt2(2), "default"),
    "gpt2, 2 blocks, regional": (lambda: gpt2(2), "regional"),
    "gpt2, 6 blocks": (lambda: gpt2(6), "default"),
    "gpt2, 6 blocks, regional": (lambda: gpt2(6), "regional"),
    "resnet": (resnet, "default"),
}  # fmt: skip


def measure(name: str, how: str) -> dict[str, float]:
    """In a process of its own: seconds more that the first two steps take than the next two, and what was expected.
    how: 'lever' or 'torch', for the lever torch.compile or torch's own function."""
    make, mode = CASES[name]
    torch.manual_seed(0)
    model, inputs, targets = make()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        out = model(inputs)
        cross_entropy(out.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    step()
    finish = follow_step()
    step()
    work = finish()
    blocks = repeated_blocks(model)
    seen = ModuleSeen(kind=name, parameters=0, repeated_blocks=len(blocks))
    observed = Observed(device="cpu", modules=(seen,), operations_per_step=work.operations_per_step)
    subject = Subject()
    subject.modules.add(model)
    with contextlib.ExitStack() as stack:
        if how == "lever":
            stack.enter_context(Compile().apply(subject, mode))
        else:
            for part in blocks if mode == "regional" else [model]:
                part.compile()
        taken = []
        for _ in range(2):
            began = time.perf_counter()
            step(), step()
            taken.append(time.perf_counter() - began)
    expected = usual_compile_seconds(observed, mode)
    operations = work.operations_per_step or 0
    return {"operations": operations, "seconds": taken[0] - taken[1], "expected_seconds": expected}


def in_a_process(name: str, how: str, cache: str) -> dict[str, float]:
    environment = trial_environment({"TORCHINDUCTOR_CACHE_DIR": cache})
    command = [sys.executable, "-m", "benchmarks.search.compiling", "--case", name, "--how", how]
    found: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )
    return found


def compared(name: str, repeats: int) -> dict[str, Any]:
    """Medians of each way, 'again' with what the first process left in its cache."""
    taken: dict[str, list[float]] = {f"{how}{state}": [] for how in HOW for state in ("", "_again")}
    for _ in range(repeats):
        for how in HOW:
            with tempfile.TemporaryDirectory() as cache:
                first, again = (in_a_process(name, how, cache) for _ in range(2))
            taken[how].append(first["seconds"])
            taken[f"{how}_again"].append(again["seconds"])
    found = {"operations": first["operations"], "expected_seconds": first["expected_seconds"]}
    return {**found, **{way: {"seconds": median(seconds), "all": seconds} for way, seconds in taken.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", choices=CASES, help="this one, in this process")
    parser.add_argument("--how", choices=HOW, default="lever")
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(measure(asked.case, asked.how)))
        return 0
    machine = detect()
    found: dict[str, Any] = {"machine": {"processor": machine.cpu.name, "torch": machine.versions.torch}, "models": {}}
    for name in CASES:
        found["models"][name] = one = compared(name, asked.repeats)
        figures = "  ".join(f"{way} {one[way]['seconds']:5.1f} s" for way in ("torch", "lever", "lever_again"))
        print(
            f"{name:26} {one['operations']:5} operations  {figures}  expected {one['expected_seconds']:.1f} s",
            flush=True,
        )
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
