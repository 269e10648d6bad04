"""`python -m benchmarks.memory.forecast --cuda`: the forecasts beside the counters of torch's own CUDA allocator.

On a GPU, or on the stand-in without numbers (tests/gpu/stand_in/gpu --no-numbers), which takes what torch's host code
takes. There cuDNN does not start: cases with convolutions or recurrent layers are set aside, and the summary says how
many. Errors are forecast / measured - 1, of tensors (allocated) and of what the driver was asked for (reserved).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.cases import Case
from benchmarks.memory.truth_cuda import forecast_for_cuda, measured_on_cuda
from flatout.machine.detect import detect
from flatout.units import format_bytes

InChild = Callable[[Callable[[Case, int], Any], Case, int, int], Any]
COUNTERS = ("allocated", "reserved")


def measure(cases: list[Case], in_child: InChild, threads: int, side_by_side: int) -> list[dict[str, Any]]:
    """A row for each case and batch size. The counters are a process's own, so several can run at a time."""
    subjects = [(case, size) for case in cases for size in case.subject.sizes]
    rows = []
    with ThreadPoolExecutor(side_by_side) as pool:
        for row in pool.map(lambda subject: _row(*subject, in_child, threads), subjects):
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def document(
    rows: list[dict[str, Any]], versions: dict[str, str], spread: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    machine = detect()
    return {
        "benchmark": "memory.forecast --cuda",
        "device": in_words(machine.devices),
        "machine": machine.to_json(),
        "versions": {**versions, "cuda": torch.version.cuda},
        "summary": summary_of(rows, spread),
        "rows": rows,
    }


def in_words(gpus: Any) -> str:
    """A GPU of the stand-in has no driver behind it."""
    maps = Path("/proc/self/maps").read_text()
    name = gpus[0].name if gpus else "none"
    return f"{name}, a stand-in of host memory (tests/gpu/stand_in)" if "fakegpu" in maps else name


def summary_of(rows: list[dict[str, Any]], spread: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Of all cases, and by what of cuDNN they need: its workspaces are not known."""
    measured = [row for row in rows if row["errors"]]
    kinds = {"all": measured}
    for row in measured:
        kinds.setdefault(_needs(row), []).append(row)
    found: dict[str, Any] = {}
    for kind, some in kinds.items():
        found[kind] = {name: spread([row["errors"][name] for row in some]) for name in COUNTERS}
        beyond = sum(row["errors"]["reserved"] < -row["forecast"]["uncertainty"] for row in some)
        found[kind]["reserved, beyond its uncertainty"] = beyond
    found["set aside: cuDNN does not start here"] = len(rows) - len(measured)
    return found


def _needs(row: dict[str, Any]) -> str:
    said = " ".join(row["forecast"]["not_covered"])
    kinds = ("recurrent layers", "convolutions")
    return next((kind for kind in kinds if kind in said), "without cuDNN")


def print_summary(summary: dict[str, Any]) -> None:
    print(json.dumps(summary, indent=1))


def _row(case: Case, size: int, in_child: InChild, threads: int) -> dict[str, Any]:
    truth = in_child(measured_on_cuda, case, size, threads)
    ours = in_child(forecast_for_cuda, case, size, threads)
    errors = {}
    if isinstance(truth, dict) and isinstance(ours, dict):
        errors = {
            "allocated": ours["tensor_bytes"] / truth["tensor_bytes"] - 1,
            "reserved": ours["peak_bytes"] / truth["reserved_bytes"] - 1,
        }
    return {
        "case": case.name,
        "held_out": case.held_out,
        "batch_size": size,
        "measured": truth,
        "forecast": ours if isinstance(ours, dict) else {"failure": ours},
        "errors": errors,
    }


def _line(row: dict[str, Any]) -> str:
    name = f"{row['case'][:50]:50} {row['batch_size']:5}"
    if not row["errors"]:
        return f"{name}  measured {str(row['measured'])[:60]}, forecast {row['forecast'].get('failure', 'made')[:60]}"
    measured, errors = row["measured"], row["errors"]
    parts = [f"{one} {format_bytes(measured[f'{one}_bytes']):>9} {errors[one]:+8.2%}" for one in COUNTERS]
    return f"{name}  {'  '.join(parts)}"
