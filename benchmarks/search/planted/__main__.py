"""How often does a trial keep a lever that does nothing, and how often one that helps by a known share?

    python -m benchmarks.search.planted [--comparisons 100] [--gains 0 0.05 0.1 0.3] [--steps short middle long]
                                        [--beside N] [--out results.json]

A script wastes 0, 5, 10 or 30 % of its work, and a planted lever takes that off. Each is compared with the plain script
as the search does it: windows in turns in one process, until the verdict is clear. Its steps are short, middle or long:
about 1, 10 or 100 ms. `--beside`: so many processes that keep the machine busy meanwhile, for a noisy one. What --out
holds of other gains, steps and numbers of processes stays in it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.search.planted import LEVERS
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup
from flatout.statistics import median
from flatout.tuning.proposals import COMPARISON_SECONDS
from flatout.tuning.windows import Arm, Pace, compare_arms

SCRIPT = Path(__file__).with_name("train.py")
GAINS = (0.0, 0.05, 0.1, 0.3)
WIDTHS_AND_BATCHES = {"short": (256, 64), "middle": (1024, 256), "long": (2048, 1024)}
SETTLING_STEPS, SETTLING_SECONDS = 400, 5.0
COMPARISONS_A_PROCESS = 25
BUSY = "while True: sum(range(10000))"


@dataclass(frozen=True, kw_only=True)
class Result:
    gain: float
    steps: str
    """'short', 'middle' or 'long'."""
    beside: int
    """Processes that kept the machine busy."""
    step_seconds: float
    comparisons: int
    kept: int
    median_ratio: float
    median_pairs: float
    median_steps: float
    median_interval: float
    """Half of it, as a share of the ratio."""

    @property
    def key(self) -> tuple[float, str, int]:
        return self.gain, self.steps, self.beside

    @property
    def line(self) -> str:
        what = f"a gain of {self.gain:.0%}" if self.gain else "a lever that does nothing"
        return (
            f"steps of {self.step_seconds * 1e3:.2g} ms, {self.beside} busy processes: {what}: kept in {self.kept} of "
            f"{self.comparisons} comparisons (x{self.median_ratio:.3f} "
            f"±{self.median_interval:.1%}, {self.median_pairs:.0f} pairs of windows, {self.median_steps:.0f} steps)"
        )


def measured(gain: float, length: str, beside: int, comparisons: int) -> Result:
    choice, kept = Choice(LEVERS[0], True), 0
    ratios, pairs, steps, halves, taken = [], [], [], [], []
    left = comparisons
    while left:
        with _process(gain, length) as process:
            process.start()
            first = median(process.window([], settle=3, steps=5).seconds)
            settling = min(SETTLING_STEPS, int(SETTLING_SECONDS / first))
            taken.append(median(process.window([], settle=settling, steps=max(5, settling // 4)).seconds))
            pace = Pace.for_step(taken[-1], seconds=COMPARISON_SECONDS)
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
        steps=length,
        beside=beside,
        step_seconds=median(taken),
        comparisons=comparisons,
        kept=kept,
        median_ratio=median(ratios),
        median_pairs=median(pairs),
        median_steps=median(steps),
        median_interval=median(halves),
    )


@contextlib.contextmanager
def _process(gain: float, length: str) -> Iterator[TrialProcess]:
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder:
        width, batch = WIDTHS_AND_BATCHES[length]
        words = ("--wasted", str(gain), "--width", str(width), "--batch", str(batch))
        target = Target(path=str(SCRIPT), arguments=words)
        levers = f"{Path(__file__).with_name('__init__.py')}:LEVERS"
        with TrialProcess(TrialSetup(target=target, work_folder=Path(folder), levers=levers)) as process:
            yield process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=100, help="of each gain")
    parser.add_argument("--gains", type=float, nargs="+", default=GAINS)
    parser.add_argument("--steps", nargs="+", choices=list(WIDTHS_AND_BATCHES), default=["short"])
    parser.add_argument("--beside", type=int, default=0, help="processes that keep the machine busy")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["results"] if arguments.out and arguments.out.exists() else []
    results = {result.key: result for result in (Result(**one) for one in known)}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(arguments.beside)]
    try:
        for length, gain in itertools.product(arguments.steps, arguments.gains):
            result = measured(gain, length, arguments.beside, arguments.comparisons)
            results[result.key] = result
            print(result.line, flush=True)
            if arguments.out:
                _write(arguments.out, [results[key] for key in sorted(results)])
    finally:
        for process in busy:
            process.kill()
    return 0


def _write(path: Path, results: Sequence[Result]) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
