"""Is the gain that `flatout tune` states the one that a user gets?

    python -m benchmarks.gain [--budget 300] [--rounds 30] [--only "cnn 16"] [--out results.json]

Ten scripts with steps of 0.2 ms to 1 s are tuned. Then they are measured from outside: `python script` and `flatout
run script`, both as they are. The scripts write down when each of their steps ended. The two run at once, but only one
is let go on at a time (SIGSTOP, SIGCONT), for a fraction of a second, with its main thread on the same core as the
other's: what disturbs the machine disturbs both. The ratio of their steps should lie inside the interval that tune
stated, in nine of ten. It differs between pairs of processes itself: there are at least five of them, and more, up to
--rounds, until its own interval is half as wide as the stated one. Whole runs, start-up included, are timed apart, one
after the other. What --out holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import Command, in_turns
from flatout.machine.detect import detect
from flatout.plan import write_plan
from flatout.script.entry import Target
from flatout.statistics import Comparison, compare_paired, median
from flatout.tuning.last_comparison import comparison_of_groups
from flatout.tuning.results import Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script

SCRIPT = Path(__file__).with_name("training.py")
# kind, width, batch, steps of one run from outside: few seconds, as pairs of processes differ more than windows do
CASES = (
    ("mlp", 16, 16, 4000),
    ("mlp", 128, 64, 2500),
    ("mlp", 512, 128, 600),
    ("mlp", 1024, 512, 80),
    ("cnn", 4, 8, 1000),
    ("cnn", 16, 32, 200),
    ("cnn", 32, 128, 30),
    ("gpt", 32, 8, 200),
    ("gpt", 128, 16, 60),
    ("gpt", 256, 64, 15),
)
ENDLESS = 10**9
LEAST_TURN_SECONDS, STEPS_A_TURN = 0.15, 4
LEAST_ROUNDS = 5
WHOLE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    plain_step_seconds: float
    stated: Comparison | None
    """None: tune kept nothing, and claims nothing."""
    seen: Comparison | None
    whole_runs: Comparison | None
    kept: tuple[str, ...]
    budget_seconds: float
    tried: tuple[str, ...] = ()
    """What became of each lever, the proof and the last comparison, in words."""

    @property
    def right(self) -> bool:
        if self.stated is None or self.seen is None:
            return True
        return self.stated.low <= self.seen.ratio <= self.stated.high

    def line(self) -> str:
        if self.stated is None or self.seen is None or self.whole_runs is None:
            return f"{self.case:24} nothing kept"
        return (
            f"{self.case:24} {self.plain_step_seconds * 1e3:8.2f} ms  stated x{self.stated.ratio:.3f} "
            f"({self.stated.low:.3f}-{self.stated.high:.3f}, ±{_half(self.stated):.1%})  seen x{self.seen.ratio:.3f} "
            f"({self.seen.low:.3f}-{self.seen.high:.3f})  {'inside' if self.right else 'OUTSIDE'}  "
            f"whole runs x{self.whole_runs.ratio:.2f}  {', '.join(self.kept)}"
        )


def _half(found: Comparison) -> float:
    """Half of the interval, as a share of the ratio."""
    return (found.high - found.low) / 2 / found.ratio


def measured(kind: str, width: int, batch: int, steps: int, budget_seconds: float, rounds: int) -> Result:
    case = _case(kind, width, batch)
    arguments = case.split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        endless = (*arguments, "--steps", str(ENDLESS))
        request = TuneRequest(
            target=Target(path=str(SCRIPT), arguments=endless), budget_seconds=budget_seconds, total_steps=ENDLESS
        )
        result = tune_script(request, detect())
        if result.final is None or not result.plan.choices():
            return Result(
                case=case,
                plain_step_seconds=result.baseline_seconds or 0.0,
                stated=None,
                seen=None,
                whole_runs=None,
                kept=(),
                budget_seconds=budget_seconds,
                tried=_in_words(result),
            )
        write_plan(folder / "plan.toml", result.plan)
        turn_seconds = max(LEAST_TURN_SECONDS, STEPS_A_TURN * (result.baseline_seconds or 0.0))
        commands = _commands(folder, arguments).values()
        groups: list[list[tuple[float, float]]] = []
        wanted = _half(result.final.comparison) / 2
        while len(groups) < LEAST_ROUNDS or (
            len(groups) < rounds and _half(comparison_of_groups(groups, 0.01)) > wanted
        ):
            groups.append(in_turns(*commands, steps, turn_seconds))
        whole = [*arguments, "--steps", str(steps)]
        wholes = [_one_after_the_other(folder, whole, turn) for turn in range(WHOLE_ROUNDS)]
    return Result(
        case=case,
        plain_step_seconds=median([plain for group in groups for plain, _ in group]),
        stated=result.final.comparison,
        seen=comparison_of_groups(groups, 0.01),
        whole_runs=compare_paired([plain for plain, _ in wholes], [planned for _, planned in wholes]),
        kept=tuple(choice.label for choice in result.state.kept),
        budget_seconds=budget_seconds,
        tried=_in_words(result),
    )


def _in_words(result: Tuned) -> tuple[str, ...]:
    trials = [f"{trial.label}: {trial.outcome}, {trial.reason}" for trial in result.state.trials]
    skipped = [f"{entry.label}: not tried, {entry.reason}" for entry in result.state.not_tried]
    return (*trials, *skipped, *result.warnings)


def _commands(folder: Path, arguments: list[str]) -> dict[str, Command]:
    flatout = [sys.executable, "-m", "flatout", "run", "--quiet", "--no-report", "--plan", str(folder / "plan.toml")]
    starts = {"plain": [sys.executable], "planned": flatout}
    return {name: Command([*start, str(SCRIPT), *arguments], folder / f"{name}.json") for name, start in starts.items()}


def _one_after_the_other(folder: Path, arguments: list[str], turn: int) -> tuple[float, float]:
    """(plain, planned) whole runs in seconds; who goes first changes from turn to turn."""
    commands = _commands(folder, arguments)
    seconds = {}
    for name in list(commands)[:: 1 if turn % 2 == 0 else -1]:
        began = time.perf_counter()
        subprocess.run(commands[name].words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        seconds[name] = time.perf_counter() - began
    return seconds["plain"], seconds["planned"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of each tune")
    parser.add_argument("--rounds", type=int, default=30, help="most pairs of processes, timed from outside")
    parser.add_argument("--only", action="append", help="a kind and width; may be given several times")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = _results_in(arguments.out) if arguments.out and arguments.out.exists() else []
    known = {result.case for result in results}
    for kind, width, batch, steps in CASES:
        if _case(kind, width, batch) in known or (arguments.only and f"{kind} {width}" not in arguments.only):
            continue
        results.append(measured(kind, width, batch, steps, arguments.budget, arguments.rounds))
        print(results[-1].line(), flush=True)
        if arguments.out:
            _write(arguments.out, results)
    claimed = [result for result in results if result.stated is not None]
    right = sum(result.right for result in claimed)
    print(f"{right} of {len(claimed)} gains as stated; {len(results) - len(claimed)} scripts without one")
    return 0


def _case(kind: str, width: int, batch: int) -> str:
    return f"{kind} --width {width} --batch {batch}"


def _results_in(path: Path) -> list[Result]:
    def result(found: dict[str, Any]) -> Result:
        compared = {
            name: None if found[name] is None else Comparison(**found[name])
            for name in ("stated", "seen", "whole_runs")
        }
        return Result(
            case=found["case"],
            plain_step_seconds=found["plain_step_seconds"],
            kept=tuple(found["kept"]),
            budget_seconds=found["budget_seconds"],
            tried=tuple(found.get("tried", ())),
            **compared,
        )

    return [result(found) for found in json.loads(path.read_text())["results"]]


def _write(path: Path, results: list[Result]) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "results": [{**asdict(result), "right": result.right} for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
