"""Documents of one script, fuller than the recorded samples: something was kept, found, held and leaked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = Path(__file__).parents[2] / "recorded" / "formats"
SCRIPT = {"name": "train.py", "arguments": None, "arguments_digest": "sha256:7460f617d0a4d0eb"}


def recorded(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FORMATS / f"{kind}-1.json").read_text())
    return found


def _comparison(ratio: float, low: float | None, high: float | None) -> dict[str, Any]:
    verdict = "faster" if low is not None and low > 1.01 else "not significant"
    return {"ratio": ratio, "low": low or 0.0, "high": high, "confidence": 0.95, "pairs": 8, "verdict": verdict}


def _trial(label: str, outcome: str, comparison: Mapping[str, Any] | None, reason: str = "") -> dict[str, Any]:
    return {
        **recorded("tune")["trials"][1],
        "label": label,
        "outcome": outcome,
        "comparison": comparison,
        "reason": reason,
    }


TUNE = {
    **recorded("tune"),
    "script": SCRIPT,
    "trials": [
        _trial("batched fetch", "kept", _comparison(1.42, 1.38, 1.47), "faster"),
        _trial("bf16 autocast", "dropped", _comparison(0.62, 0.55, 0.71), "slower"),
        _trial("torch.compile", "failed", None, "no compiler was found"),
        _trial("threads 1", "dropped", _comparison(1.02, None, None), "too few pairs"),
    ],
    "kept": ["batched fetch"],
    "plan": {"batched_fetch": True},
    "exactness": "bit-identical",
    "reason": "",
    "speedup": _comparison(1.44, 1.40, 1.48),
    "final": {
        "comparison": _comparison(1.44, 1.40, 1.48),
        "baseline_seconds": 0.0123,
        "candidate_seconds": 0.0085,
        "startup_seconds": 0.1,
        "baseline_medians": [0.0123, 0.0125, 0.0121, 0.0124],
        "candidate_medians": [0.0085, 0.0086, 0.0084, 0.0085],
        "peak_resident_bytes": [1 << 30, 3 << 29],
    },
    "proof": {
        "verdict": "bit-identical",
        "reason": "losses, gradients and weights have the same bits",
        "steps": 40,
        "epochs": 2.5,
        "claims": [
            {"levers": ["batched fetch"], "claimed": "bit-identical", "verdict": "bit-identical", "reason": "same"}
        ],
        "loss_difference": 0.0,
        "loss_floor": 1e-7,
        "notes": ["the script is repeatable"],
    },
    "whole_run": {
        "own_start_seconds": 0.1,
        "lever_start_seconds": 0.2,
        "payoff_steps": 80,
        "steps": 1000,
        "plain_seconds": 14.3,
        "planned_seconds": 10.8,
    },
    "fit": {"limit_bytes": 1 << 30, "plain_bytes": 1 << 31, "planned_bytes": 1 << 29, "holds": True, "trials": []},
}
FINDING = {
    "name": "item_every_step",
    "severity": "warning",
    "title": "loss.item() waits for the device every step",
    "evidence": "41 calls, 1.2 ms each",
    "remedy": "read it every 50 steps",
    "next_command": "flatout tune train.py ARGUMENTS",
    "cost_seconds": 0.0012,
    "cost_bytes": None,
    "cost_share": 0.1,
    "lines": [["train.py", 41, "print(loss.item())"]],
    "confidence": "likely",
    "if_wrong": "the loss is printed less often",
    "plan_change": {"threads": 2},
}
RUN = {
    **recorded("run"),
    "findings": [FINDING, *recorded("run")["findings"]],
    "memory": [
        {"step": at, "peak_bytes": 1 << 24, "held_bytes": 1 << 20, "reserved_bytes": 1 << 25} for at in (21, 60, 99)
    ],
    "out_of_memory": {
        "message": "DefaultCPUAllocator: not enough memory",
        "line": "train.py:30",
        "categories": {"weights": 100, "gradients": 0, "graph": 5000},
        "holders": [{"line": "train.py:12", "name": "history", "size_bytes": 4000}],
        "advice": ["a batch of 16 instead of 64 would have needed a quarter of the graph"],
    },
    "warnings": ["a warning"],
    "processes": [
        {
            "name": f"rank {rank}",
            "pid": 100 + rank,
            "rank": rank,
            "steps": 40,
            "step_seconds": 0.02 + 0.01 * rank,
            "parts": {"data": 0.001, "forward": 0.009, "backward": 0.01, "communication": 0.004},
            "ranks": 2,
            "exposed_seconds": 0.004,
            "device": "cpu",
            "peak_resident_bytes": 1 << 29,
            "peak_device_bytes": None,
            "ended": rank == 0,
            "fault": None,
        }
        for rank in range(2)
    ],
    "process_spread": {
        "step": {
            "slowest": "rank 1",
            "slowest_seconds": 0.03,
            "fastest": "rank 0",
            "fastest_seconds": 0.02,
            "share": 0.5,
        },
        "outside_backward": None,
    },
}
MEMORY = {
    **recorded("memory"),
    "script": SCRIPT,
    "leaks": {
        "verdict": "leaks",
        "judged_steps": 8,
        "leaks": [
            {
                "holder": "history",
                "type_name": "list",
                "line": "train.py:31",
                "source": "history.append(loss)",
                "bytes_per_step": 4096.0,
                "graph_nodes_per_step": 12.0,
            }
        ],
    },
    "notes": ["only reference cycles held tensors"],
}
PROFILE = {
    "flatout": {"document": "profile", "schema": 1, "version": "0.1.0"},
    "machine": recorded("run")["machine"],
    "findings": [FINDING],
    "profile": {
        "name": "train.py",
        "device": "cpu",
        "steps": 5,
        "timed_steps": 20,
        "step_seconds": 0.012,
        "samples_seconds": [0.012, 0.0125, 0.0118, 0.4],
        "profiled_step_seconds": 0.013,
        "parts": {"data": 0.002, "copies": 0.0, "forward": 0.004, "backward": 0.005, "optimizer": 0.001, "other": 0.0},
        "operators": [
            {
                "name": "aten::addmm",
                "shapes": "[64, 128] [128, 10]",
                "dtype": "float32",
                "calls": 2.0,
                "seconds": 0.001 * number,
                "phase": "forward",
                "module": "model.layers.0",
                "line": "train.py:12",
            }
            for number in range(20, 0, -1)
        ],
        "modules": [
            {
                "path": "Net",
                "kind": "Net",
                "depth": 0,
                "calls": 1.0,
                "forward_seconds": 0.004,
                "backward_seconds": 0.005,
            },
            {
                "path": "model.fc",
                "kind": "Linear",
                "depth": 1,
                "calls": 1.0,
                "forward_seconds": 0.001,
                "backward_seconds": None,
                "backward_reason": "not followed",
            },
        ],
        "lines": [
            {
                "file": "train.py",
                "line": 41,
                "seconds": 0.004,
                "share": 0.5,
                "text": "loss = net(x)",
                "function": "main",
            }
        ],
        "roofline": [
            {
                "operator_class": "matmul",
                "dtype": "float32",
                "seconds": 0.006,
                "share": 0.6,
                "flops": 3e8,
                "bytes": 1e7,
                "attained_flops_per_second": 5e10,
                "bound": "compute",
                "ceiling_name": "fp32 products",
                "share_of_ceiling": 0.7,
                "reason": "",
            },
            {
                "operator_class": "pointwise",
                "seconds": 0.002,
                "share": 0.2,
                "flops": 1e6,
                "bytes": 8e6,
                "attained_flops_per_second": 5e8,
                "bound": "memory",
                "ceiling_name": "memory copy",
                "share_of_ceiling": 0.5,
                "reason": "",
            },
            {
                "operator_class": "other",
                "seconds": 0.001,
                "share": 0.1,
                "share_of_ceiling": None,
                "reason": "no formula",
            },
        ],
        "kernels": [
            {"name": "gemm", "kind": "kernel", "calls": 1.0, "seconds": 0.001, "operator": "aten::mm", "bytes": 4}
        ],
        "waits": [{"operator": "aten::index", "line": "train.py:23", "calls": 2.0, "seconds": 0.0005}],
        "matrix_units": {"unit": "AMX", "share": 0.2, "reason": "", "rest": [["float32 is not supported", 0.003]]},
        "idle_causes": [{"cause": "loader", "seconds": 0.002, "evidence": "it waited for workers"}],
        "samples_per_step": 64.0,
        "tokens_per_step": None,
        "notes": ["compiled code is one operator"],
        "reasons": {"tokens_per_step": "no integer input"},
    },
}
EVERYTHING = {"tune": TUNE, "run": RUN, "profile": PROFILE, "memory": MEMORY}

STRATEGIES = {
    "flatout": {"document": "strategies", "schema": 1, "version": "0.1.0"},
    "machine": TUNE["machine"],
    "spec": "net.py:make",
    "ranks": 2,
    "facts": {
        "model": "GPT",
        "parameters": 81_408,
        "step_seconds": 0.3,
        "memory": {
            "one process": {"bytes": 150_000_000, "reason": ""},
            "ddp": {"bytes": 159_820_076, "reason": ""},
            "tensor": {"bytes": None, "reason": "there are forecasts for ddp and fsdp alone"},
        },
    },
    "limit_bytes": 2_000_000_000,
    "exchange_seconds": 0.004,
    "trials": [
        {
            "strategy": "ddp",
            "outcome": "kept",
            "reason": "",
            "predicted": {"step_seconds": 0.25, "reason": "half of the batch in each rank"},
            "comparison": _comparison(1.12, 1.05, 1.19),
            "baseline_seconds": 0.3,
            "step_seconds": 0.268,
            "peak_bytes": 159_820_064,
        },
        {"strategy": "tensor", "outcome": "refused", "reason": "no layer can be split", "predicted": None},
    ],
    "chosen": "ddp",
    "reason": "",
    "plan": {"parallel": "ddp"},
    "comparison": _comparison(1.12, 1.05, 1.19),
    "baseline_seconds": 0.3,
    "step_seconds": 0.268,
    "proof": {"verdict": "equal to rounding", "steps": 30},
    "budget_seconds": 100.0,
    "seconds": 93.0,
    "warnings": ["batches are shared by two ranks"],
}
"""Of a choice of parallel strategies, by itself: it is of a function that makes a step."""
