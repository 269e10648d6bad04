"""Is the gain that `flatout tune` states the one that a user gets?

    python -m benchmarks.gain [--budget 60] [--rounds 7] [--out results.json]

Ten scripts with steps of 0.2 ms to 1 s are tuned. Then each runs from outside, in turns: `python script` and `flatout
run script`, both as they are, and the script itself times its steps. The ratio of these times should lie inside the
interval that tune stated, in nine of ten; whole runs, start-up included, are told apart.
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

from flatout.machine.detect import detect
from flatout.plan import write_plan
from flatout.script.entry import Target
from flatout.statistics import Comparison, compare_paired, median
from flatout.tune.tune import TuneRequest, tune

SCRIPT = Path(__file__).with_name("training.py")
# kind, width, batch, steps of one run from outside: some seconds, as a machine's disturbances last about one
CASES = (
    ("mlp", 16, 16, 8000),
    ("mlp", 128, 64, 5000),
    ("mlp", 512, 128, 1500),
    ("mlp", 1024, 512, 150),
    ("cnn", 4, 8, 2000),
    ("cnn", 16, 32, 300),
    ("cnn", 32, 128, 40),
    ("gpt", 32, 8, 1000),
    ("gpt", 128, 16, 80),
    ("gpt", 256, 64, 9),
)
ENDLESS = 10**9


@dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    plain_step_seconds: float
    stated: Comparison | None
    """None: tune kept nothing, and claims nothing."""
    seen: Comparison | None
    whole_runs: Comparison | None
    kept: tuple[str, ...]

    @property
    def right(self) -> bool:
        """A ratio outside of tune's interval, its own interval included, is a wrong claim."""
        if self.stated is None or self.seen is None:
            return True
        return self.stated.low <= self.seen.ratio <= self.stated.high

    def line(self) -> str:
        if self.stated is None or self.seen is None or self.whole_runs is None:
            return f"{self.case:24} nothing kept"
        half = (self.stated.high - self.stated.low) / 2 / self.stated.ratio
        return (
            f"{self.case:24} {self.plain_step_seconds * 1e3:8.2f} ms  stated x{self.stated.ratio:.3f} "
            f"({self.stated.low:.3f}-{self.stated.high:.3f}, ±{half:.1%})  seen x{self.seen.ratio:.3f} "
            f"({self.seen.low:.3f}-{self.seen.high:.3f})  {'inside' if self.right else 'OUTSIDE'}  "
            f"whole runs x{self.whole_runs.ratio:.2f}  {', '.join(self.kept)}"
        )


def measured(kind: str, width: int, batch: int, steps: int, budget_seconds: float, rounds: int) -> Result:
    arguments = [kind, "--width", str(width), "--batch", str(batch)]
    case = " ".join(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        endless = (*arguments, "--steps", str(ENDLESS))
        request = TuneRequest(
            target=Target(path=str(SCRIPT), arguments=endless), budget_seconds=budget_seconds, total_steps=ENDLESS
        )
        result = tune(request, detect())
        if result.final is None or not result.plan.choices():
            return Result(
                case=case,
                plain_step_seconds=result.baseline_seconds or 0.0,
                stated=None,
                seen=None,
                whole_runs=None,
                kept=(),
            )
        write_plan(folder / "plan.toml", result.plan)
        pairs = [_one_round(folder, [*arguments, "--steps", str(steps)], turn) for turn in range(rounds)]
    return Result(
        case=case,
        plain_step_seconds=median([plain for (plain, _), _ in pairs]),
        stated=result.final.comparison,
        seen=compare_paired([plain[0] for plain, _ in pairs], [planned[0] for _, planned in pairs]),
        whole_runs=compare_paired([plain[1] for plain, _ in pairs], [planned[1] for _, planned in pairs]),
        kept=tuple(choice.label for choice in result.state.kept),
    )


def _one_round(folder: Path, arguments: list[str], turn: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """((step, whole run) plain, the same planned), in seconds; who goes first changes from round to round."""
    flatout = [sys.executable, "-m", "flatout", "run", "--quiet", "--no-report", "--plan", str(folder / "plan.toml")]
    commands = {"plain": [sys.executable], "planned": flatout}
    order = list(commands) if turn % 2 == 0 else list(commands)[::-1]
    found = {}
    for name in order:
        times = folder / f"{name}.json"
        began = time.perf_counter()
        command = [*commands[name], str(SCRIPT), *arguments, "--times", str(times)]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        found[name] = (json.loads(times.read_text())["step_seconds"], time.perf_counter() - began)
    return found["plain"], found["planned"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each tune")
    parser.add_argument("--rounds", type=int, default=7, help="from six on what is seen has an interval")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: list[Result] = []
    for kind, width, batch, steps in CASES:
        results.append(measured(kind, width, batch, steps, arguments.budget, arguments.rounds))
        print(results[-1].line(), flush=True)
        if arguments.out:
            _write(arguments.out, results, arguments.budget)
    claimed = [result for result in results if result.stated is not None]
    right = sum(result.right for result in claimed)
    print(f"{right} of {len(claimed)} gains as stated; {len(results) - len(claimed)} scripts without one")
    return 0


def _write(path: Path, results: list[Result], budget_seconds: float) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "budget_seconds": budget_seconds,
        "results": [{**asdict(result), "right": result.right} for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
