"""`python -m benchmarks.watch.processes`: what `flatout run` without a plan costs whole processes.

`python loop.py` and `flatout run loop.py` train side by side on one core and take turns, a window of steps each, so
that the machine's moods fall on both alike. Malloc keeps what is freed on both sides: otherwise chance decides how
often it gives memory back and faults it in again, which is worth up to a quarter of a step. Processes still differ by
more than their windows do, so there are several pairs; `--same` compares plain ones.
Time is that of the main thread on its processor, which a neighbour's work does not add to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flatout.machine.detect import detect
from flatout.statistics import Comparison, compare_paired, median

LOOP = Path(__file__).with_name("loop.py")
KINDS = ("tiny", "small", "mlp", "deep")
LEAST_PAIRS = 6
KEPT_BY_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
WINDOWS, WARM_WINDOWS, WINDOW_SECONDS = 60, 12, 0.1
FLATOUT = ("-m", "flatout", "run", "--no-plan", "--quiet", "--no-report")


def one_pair(kind: str, steps: int, second: Sequence[str], turn: int) -> tuple[float, float]:
    """Median seconds of a step in a plain process, and that times the median ratio of windows that follow each other,
    one in the plain process and one in `python SECOND loop.py`."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[turn // 2 % len(cores)]
    plain_reads, second_writes = os.pipe()
    second_reads, plain_writes = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        out = [str(Path(folder, name)) for name in ("plain", "second")]
        processes = [
            subprocess.Popen(
                [sys.executable, *words, str(LOOP), kind, str(WINDOWS), str(steps), str(reads), str(writes), name],
                pass_fds=(reads, writes),
                env={**os.environ, **KEPT_BY_MALLOC},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            for words, reads, writes, name in (
                ((), plain_reads, plain_writes, out[0]),
                (second, second_reads, second_writes, out[1]),
            )
        ]
        os.write(plain_writes if turn % 2 else second_writes, b".")
        codes = [process.wait() for process in processes]
        for end in (plain_reads, plain_writes, second_reads, second_writes):
            os.close(end)
        if any(codes):
            raise SystemExit(f"a process ended with {codes}")
        plain, other = (json.loads(Path(name).read_text())[WARM_WINDOWS:] for name in out)
    usual = median(plain)
    return usual, usual * median([theirs / ours for ours, theirs in zip(plain, other, strict=True)])


def compared(kind: str, pairs: int, second: Sequence[str]) -> tuple[list[float], list[float], Comparison]:
    step, _ = one_pair(kind, 50, (), 0)
    steps = max(4, int(WINDOW_SECONDS / step))
    found = [one_pair(kind, steps, second, turn) for turn in range(pairs)]
    plain, other = [one for one, _ in found], [one for _, one in found]
    return plain, other, compare_paired(plain, other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--same", action="store_true", help="compare plain processes with plain ones")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args()
    if arguments.pairs < LEAST_PAIRS:
        parser.error(f"--pairs {arguments.pairs}: from {LEAST_PAIRS} on there is an interval")
    results = []
    for kind in arguments.kinds:
        plain, other, found = compared(kind, arguments.pairs, () if arguments.same else FLATOUT)
        results.append({"loop": kind, "plain": plain, "second": other, "comparison": asdict(found)})
        print(
            f"{kind:6} step {median(plain) * 1e6:8.1f} µs, {1 / found.ratio - 1:+.2%} "
            f"({1 / found.high - 1:+.2%} to {1 / found.low - 1:+.2%}), {arguments.pairs} pairs of processes",
            flush=True,
        )
    if arguments.out:
        document = {"benchmark": "watch.processes", "machine": detect().to_json(), "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
