"""`python -m benchmarks.kernels.bf16_products`: training kernels for a CPU's matrix units beside torch's operations.

Forward and backward of linear layers, attention and GELU as training under autocast to bf16 calls them, weights in
fp32; ways take turns, a few calls each, in another order every round. Rates are of counted operations; errors are norms
of differences from float64, relative to its norm, the largest of output and gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.infer.turns import rows, take_turns, versions, write
from benchmarks.kernels.linear_cross_entropy import largest_error
from flatout.kernels.bf16_products import obstacle
from flatout.kernels.operators import attention, gelu_tanh, linear
from flatout.statistics import median

CALLS = 3
Work = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    inputs: tuple[Tensor, ...]
    torchs: Work
    ours: Work


def linear_case(tokens: int, inputs: int, outputs: int) -> Case:
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    weight = (torch.randn(outputs, inputs) / inputs**0.5).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    return Case(name=f"linear {tokens} x {inputs} -> {outputs}", inputs=(x, weight, bias), torchs=torchs, ours=linear)


def attention_case(batch: int, heads: int, tokens: int, features: int, *, causal: bool) -> Case:
    qkv = torch.randn(batch, tokens, 3, heads, features).bfloat16().permute(2, 0, 3, 1, 4)
    inputs = tuple(one.detach().requires_grad_() for one in qkv.unbind(0))
    kind = "causal attention" if causal else "attention"
    return Case(
        name=f"{kind} {batch} x {heads} x {tokens} x {features}",
        inputs=inputs,
        torchs=lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        ours=lambda q, k, v: attention(q, k, v, causal=causal),
    )


def gelu_case(rows: int, columns: int) -> Case:
    return Case(
        name=f"GELU (tanh) {rows * columns:,}",
        inputs=(torch.randn(rows, columns).bfloat16().requires_grad_(),),
        torchs=lambda x: functional.gelu(x, approximate="tanh"),
        ours=gelu_tanh,
    )


def cases() -> list[Case]:
    torch.manual_seed(0)
    return [
        linear_case(1024, 768, 2304),
        linear_case(1024, 768, 768),
        linear_case(1024, 768, 3072),
        linear_case(1024, 3072, 768),
        linear_case(4096, 1024, 4096),
        linear_case(64, 512, 512),
        linear_case(128, 512, 512),
        linear_case(256, 512, 512),
        attention_case(4, 12, 256, 64, causal=True),
        attention_case(8, 12, 128, 64, causal=False),
        attention_case(1, 12, 1024, 64, causal=True),
        attention_case(1, 8, 4096, 64, causal=True),
        gelu_case(1024, 3072),
    ]


def called(work: Work, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    out = work(*inputs)
    return [out, *torch.autograd.grad(out, list(inputs), gradient)]


def measured(case: Case, rounds: int) -> dict[str, Any]:
    torch.compiler.reset()  # each case is a program of its own
    gradient = torch.randn_like(case.torchs(*case.inputs))
    exact_inputs = [one.detach().double().requires_grad_() for one in case.inputs]
    exact = [one.detach() for one in called(case.torchs, exact_inputs, gradient.double())]
    ways: dict[str, Work] = {
        "torch": case.torchs,
        "torch, compiled": torch.compile(case.torchs, dynamic=False),
        "flatout": case.ours,
    }
    errors = {name: largest_error(called(work, case.inputs, gradient), exact) for name, work in ways.items()}

    def turn(work: Work) -> Callable[[int], int]:
        def run(number: int) -> int:
            for _ in range(CALLS):
                called(work, case.inputs, gradient)
            return CALLS

        return run

    samples = take_turns({name: turn(work) for name, work in ways.items()}, rounds)
    with FlopCounterMode(display=False) as counter:
        called(case.ours, case.inputs, gradient)
    found = rows(samples, "torch")
    for name, row in found.items():
        row["relative_error"] = errors[name]
        flops = counter.get_total_flops()
        row["flops_per_second"] = flops / median(samples[name]) if flops else None
        ratio = row["against_baseline"]
        rate = f"{row['flops_per_second'] / 1e12:5.2f} TFLOP/s  " if flops else ""
        print(
            f"  {name:16} {median(samples[name]) * 1e3:8.3f} ms  x{ratio['ratio']:.2f} ({ratio['low']:.2f} to "
            f"{ratio['high']:.2f})  {rate}error {errors[name]:.1e}",
            flush=True,
        )
    return {"case": case.name, "rows": found}


def run(name: str, description: str | None, cases: Iterable[Case], words: Sequence[str] | None) -> int:
    """`python -m benchmarks.kernels.<name>`: measure the cases that its options name."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.kernels.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    results = []
    for case in cases:
        if arguments.only and arguments.only not in case.name:
            continue
        print(case.name, flush=True)
        results.append(measured(case, arguments.rounds))
        write(arguments.out, {"benchmark": f"kernels.{name}", "versions": versions(), "results": results})
    return 0


def main(words: Sequence[str] | None = None) -> int:
    if (why := obstacle()) is not None:
        print(f"note: {why}; what runs instead is right and slow")
    return run("bf16_kernels", __doc__, cases(), words)


if __name__ == "__main__":
    sys.exit(main())
