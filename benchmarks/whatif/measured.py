"""`python -m benchmarks.whatif.measured --device cuda --out FILE`: what steps and operators take on a device.

Two parts. Steps: each workload under each plan, windows of steps until the device is done, and one profiled step with
the device's time by operator and shape. Operators: products, passes over memory and launches by size, each by itself;
what a device does with them is what predictions are made from, and steps are what they are judged by.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.infer.surroundings import surroundings
from benchmarks.whatif.workloads import PLANS, WORKLOADS, Workload
from flatout.statistics import median

WINDOWS = 5
MOST_ROWS = 80
Call = Callable[[], Any]


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def window(call: Call, count: int, device: str) -> float:
    """Seconds a call, until the device is done."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - began) / count


def timed(call: Call, device: str, seconds: float) -> float:
    """The median over windows of a fifth of `seconds` each."""
    for _ in range(3):
        call()
    count = max(1, int(seconds / WINDOWS / max(1e-6, window(call, 2, device))))
    return median([window(call, count, device) for _ in range(WINDOWS)])


def step_measured(workload: Workload, plan: str, samples: int, device: str, seconds: float) -> dict[str, Any]:
    step = workload.step(PLANS[plan], device)
    batch = tuple(one.to(device) for one in workload.batch(samples))
    found: dict[str, Any] = {"workload": workload.name, "plan": plan, "samples": samples}
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        step(batch)
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["seconds"] = timed(lambda: step(batch), device, seconds)
    if device != "cpu":
        found["device"] = by_operator(lambda: step(batch))
    step.close()
    return found


def by_operator(call: Call) -> dict[str, Any]:
    """The device's time in one step: all of it, launches, and by operator and shapes of its inputs."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    rows = sorted(
        profiled.key_averages(group_by_input_shape=True), key=lambda one: one.self_device_time_total, reverse=True
    )
    return {
        "seconds": sum(event.time_range.elapsed_us() for event in kernels) / 1e6,
        "launches": len(kernels),
        "operators": [
            [row.key, row.count, round(row.self_device_time_total, 1), str(row.input_shapes)[:200]]
            for row in rows[:MOST_ROWS]
            if row.self_device_time_total and row.device_type == torch.autograd.DeviceType.CPU
        ],
    }


def products(device: str, largest: int) -> list[tuple[str, Call]]:
    """Products of many shapes; the third part of the name is the arithmetic."""
    sizes = [(n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192) if n <= largest]
    sizes += [
        (rows, wide, narrow)
        for rows in (256, 1024, 4096, 16384)
        for wide, narrow in ((768, 768), (768, 3072), (3072, 768), (512, 50257))
        if rows <= 4 * largest
    ]
    found: list[tuple[str, Call]] = []
    for arithmetic in ("fp32", "tf32", "bf16"):
        dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
        for rows, outputs, inputs in sizes:
            left = torch.randn(rows, inputs, device=device).to(dtype)
            right = torch.randn(inputs, outputs, device=device).to(dtype)
            name = f"mm {arithmetic} {rows} {outputs} {inputs}"
            found.append((name, lambda left=left, right=right, a=arithmetic: _product(left, right, a)))
    return found


def _product(left: Tensor, right: Tensor, arithmetic: str) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = arithmetic == "tf32"
    return left @ right


def passes(device: str, largest: int) -> list[tuple[str, Call]]:
    """What goes through memory, by bytes of one tensor."""
    found: list[tuple[str, Call]] = []
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for exponent in range(12, 31, 2):
            if 2**exponent > largest:
                break
            one = torch.randn(2**exponent // dtype.itemsize // 256, 256, device=device).to(dtype)
            gradient = torch.randn_like(one)
            calls: dict[str, Call] = {
                "add": lambda one=one, gradient=gradient: one + gradient,
                "gelu": lambda one=one: functional.gelu(one),
                "gelu_backward": lambda one=one, gradient=gradient: torch.ops.aten.gelu_backward(gradient, one),
                "softmax": lambda one=one: torch.softmax(one, -1),
                "layer_norm": lambda one=one: functional.layer_norm(one, (256,)),
                "sum": lambda one=one: one.sum(),
                "column_sum": lambda one=one: one.sum(0),
                "to": lambda one=one: one.to(_other(one.dtype)),
            }
            found += [(f"{name} {kind} {2**exponent}", call) for name, call in calls.items()]
    return found


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


def layers(device: str) -> list[tuple[str, Call]]:
    """Convolutions, attention and an optimizer's update, forward and backward."""
    found: list[tuple[str, Call]] = []
    for arithmetic in ("fp32", "tf32", "bf16"):
        dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
        for batch, channels, outputs, size, kernel in (
            (64, 3, 64, 224, 7),
            (64, 64, 64, 56, 3),
            (64, 256, 64, 56, 1),
            (64, 256, 256, 14, 3),
            (64, 1024, 256, 14, 1),
            (32, 16, 32, 28, 3),
        ):
            images = torch.randn(batch, channels, size, size, device=device).to(dtype).requires_grad_()
            weight = torch.randn(outputs, channels, kernel, kernel, device=device).to(dtype).requires_grad_()
            name = f"conv {arithmetic} {batch} {channels} {outputs} {size} {kernel}"
            found.append((name, lambda i=images, w=weight, a=arithmetic: _convolved(i, w, a)))
        if arithmetic == "tf32":
            continue
        for batch, heads, length, width in ((8, 12, 1024, 64), (32, 12, 128, 64), (16, 8, 512, 64)):
            q, k, v = (torch.randn(batch, heads, length, width, device=device).to(dtype) for _ in range(3))
            q.requires_grad_()
            name = f"attention {arithmetic} {batch} {heads} {length} {width}"
            found.append((name, lambda q=q, k=k, v=v: _attended(q, k, v)))
    return found


