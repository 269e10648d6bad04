"""`python -m benchmarks.whatif`: predicted step times beside those that a GPU was measured to take.

Predictions know the GPU's published figures and the rates of `flatout.predicted_time.gpu_rates`, and follow each
workload on fake tensors on this machine. The rates were fitted to the same measurements, so each workload is also
predicted from rates that are fitted without it ('left out'): that is the error to expect of another model.

    python -m benchmarks.whatif --measured benchmarks/results/whatif_measured_h100.json
    python -m benchmarks.whatif --fit                       # print the rates as fitted to these measurements
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from benchmarks.whatif.workloads import PLANS, WORKLOADS
from flatout.machine.published_peaks import GpuEntry, catalogue_entry
from flatout.predicted_time.gpu_rates import (
    H100,
    KINDS,
    UNBOUND_SHARE,
    GpuModel,
    Rate,
    gpu_time,
    host_seconds,
    ideal_seconds,
    kind_of,
)
from flatout.predicted_time.replayed import followed
from flatout.profiling.operator_classes import operator_class
from flatout.profiling.step_operators import Operator
from flatout.sizing.training import Training
from flatout.statistics import median

LEAST_SHARE = 0.004
"""Of the device's time in a step: rows with less say little of a rate."""
HOST_BOUND = 1.4
"""Times the device's time: steps that take longer are the host's."""
LISTED = ("optimizer", "copy", "attention", "recurrent", "pointwise")
"""Classes whose rows in a profile do not show all shapes that matter: they are compared as a whole."""
Key = tuple[str, str, int]


class Step(NamedTuple):
    """A measured one, and what is known of it without the GPU."""

    key: Key
    seconds: float
    device: Mapping[str, Any]
    operators: tuple[Operator, ...]

    @property
    def tf32(self) -> bool:
        return self.key[1] == "tf32"


class Sample(NamedTuple):
    """The time of a kind of operator in one step, or of its calls with certain shapes."""

    key: Key
    kind: str
    calls: float
    ideal_seconds: float
    seconds: float
    share: float
    """Of the device's time in its step."""


def steps_of(document: Mapping[str, Any]) -> list[Step]:
    by_name = {one.name: one for one in WORKLOADS}
    known: dict[Key, tuple[Operator, ...]] = {}
    found = []
    for row in document["steps"]:
        name, plan, samples = key = (row["workload"], row["plan"], row["samples"])
        same = (name, "bf16" if plan == "bf16" else "fp32", samples)
        if same not in known:
            step = by_name[name].step(PLANS[same[1]], "cpu")
            known[same] = followed(Training.of(step, by_name[name].batch(2)), samples, as_on_cuda=True)
        found.append(Step(key, row["seconds"], row["device"], known[same]))
    return found


def samples_of(step: Step, gpu: GpuEntry) -> list[Sample]:
    expected: dict[tuple[object, ...], list[Any]] = defaultdict(lambda: [0.0, 0.0, ""])
    for one in step.operators:
        entry = expected[_group(one.name, one.operator_class, one.shapes)]
        kind = kind_of(one, tf32=step.tf32)
        entry[0] += one.time_steps if kind.startswith("recurrent") else one.calls
        entry[1] += ideal_seconds(one, gpu, tf32=step.tf32)
        entry[2] = kind if not entry[2] or "fp32" in entry[2] else entry[2]
    seconds: dict[tuple[object, ...], float] = defaultdict(float)
    for name, _, microseconds, text in step.device["operators"]:
        update = name.startswith(("aten::_foreach", "aten::_fused_adam"))
        shapes = tuple(tuple(map(int, part.split(","))) for part in re.findall(r"\[([\d, ]+)\]", text))
        seconds[_group(name, "optimizer" if update else operator_class(name), shapes)] += microseconds * 1e-6
    total = sum(seconds.values())
    return [
        Sample(step.key, expected[group][2], expected[group][0], expected[group][1], taken, taken / total)
        for group, taken in seconds.items()
        if group in expected
    ]


def _group(name: str, kind: str, shapes: Sequence[Sequence[int]]) -> tuple[object, ...]:
    plain = name.removeprefix("aten::").removeprefix("cudnn_")
    direction = "backward" if "backward" in name else ""
    if kind in LISTED:
        return kind, direction if kind not in ("optimizer", "copy", "pointwise") else ""
    return kind, "batch_norm" in plain, direction, *map(tuple, shapes[:2])


