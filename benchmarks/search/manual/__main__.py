"""Each lever against the same optimization written by hand.

    python -m benchmarks.search.manual [--only loader ...] [--rounds 5] [--out results.json]

Each script in this folder trains unoptimized, or optimized by hand with `--by-hand`. `python script --by-hand` is timed
against `flatout run script` with a plan of the same levers, and against `python script`, in pairs of processes that
take turns. A plan should reach 95 % of the manual speedup. Results already in --out are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import Command, in_turns
from flatout.machine.detect import detect
from flatout.plan import Plan, write_plan
from flatout.statistics import Comparison, median
from flatout.tuning.last_comparison import comparison_of_groups

HERE = Path(__file__).parent
WANTED_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    plan: dict[str, Any]
    steps: int
    """Of one run: some seconds."""


CASES = (
    Case(name="loader", plan={"fetch": "batched", "optimizer": "fused"}, steps=6000),
    Case(name="optimizer", plan={"optimizer": "fused"}, steps=800),
    Case(name="autocast", plan={"precision": "bf16"}, steps=100),
    Case(name="layout", plan={"memory_format": "channels_last"}, steps=100),
    Case(name="attention", plan={"attention": "fused"}, steps=120),
    Case(name="compile", plan={"compile": "default"}, steps=250),
    Case(name="loss", plan={"loss": "chunked"}, steps=100),
    Case(name="threads", plan={"threads": 1}, steps=1500),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    by_hand_step_seconds: float
    by_hand: Comparison
    """Plain over by hand: above 1, the change is worth making."""
    plan: Comparison
    """By hand over the plan: above 1, the plan is faster than the change by hand."""

    @property
    def line(self) -> str:
        verdict = "as good" if self.plan.ratio >= WANTED_SHARE else "BEHIND"
        return (
            f"{self.case:10} {self.by_hand_step_seconds * 1e3:8.3f} ms by hand, x{self.by_hand.ratio:.2f} speedup; "
            f"the plan reaches {self.plan.ratio:.1%} of that ({self.plan.low:.1%} to {self.plan.high:.1%})  {verdict}"
        )


def measured(case: Case, rounds: int, turn_seconds: float) -> Result:
    machine = detect()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = Plan(**case.plan, machine_fingerprint=machine.fingerprint, torch_version=machine.versions.torch)
        write_plan(folder / "plan.toml", plan)
        script = str(HERE / f"{case.name}.py")
        report = folder / "report.json"
        options = ["--quiet", "--report", str(report), "--plan", str(folder / "plan.toml")]
        runs = [sys.executable, "-m", "flatout", "run", *options]
        plain = Command([sys.executable, script], folder / "plain.json")
        by_hand = Command([sys.executable, script, "--by-hand"], folder / "by_hand.json")
        planned = Command([*runs, script], folder / "planned.json")
        gained = [in_turns(plain, by_hand, case.steps, turn_seconds) for _ in range(rounds)]
        reached = [in_turns(by_hand, planned, case.steps, turn_seconds) for _ in range(rounds)]
        ran = json.loads(report.read_text())
        if ran["plan_notes"] or len(ran["applied"]) != len(case.plan):
            raise RuntimeError(f"{case.name}: {ran['applied']} of {case.plan} was applied: {ran['plan_notes']}")
    return Result(
        case=case.name,
        by_hand_step_seconds=median([mine for group in reached for mine, _ in group]),
        by_hand=comparison_of_groups(gained, 0.01),
        plan=comparison_of_groups(reached, 0.01),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a turn")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = _results_in(arguments.out) if arguments.out and arguments.out.exists() else []
    known = {result.case for result in results}
    for case in CASES:
        if case.name in known or (arguments.only and case.name not in arguments.only):
            continue
        results.append(measured(case, arguments.rounds, arguments.turn))
        print(results[-1].line, flush=True)
        if arguments.out:
            _write(arguments.out, results)
    good = sum(result.plan.ratio >= WANTED_SHARE for result in results)
    print(f"{good} of {len(results)} reach {WANTED_SHARE:.0%} of the manual speedup")
    return 0


def _results_in(path: Path) -> list[Result]:
    found = json.loads(path.read_text())["results"]
    return [
        Result(**{**one, "by_hand": Comparison(**one["by_hand"]), "plan": Comparison(**one["plan"])}) for one in found
    ]


def _write(path: Path, results: list[Result]) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
