"""How much do pairs of processes differ, and do intervals from a few of them hold the ratio of all?

    python -m benchmarks.gain.processes [--pairs 7] [--seconds 9] [--out results.json]

Five scripts run plain and under a fixed plan, in pairs of fresh processes with alternating windows, as in the last
comparison of `flatout tune`. From what was recorded, few pairs with short stretches of windows are drawn many times:
the share of draws whose interval holds the median of all pairs is the coverage. USUAL_DEVIATION in
flatout/tuning/last_comparison.py comes from here.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gain.__main__ import ENDLESS, SCRIPT
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_of_plan
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.script.trial.setup import TrialSetup
from flatout.statistics import compare_paired
from flatout.tuning.last_comparison import Pairs, PlainAndPlanned, comparison_of_groups
from flatout.tuning.windows import Pace, compare_arms

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits_mlp.py"
DRAWS = 300
STRETCHES_SECONDS, PAIRS_DRAWN = (2.0, 6.0), (1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    command: tuple[str, ...]
    plan: dict[str, Any]
    step_seconds: float


def training(kind: str, width: int, batch: int) -> tuple[str, ...]:
    return (str(SCRIPT), kind, "--width", str(width), "--batch", str(batch), "--steps", str(ENDLESS))


CASES = (
    Case(
        name="digits_mlp",
        command=(str(DIGITS), "--epochs", "100000"),
        plan={"optimizer": "fused", "fetch": "batched"},
        step_seconds=1e-3,
    ),
    Case(
        name="mlp 16",
        command=training("mlp", 16, 16),
        plan={"optimizer": "fused", "fetch": "batched"},
        step_seconds=4e-4,
    ),
    Case(name="mlp 512", command=training("mlp", 512, 128), plan={"optimizer": "fused"}, step_seconds=3e-3),
    Case(name="cnn 16", command=training("cnn", 16, 32), plan={"memory_format": "channels_last"}, step_seconds=0.02),
    Case(name="gpt 128", command=training("gpt", 128, 16), plan={"precision": "bf16"}, step_seconds=0.05),
)


def recorded(case: Case, pairs: int, seconds: float) -> list[Pairs]:
    """Window medians (plain, planned) in seconds, of each pair of processes."""
    pace = replace(
        Pace.for_step(case.step_seconds, seconds=seconds),
        most_pairs=10_000,
        stops_when_decided=False,
    )
    choices = choices_of_plan(case.plan, LEVERS)
    groups: list[Pairs] = [[] for _ in range(pairs)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        target = Target(path=case.command[0], arguments=case.command[1:])
        setup = TrialSetup(target=target, work_folder=Path(folder))
        for group in groups:
            with PlainAndPlanned(setup, choices).together() as (plain, planned):
                compare_arms(plain, planned, pace, collected=group)
    return groups


def ratio(group: Pairs) -> float:
    return compare_paired([plain for plain, _ in group], [planned for _, planned in group]).ratio


def coverage(groups: Sequence[Pairs], seconds: float, stretch_seconds: float, drawn: int) -> tuple[float, float]:
    """(share of draws whose interval holds the median of all pairs, median half-width as a share of the ratio)."""
    draw = random.Random(0)
    truth = statistics.median(ratio(group) for group in groups)
    held, halves = 0, []
    for _ in range(DRAWS):
        some: list[Pairs] = []
        for group in draw.sample(list(groups), drawn):
            length = max(6, math.ceil(len(group) * stretch_seconds / seconds))
            start = draw.randrange(max(1, len(group) - length + 1))
            some.append(group[start : start + length])
        found = comparison_of_groups(some, 0.01)
        held += found.low <= truth <= found.high
        halves.append((found.high - found.low) / 2 / found.ratio)
    return held / DRAWS, statistics.median(halves)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=9.0, help="windows of each pair of processes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for case in CASES:
        groups = recorded(case, arguments.pairs, arguments.seconds)
        logs = [math.log(ratio(group)) for group in groups]
        print(f"{case.name:12} ratios {' '.join(f'{math.exp(log):.3f}' for log in logs)}", flush=True)
        rows = []
        for drawn in PAIRS_DRAWN:
            for stretch_seconds in STRETCHES_SECONDS:
                held, half = coverage(groups, arguments.seconds, stretch_seconds, drawn)
                rows.append({"pairs": drawn, "seconds": stretch_seconds, "held": held, "half_width": half})
                print(
                    f"    {drawn} pairs of {stretch_seconds:.0f} s: held {held:.0%}, half-width {half:.1%}", flush=True
                )
        deviation = statistics.stdev(logs)
        print(f"    deviation {deviation:.1%}", flush=True)
        results.append(
            {"case": case.name, "deviation": deviation, "ratios": [math.exp(log) for log in logs], "rows": rows}
        )
    if arguments.out:
        machine = detect()
        document = {
            "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
            "seconds": arguments.seconds,
            "results": results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
