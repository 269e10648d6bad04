"""How often does a trial keep a lever that does nothing, and how often one that helps by a known share?

    python -m benchmarks.search.planted [--comparisons 100] [--gains 0 0.05 0.1 0.3] [--beside N] [--out results.json]

A script wastes 0, 5, 10 or 30 % of its work, and a planted lever takes that off. Each is compared with the plain script
as the search does it: windows in turns in one process, until the verdict is clear. `--beside`: so many processes that
keep the machine busy meanwhile, for a noisy one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.search.planted import LEVERS
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess, TrialSetup
from flatout.statistics import median
from flatout.tuning.windows import Arm, Pace, compare_arms
from flatout.tuning.worth_trying import COMPARISON_SECONDS

SCRIPT = Path(__file__).with_name("train.py")
GAINS = (0.0, 0.05, 0.1, 0.3)
SETTLING_STEPS = 400
COMPARISONS_A_PROCESS = 25
BUSY = "while True: sum(range(10000))"


@dataclass(frozen=True, kw_only=True)
class Result:
    gain: float
    comparisons: int
    kept: int
    median_ratio: float
    median_pairs: float
    median_steps: float
    median_interval: float
    """Half of it, as a share of the ratio."""

    @property
    def line(self) -> str:
        what = f"a gain of {self.gain:.0%}" if self.gain else "a lever that does nothing"
        return (
            f"{what}: kept in {self.kept} of {self.comparisons} comparisons (x{self.median_ratio:.3f} "
            f"±{self.median_interval:.1%}, {self.median_pairs:.0f} pairs of windows, {self.median_steps:.0f} steps)"
        )


def measured(gain: float, comparisons: int) -> Result:
    choice, kept = Choice(LEVERS[0], True), 0
    ratios, pairs, steps, halves = [], [], [], []
    left = comparisons
    while left:
        with _process(gain) as process:
            process.start()
            process.window([], settle=SETTLING_STEPS, steps=50)
            pace = Pace.for_step(median(process.window([], settle=2, steps=100).seconds), seconds=COMPARISON_SECONDS)
            for _ in range(min(left, COMPARISONS_A_PROCESS)):
                found = compare_arms(Arm(process), Arm(process, [choice]), pace, choice)
                compared = found.comparison
                kept += compared.verdict == "faster"
                ratios.append(compared.ratio)
                pairs.append(len(found.baseline_medians))
                steps.append(2 * len(found.baseline_medians) * pace.pair_steps)
                if compared.has_interval and math.isfinite(compared.high):
                    halves.append((compared.high - compared.low) / 2 / compared.ratio)
                left -= 1
    return Result(
        gain=gain,
        comparisons=comparisons,
        kept=kept,
        median_ratio=median(ratios),
        median_pairs=median(pairs),
        median_steps=median(steps),
        median_interval=median(halves),
    )


@contextlib.contextmanager
def _process(gain: float) -> Iterator[TrialProcess]:
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder:
        target = Target(path=str(SCRIPT), arguments=("--wasted", str(gain)))
        levers = f"{Path(__file__).with_name('__init__.py')}:LEVERS"
        with TrialProcess(TrialSetup(target=target, work_folder=Path(folder), levers=levers)) as process:
            yield process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=100, help="of each gain")
    parser.add_argument("--gains", type=float, nargs="+", default=GAINS, help="those that --out has besides stay in it")
    parser.add_argument("--beside", type=int, default=0, help="processes that keep the machine busy")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["results"] if arguments.out and arguments.out.exists() else []
    results = [Result(**one) for one in known if one["gain"] not in arguments.gains]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(arguments.beside)]
    try:
        for gain in arguments.gains:
            results.append(measured(gain, arguments.comparisons))
            print(results[-1].line, flush=True)
    finally:
        for process in busy:
            process.kill()
    if arguments.out:
        machine = detect()
        document = {
            "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
            "beside": arguments.beside,
            "results": [asdict(result) for result in sorted(results, key=lambda one: one.gain)],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
