"""Is a lever as good as the same change made by hand?

    python -m benchmarks.search.twins [--only loader ...] [--rounds 5] [--out results.json]

Each script beside this file trains as it stands, or with `--by-hand` with the lines that a person would change. Plain
`python script --by-hand` runs beside `flatout run script` under a plan of the same levers, and beside plain `python
script`, in pairs of processes that take turns. The plan should reach 95 % of the gain made by hand. What --out holds
already is not measured again.
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
class Twin:
    name: str
    plan: dict[str, Any]
    steps: int
    """Of one run: some seconds."""


TWINS = (
    Twin(name="loader", plan={"fetch": "batched", "optimizer": "fused"}, steps=6000),
    Twin(name="optimizer", plan={"optimizer": "fused"}, steps=800),
    Twin(name="autocast", plan={"precision": "bf16"}, steps=100),
    Twin(name="layout", plan={"memory_format": "channels_last"}, steps=100),
    Twin(name="attention", plan={"attention": "fused"}, steps=120),
    Twin(name="compile", plan={"compile": "default"}, steps=250),
    Twin(name="loss", plan={"loss": "chunked"}, steps=100),
    Twin(name="threads", plan={"threads": 1}, steps=1500),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    twin: str
    by_hand_step_seconds: float
    by_hand: Comparison
    """Plain over by hand: above 1, the change is worth making."""
    plan: Comparison
    """By hand over the plan: above 1, the plan is faster than the change by hand."""

    @property
    def line(self) -> str:
        verdict = "as good" if self.plan.ratio >= WANTED_SHARE else "BEHIND"
        return (
            f"{self.twin:10} {self.by_hand_step_seconds * 1e3:8.3f} ms by hand, x{self.by_hand.ratio:.2f} of plain; "
            f"the plan's gain is {self.plan.ratio:.1%} of that ({self.plan.low:.1%} to {self.plan.high:.1%})  {verdict}"
        )


def measured(twin: Twin, rounds: int, turn_seconds: float) -> Result:
    machine = detect()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = Plan(**twin.plan, machine_fingerprint=machine.fingerprint, torch_version=machine.versions.torch)
        write_plan(folder / "plan.toml", plan)
        script = str(HERE / f"{twin.name}.py")
        report = folder / "report.json"
        options = ["--quiet", "--report", str(report), "--plan", str(folder / "plan.toml")]
        runs = [sys.executable, "-m", "flatout", "run", *options]
        plain = Command([sys.executable, script], folder / "plain.json")
        by_hand = Command([sys.executable, script, "--by-hand"], folder / "by_hand.json")
        planned = Command([*runs, script], folder / "planned.json")
        gained = [in_turns(plain, by_hand, twin.steps, turn_seconds) for _ in range(rounds)]
        reached = [in_turns(by_hand, planned, twin.steps, turn_seconds) for _ in range(rounds)]
        ran = json.loads(report.read_text())
        if ran["plan_notes"] or len(ran["applied"]) != len(twin.plan):
            raise RuntimeError(f"{twin.name}: {ran['applied']} of {twin.plan} was applied: {ran['plan_notes']}")
    return Result(
        twin=twin.name,
        by_hand_step_seconds=median([mine for group in reached for mine, _ in group]),
        by_hand=comparison_of_groups(gained, 0.01),
        plan=comparison_of_groups(reached, 0.01),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[twin.name for twin in TWINS])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a turn")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = _results_in(arguments.out) if arguments.out and arguments.out.exists() else []
    known = {result.twin for result in results}
    for twin in TWINS:
        if twin.name in known or (arguments.only and twin.name not in arguments.only):
            continue
        results.append(measured(twin, arguments.rounds, arguments.turn))
        print(results[-1].line, flush=True)
        if arguments.out:
            _write(arguments.out, results)
    good = sum(result.plan.ratio >= WANTED_SHARE for result in results)
    print(f"{good} of {len(results)} reach {WANTED_SHARE:.0%} of the gain by hand")
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