def fitted(samples: Iterable[Sample], steps: Iterable[Step], gpu: GpuEntry) -> GpuModel:
    """Least squares of relative errors, no rate below zero. A kind without a sample takes that of its like."""
    rows = list(samples)
    rates: dict[str, Rate] = {}
    for kind in KINDS:
        own = [one for one in rows if one.kind == kind]
        own = [one for one in own if one.share > LEAST_SHARE] or own
        if not own:
            continue
        weights = np.array([min(1.0, 10 * one.share) ** 0.5 for one in own])
        features = np.array([[one.calls / one.seconds, one.ideal_seconds / one.seconds] for one in own])
        (per_call, per_ideal), _ = nnls(features * weights[:, None], weights)
        rates[kind] = Rate(float(per_call), UNBOUND_SHARE if not per_ideal else float(1 / per_ideal))
    for kind in KINDS - rates.keys():
        like = kind.replace("half", "fp32").replace(", tf32", ", fp32")
        rates[kind] = rates.get(like) or rates.get(kind.replace(" backward", "")) or rates["pointwise"]
    model = GpuModel(rates=rates, host_seconds=dict.fromkeys(HOST_PARTS, 0.0))
    return replace(model, host_seconds=_host(model, steps, gpu))


HOST_PARTS = ("forward", "backward", "optimizer", "time step")


def _host(model: GpuModel, steps: Iterable[Step], gpu: GpuEntry) -> dict[str, float]:
    bound = [
        step
        for step in steps
        if step.seconds > HOST_BOUND * gpu_time(step.operators, gpu, model, tf32=step.tf32).device_seconds
    ]
    features = []
    for step in bound:
        counted = []
        for part in HOST_PARTS:
            one_each = replace(model, host_seconds={name: float(name == part) for name in HOST_PARTS})
            counted.append(sum(host_seconds(one, one_each) for one in step.operators) / step.seconds)
        features.append(counted)
    found, _ = nnls(np.array(features), np.ones(len(bound)))
    return dict(zip(HOST_PARTS, map(float, found), strict=True))


def errors_of(steps: Sequence[Step], gpu: GpuEntry, models: Mapping[str, GpuModel]) -> dict[Key, float]:
    """Relative, of each step, predicted by its workload's model."""
    found = {}
    for step in steps:
        predicted = gpu_time(step.operators, gpu, models[step.key[0]], tf32=step.tf32)
        found[step.key] = predicted.step_seconds / step.seconds - 1
    return found


def summary(errors: Iterable[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {"median": median(sizes), "nine in ten": sizes[int(0.9 * (len(sizes) - 1))], "largest": sizes[-1]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif", description=__doc__)
    default = Path(__file__).parents[1] / "results" / "whatif_measured_h100.json"
    parser.add_argument("--measured", type=Path, default=default, help="what benchmarks.whatif.measured wrote")
    parser.add_argument("--device", default="h100", help="that GPU in the catalogue")
    parser.add_argument("--fit", action="store_true", help="print the fitted rates")
    parser.add_argument("--out", type=Path, help="write the predictions there, as JSON")
    arguments = parser.parse_args(words)
    gpu = catalogue_entry(arguments.device)
    steps = steps_of(json.loads(arguments.measured.read_text()))
    samples = [one for step in steps for one in samples_of(step, gpu)]
    names = list(dict.fromkeys(step.key[0] for step in steps))
    left_out = {
        name: fitted(
            [one for one in samples if one.key[0] != name], [step for step in steps if step.key[0] != name], gpu
        )
        for name in names
    }
    if arguments.fit:
        model = fitted(samples, steps, gpu)
        for kind, rate in sorted(model.rates.items()):
            print(f'    "{kind}": Rate({rate.seconds_per_call:.2g}, {rate.share:.3g}),')
        print("   ", {part: float(f"{seconds:.2g}") for part, seconds in model.host_seconds.items()})
    given = errors_of(steps, gpu, dict.fromkeys(names, H100))
    apart = errors_of(steps, gpu, left_out)
    for step in steps:
        time = gpu_time(step.operators, gpu, H100, tf32=step.tf32)
        print(
            f"{step.key[0]:16} {step.key[1]:5} {step.key[2]:4}  measured {step.seconds * 1e3:8.2f} ms  predicted "
            f"{time.step_seconds * 1e3:8.2f} (device {time.device_seconds * 1e3:8.2f}, "
            f"host {time.host_seconds * 1e3:7.2f})  {given[step.key]:+7.1%}  left out {apart[step.key]:+7.1%}"
        )
    plain = {key: error for key, error in apart.items() if key[0] != "seq-classifier"}
    result = {"with the rates of flatout": summary(given.values()), "left out": summary(apart.values())}
    result["left out, without the recurrent model"] = summary(plain.values())
    for name, numbers in result.items():
        print(f"{name}: " + ", ".join(f"{what} {number:.1%}" for what, number in numbers.items()))
    if arguments.out:
        rows = [
            {"workload": step.key[0], "plan": step.key[1], "samples": step.key[2], "measured_seconds": step.seconds}
            | {"predicted_seconds": gpu_time(step.operators, gpu, H100, tf32=step.tf32).step_seconds}
            | {"error": given[step.key], "error_left_out": apart[step.key]}
            for step in steps
        ]
        document = {"benchmark": "whatif", "device": gpu.name, "errors": result, "steps": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