def _convolved(images: Tensor, weight: Tensor, arithmetic: str) -> object:
    torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
    out = functional.conv2d(images, weight, padding=weight.shape[-1] // 2)
    return torch.autograd.grad(out, [images, weight], out.detach())


def _attended(q: Tensor, k: Tensor, v: Tensor) -> object:
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(out, [q], out.detach())


def operators_measured(device: str, seconds: float, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for made in (
        lambda: products(device, 512 if quick else 8192),
        lambda: passes(device, 2**16 if quick else 2**30),
        lambda: [] if quick else layers(device),
    ):
        for name, call in made():
            rows.append({"operator": name, "seconds": timed(call, device, seconds)})
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif.measured", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in WORKLOADS])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--seconds", type=float, default=1.0, help="for the windows of a step")
    parser.add_argument("--operator-seconds", type=float, default=0.05, help="for those of an operator; 0: none")
    parser.add_argument("--quick", action="store_true", help="small workloads and operators alone")
    arguments = parser.parse_args(words)
    document: dict[str, Any] = {"benchmark": "whatif.measured", "device": arguments.device}
    document |= {**surroundings("triton"), "steps": [], "operators": []}

    def save() -> None:
        arguments.out.write_text(json.dumps(document) + "\n")

    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for workload in WORKLOADS:
        if (arguments.only and workload.name not in arguments.only) or (arguments.quick and not workload.small):
            continue
        for plan in arguments.plans:
            for samples in dict.fromkeys((workload.samples, max(1, workload.samples // 4))):
                if samples != workload.samples and plan != "bf16":
                    continue
                try:
                    row = step_measured(workload, plan, samples, arguments.device, arguments.seconds)
                except Exception as error:  # a workload that fails is reported, and the others go on
                    print(f"{workload.name} {plan}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
                    continue
                document["steps"].append(row)
                busy = row.get("device", {})
                text = f"{busy['seconds'] * 1e3:9.3f} ms busy, {busy['launches']} launches" if busy else ""
                print(f"{workload.name:16} {plan:5} {samples:4}  {row['seconds'] * 1e3:9.3f} ms {text}", flush=True)
                gc.collect()
                save()
    if arguments.operator_seconds:
        document["operators"] = operators_measured(arguments.device, arguments.operator_seconds, arguments.quick)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        save()
        print(f"{len(document['operators'])} operators")
    return 0


if __name__ == "__main__":
    sys.exit(main())
