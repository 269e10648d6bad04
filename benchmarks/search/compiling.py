"""How long does a first compilation take? Seconds of a first step under the lever torch.compile, by operations.

    python -m benchmarks.search.compiling

Each model is compiled in a process of its own, with nothing in torch's caches and then again with what that left. A
search expects `flatout.levers.first_compilation.usual_compile_seconds`, which is printed beside what was measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatout.environment import trial_environment
from flatout.levers.compile import Compile, repeated_blocks
from flatout.levers.first_compilation import usual_compile_seconds
from flatout.levers.observed import ModuleSeen, Observed
from flatout.levers.subject import Subject
from flatout.models import GPT2, MLP, GPT2Config, MLPConfig, ResNet, ResNetConfig
from flatout.script.step_work import follow_step


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


def measure(name: str) -> str:
    """In a process of its own: seconds more that the first two steps take than the next two, and what was expected."""
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
    seen = ModuleSeen(kind=name, parameters=0, repeated_blocks=len(repeated_blocks(model)))
    observed = Observed(device="cpu", modules=(seen,), operations_per_step=work.operations_per_step)
    subject = Subject()
    subject.modules.add(model)
    taken = []
    with Compile().apply(subject, mode):
        for _ in range(2):
            began = time.perf_counter()
            step(), step()
            taken.append(time.perf_counter() - began)
    expected = usual_compile_seconds(observed, mode)
    return f"{work.operations_per_step:5} operations  {taken[0] - taken[1]:5.1f} s  expected {expected:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="this one, in this process")
    case = parser.parse_args().case
    if case:
        print(measure(case))
        return 0
    for name in CASES:
        with tempfile.TemporaryDirectory() as cache:
            environment = trial_environment({"TORCHINDUCTOR_CACHE_DIR": cache})
            for state in ("nothing in caches", "again"):
                command = [sys.executable, "-m", "benchmarks.search.compiling", "--case", name]
                out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                print(f"{name:26} {state:18} {out.strip()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
