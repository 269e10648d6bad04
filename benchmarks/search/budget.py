"""`python -m benchmarks.search.budget`: does `flatout tune --budget` keep to its budget?

Whole processes of `flatout tune` are timed from outside, with budgets from too short to comfortable. A run keeps to its
budget if it exceeds that by at most a tenth, or by one step and one start of the script; where it does not, its output
has to say what took the time. A budget that is too short for a script ends with exit code 1 and an error that says so.
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

ROOT = Path(__file__).resolve().parents[2]
TRAINING = (str(ROOT / "benchmarks" / "gain" / "training.py"), "--steps", "1000000000")
SCRIPTS = {
    "digits_mlp": (str(ROOT / "examples" / "digits_mlp.py"), "--epochs", "100000"),
    "digits_cnn": (str(ROOT / "examples" / "digits_cnn.py"), "--epochs", "100000"),
    "mlp 512": (*TRAINING, "mlp", "--width", "512", "--batch", "128"),
    "gpt 128": (*TRAINING, "gpt", "--width", "128", "--batch", "16"),
    "gpt 256": (*TRAINING, "gpt", "--width", "256", "--batch", "64"),
}
BUDGETS_SECONDS = (10.0, 20.0, 30.0, 60.0)
EXPLANATION = "was exceeded by"


@dataclass(frozen=True, kw_only=True)
class Run:
    script: str
    budget_seconds: float
    seconds: float
    """Of the whole process, its own start included."""
    one_start_seconds: float
    """Of the plain script and one step, measured beside it."""
    code: int
    explained: bool

    @property
    def keeps(self) -> bool:
        excess = self.seconds - self.budget_seconds
        return excess <= max(0.1 * self.budget_seconds, self.one_start_seconds)

    def line(self) -> str:
        kept = "kept" if self.keeps else "explained" if self.explained else "NOT EXPLAINED"
        return (
            f"{self.script:12} {self.budget_seconds:4.0f} s: {self.seconds:6.1f} s  "
            f"(one start {self.one_start_seconds:.1f} s)  exit {self.code}  {kept}"
        )


def one_start_seconds(command: tuple[str, ...]) -> float:
    """As long as a run of one step, or of one epoch, where it has no option for steps."""
    short = [*command[:1], *("1" if word in ("1000000000", "100000") else word for word in command[1:])]
    began = time.perf_counter()
    subprocess.run([sys.executable, *short], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began


def timed(name: str, budget_seconds: float) -> Run:
    command = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        tune = [sys.executable, "-m", "flatout", "tune", "--budget", str(budget_seconds), *command]
        began = time.perf_counter()
        done = subprocess.run(tune, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
    return Run(
        script=name,
        budget_seconds=budget_seconds,
        seconds=seconds,
        one_start_seconds=one_start_seconds(command),
        code=done.returncode,
        explained=EXPLANATION in " ".join((done.stdout + done.stderr).split()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs: list[Run] = []
    for budget_seconds in BUDGETS_SECONDS:
        for name in SCRIPTS:
            runs.append(timed(name, budget_seconds))
            print(runs[-1].line(), flush=True)
            if arguments.out:
                _write(arguments.out, runs)
    kept = sum(run.keeps for run in runs)
    explained = sum(run.explained for run in runs if not run.keeps)
    print(f"{kept} of {len(runs)} kept to their budget; of the others {explained} said what took the time")
    return 0


def _write(path: Path, runs: list[Run]) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "runs": [{**asdict(run), "keeps": run.keeps} for run in runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
