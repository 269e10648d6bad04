"""`python -m benchmarks.memory.forecast`: `flatout.forecast` beside what torch's allocator then held, and its peers.

Each number is made in a child process of its own, on one thread. A forecast is made from an example batch of the case's
smaller size, so that half of them are for another batch size than they were shown. Errors are forecast / measured - 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import forecast_cuda
from benchmarks.memory.cases import BF16, Case
from benchmarks.memory.cases_library import library_cases
from benchmarks.memory.cases_plain import plain_cases
from benchmarks.memory.peers import OF_THE_MODEL, PEERS
from benchmarks.memory.truth import measured_peak_bytes
from flatout import TrainStep, forecast
from flatout.machine.detect import detect
from flatout.statistics import median
from flatout.units import format_bytes

NOT_COMPILED = ("LSTM", "GRU", "RNN")
"""torch.compile leaves recurrent layers as they are."""
_STARTING = threading.Lock()
"""Libraries count on it that a process is forked by one thread at a time."""
TARGETS = "median <= 3 %, 95th percentile <= 8 %, more than 2 % below in at most 5 % of cases, each in under 10 s"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.forecast", description=__doc__)
    parser.add_argument("--only", nargs="+", help="parts of cases' names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="the fp32 and bf16 cases under torch.compile instead")
    parser.add_argument("--cuda", action="store_true", help="against torch's CUDA allocator: see forecast_cuda.py")
    parser.add_argument("--side-by-side", type=int, default=1, help="with --cuda: cases measured at a time")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    all_cases = _compiled_cases() if arguments.compiled else _cases()
    cases = [case for case in all_cases if not arguments.only or any(part in case.name for part in arguments.only)]
    if arguments.cuda:
        return _on_cuda(cases, arguments)
    peers = {} if arguments.without_peers else PEERS
    rows = []
    for case in cases:
        fixed = {name: _in_child(peers[name], case, 1, arguments.threads) for name in OF_THE_MODEL if name in peers}
        for size in case.subject.sizes:
            rows.append(_row(case, size, peers, fixed, arguments.threads))
            print(_line(rows[-1]), flush=True)
    summary = {
        "cases": _summary([row for row in rows if not row["held_out"]], peers),
        "held out": _summary([row for row in rows if row["held_out"]], peers),
        "all": _summary(rows, peers),
    }
    _print_summary(summary)
    if arguments.out:
        document = {
            "benchmark": "memory.forecast",
            "machine": detect().to_json(),
            "versions": _versions(),
            "threads": arguments.threads,
            "targets": TARGETS,
            "summary": summary,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _on_cuda(cases: list[Case], arguments: argparse.Namespace) -> int:
    rows = forecast_cuda.measure(cases, _in_child, arguments.threads, arguments.side_by_side)
    made = forecast_cuda.document(rows, _versions(), _spread)
    forecast_cuda.print_summary(made["summary"])
    if arguments.out:
        arguments.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _cases() -> list[Case]:
    cases = [*library_cases(), *plain_cases()]
    try:
        from benchmarks.memory.cases_held_out import held_out_cases
        from benchmarks.memory.cases_hugging_face import hugging_face_cases

        cases += [*hugging_face_cases(), *held_out_cases()]
    except ImportError as error:
        print(f"without the cases that need transformers: {error}")
    return cases


def _compiled_cases() -> list[Case]:
    """The first fp32 and the first bf16 case of each model that compiles here, at its smaller size.

    The library's and the plain ones were there while the rules for compiled graphs were made; the others were not.
    """
    found: dict[tuple[str, str], Case] = {}
    seen = [replace(case, held_out=False) for case in (*library_cases(), *plain_cases())]
    names = {case.name for case in seen}
    for case in [*seen, *(replace(case, held_out=True) for case in _cases() if case.name not in names)]:
        if case.choices in ({}, BF16) and not any(word in case.name for word in NOT_COMPILED):
            subject = replace(case.subject, sizes=case.subject.sizes[:1])
            compiled = replace(case, subject=subject, choices={**case.choices, "compile": "default"})
            found.setdefault((case.subject.name, str(case.choices)), compiled)
    return list(found.values())


def _row(case: Case, size: int, peers: dict[str, Any], fixed: dict[str, Any], threads: int) -> dict[str, Any]:
    truth = _in_child(measured_peak_bytes, case, size, threads)
    ours = _in_child(_forecast, case, size, threads)
    said = {name: fixed.get(name) or _in_child(peer, case, size, threads) for name, peer in peers.items()}

    def error(value: Any) -> float | None:
        return value / truth - 1 if isinstance(value, int) and isinstance(truth, int) else None

    found = ours if isinstance(ours, dict) else {"failure": ours, "peak_bytes": None}
    return {
        "case": case.name,
        "held_out": case.held_out,
        "batch_size": size,
        "example_size": case.subject.sizes[0],
        "measured_bytes": truth,
        "forecast": found,
        "error": error(found["peak_bytes"]),
        "peers": said,
        "peer_errors": {name: error(value) for name, value in said.items()},
    }


def _forecast(case: Case, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.subject.make()
    optimizer = case.optimizer_of(model)
    example = case.subject.batch(case.subject.sizes[0])
    found = forecast(TrainStep(model, optimizer, case.subject.loss_fn, case.plan()), example, batch_size=size)
    return {name: value for name, value in found.to_json().items() if name not in ("largest", "line")}


def _in_child(function: Callable[[Case, int], Any], case: Case, size: int, threads: int) -> Any:
    """What it returns there, or the last line of its error."""
    context = multiprocessing.get_context("fork")  # imports are shared, everything else is clean
    queue = context.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(threads)
        warnings.simplefilter("ignore")
        try:
            queue.put(function(case, size))
        except Exception as error:
            queue.put(traceback.format_exception_only(error)[-1].strip()[:300])

    child = context.Process(target=work)
    with _STARTING:
        child.start()
    found = queue.get()
    child.join()
    return found


def _line(row: dict[str, Any]) -> str:
    found = row["forecast"]
    name = f"{row['case'][:50]:50} {row['batch_size']:5}"
    if row["error"] is None:
        return f"{name}  measured {row['measured_bytes']}, forecast {found.get('failure', found['peak_bytes'])}"
    peers = "  ".join("    none" if one is None else f"{one:+8.1%}" for one in row["peer_errors"].values())
    held = " held out" if row["held_out"] else ""
    measured = format_bytes(row["measured_bytes"])
    return f"{name} {measured:>9} {row['error']:+8.2%} {found['seconds']:5.2f} s | {peers}{held}"


def _summary(rows: list[dict[str, Any]], peers: dict[str, Any]) -> dict[str, Any]:
    """Of ours and of each peer: how many answered, and how wrong they were."""
    errors = {"flatout": [row["error"] for row in rows]}
    errors |= {name: [row["peer_errors"][name] for row in rows] for name in peers}
    made = {name: _spread(found) for name, found in errors.items()}
    seconds = [row["forecast"].get("seconds") for row in rows]
    made["flatout"]["longest_seconds"] = max((one for one in seconds if one is not None), default=None)
    fake = [row["forecast"].get("method") == "fake run" for row in rows]
    made["flatout"]["fake_runs"] = sum(fake)
    return made


def _spread(errors: list[float | None]) -> dict[str, Any]:
    found = [one for one in errors if one is not None]
    if not found:
        return {"rows": len(errors), "answered": 0}
    sizes = sorted(abs(one) for one in found)
    return {
        "rows": len(errors),
        "answered": len(found),
        "median_error": median(sizes),
        "p95_error": sizes[min(len(sizes) - 1, -(-95 * len(sizes) // 100) - 1)],
        "largest_error": sizes[-1],
        "more_than_2_percent_below": sum(one < -0.02 for one in found) / len(found),
    }


def _print_summary(summary: dict[str, Any]) -> None:
    for group, made in summary.items():
        print(f"\n{group}:")
        for name, one in made.items():
            if not one["answered"]:
                print(f"  {name:18} no answer in {one['rows']} rows")
                continue
            print(
                f"  {name:18} {one['answered']:3} of {one['rows']} answered, error: median {one['median_error']:7.2%}, "
                f"95th percentile {one['p95_error']:7.2%}, largest {one['largest_error']:7.2%}; "
                f"more than 2 % below: {one['more_than_2_percent_below']:.1%}"
            )
        if made["flatout"].get("longest_seconds"):
            print(f"  longest forecast {made['flatout']['longest_seconds']:.2f} s")
    print(f"targets: {TARGETS}")


def _versions() -> dict[str, str]:
    installed = {}
    for name in ("torch", "transformers", "accelerate", "deepspeed"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


if __name__ == "__main__":
    sys.exit(main())
