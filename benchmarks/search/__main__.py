"""`python -m benchmarks.search`: the search's result beside the best of all combinations of its levers.

For each workload every subset of the live levers is timed against the plain script (interleaved windows, one process),
then the search runs over the same levers, then its result and the exhaustive best are timed against each other in one
process. Both costs are wall seconds, the script's start included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.machine.description import Machine
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess, TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.search import TrainingSearch
from flatout.tuning.windows import Arm, Pace, compare_arms

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIELDS = ("fetch", "allocator", "threads", "optimizer", "memory_format", "precision", "compile")
"""Live levers whose subsets are tried. At seven binary choices a workload has up to 128 combinations."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    command: tuple[str, ...]
    fields: tuple[str, ...] = FIELDS


WORKLOADS = (
    Workload(name="digits_mlp", command=(str(EXAMPLES / "digits_mlp.py"), "--epochs", "100000")),
    # Without torch.compile: compiling 64 of 127 combinations takes a quarter of an hour.
    Workload(name="digits_cnn", command=(str(EXAMPLES / "digits_cnn.py"), "--epochs", "100000"), fields=FIELDS[:-1]),
    Workload(name="classic_loop", command=(str(EXAMPLES / "classic_loop.py"), "--epochs", "100000")),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    workload: str
    combinations: int
    exhaustive_seconds: float
    search_seconds: float
    exhaustive_best: list[str]
    exhaustive_ratio: float
    search_kept: list[str]
    search_against_best: float
    """Step time of the exhaustive best over that of the search's result: 0.97 means the search's is 3 % slower."""
    interval: tuple[float, float]

    @property
    def cost_share(self) -> float:
        return self.search_seconds / self.exhaustive_seconds


def offered(process: TrialProcess, machine: Machine, fields: Sequence[str]) -> list[Choice]:
    """The first value of each live lever that applies to this loop."""
    process.window([], settle=3, steps=3)
    observed = process.breakdown([], steps=20)
    process.expected_step_seconds = observed.step_seconds
    found: list[Choice] = []
    for lever in LEVERS:
        verdict = lever.applies(machine, observed)
        if lever.plan_field in fields and lever.switch == "live" and verdict:
            found.append(Choice(lever, verdict.values[0]))
    return found


def exhaustive(
    setup: TrialSetup, machine: Machine, fields: Sequence[str]
) -> tuple[list[Choice], float, int, float, list[Choice]]:
    """(best subset, its ratio, how many subsets, seconds, the levers)."""
    began = time.perf_counter()
    with TrialProcess(setup) as process:
        process.start()
        choices = offered(process, machine, fields)
        subsets = [list(c) for size in range(1, len(choices) + 1) for c in itertools.combinations(choices, size)]
        pace = Pace.for_step(process.expected_step_seconds or 0.01, seconds=5.0)
        best: tuple[float, list[Choice]] = (1.0, [])
        for number, subset in enumerate(subsets, start=1):
            if sys.stderr.isatty():
                print(f"\r{number} of {len(subsets)}", end="", file=sys.stderr)
            ratio = compare_arms(Arm(process), Arm(process, subset), pace).comparison.ratio
            best = max(best, (ratio, subset), key=lambda entry: entry[0])
        return best[1], best[0], len(subsets), time.perf_counter() - began, choices


def run(workload: Workload, machine: Machine) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder:
        setup = TrialSetup(target=Target.from_command(workload.command), work_folder=Path(folder))
        best, ratio, count, seconds, choices = exhaustive(setup, machine, workload.fields)
        began = time.perf_counter()
        only = tuple((choice.field, choice.value) for choice in choices)
        state = TrainingSearch(setup, machine, LEVERS, SearchLimits(deadline=Deadline(600), only=only)).run()
        search_seconds = time.perf_counter() - began
        against, interval = against_best(setup, best, state.kept)
    return Outcome(
        workload=workload.name,
        combinations=count,
        exhaustive_seconds=seconds,
        search_seconds=search_seconds,
        exhaustive_best=[choice.label for choice in best],
        exhaustive_ratio=ratio,
        search_kept=[choice.label for choice in state.kept],
        search_against_best=against,
        interval=interval,
    )


def against_best(
    setup: TrialSetup, best: Sequence[Choice], kept: Sequence[Choice]
) -> tuple[float, tuple[float, float]]:
    if list(best) == list(kept):
        return 1.0, (1.0, 1.0)
    with TrialProcess(setup) as process:
        process.start()
        process.window([], settle=3, steps=3)
        pace = Pace(
            steps=40, settle=3, warm_steps=5, least_pairs=15, most_pairs=25, seconds=30, stops_when_decided=False
        )
        found = compare_arms(Arm(process, best), Arm(process, kept), pace).comparison
    return found.ratio, (found.low, found.high)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    machine = machine_with_ceilings(lambda text: None)
    outcomes = []
    for workload in WORKLOADS:
        if arguments.only and workload.name not in arguments.only:
            continue
        outcome = run(workload, machine)
        outcomes.append(outcome)
        print(
            f"{outcome.workload:14} best of {outcome.combinations} x{outcome.exhaustive_ratio:.2f} "
            f"({', '.join(outcome.exhaustive_best)}) in {outcome.exhaustive_seconds:.0f} s; "
            f"search kept {', '.join(outcome.search_kept)} in {outcome.search_seconds:.0f} s "
            f"({outcome.cost_share:.0%} of the cost), at {outcome.search_against_best:.3f} of the best "
            f"({outcome.interval[0]:.3f} to {outcome.interval[1]:.3f})",
            flush=True,
        )
    if arguments.out:
        document: dict[str, Any] = {
            "benchmark": "search",
            "machine": machine.to_json(),
            "outcomes": [{**asdict(outcome), "cost_share": outcome.cost_share} for outcome in outcomes],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
