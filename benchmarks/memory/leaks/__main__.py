"""`python -m benchmarks.memory.leaks --out FILE`: does `flatout memory` find each planted leak, and only those?

Every script of `leaking/` holds tensors or graphs from step to step, at the line that is marked `# leak`; that line
must be named. The scripts of `clean/` look suspicious and hold nothing; none may be accused.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCHEMA = "flatout-memory-leaks-1"
MARK = re.compile(r"# leak\b")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One script."""

    name: str
    marked_line: int | None
    """None: there is no leak."""
    named_lines: tuple[int, ...]
    holders: tuple[str, ...]
    bytes_per_step: float
    bounded: tuple[str, ...]
    """What was seen to grow and judged to be bounded."""
    seconds: float
    error: str = ""

    @property
    def right(self) -> bool:
        wanted = () if self.marked_line is None else (self.marked_line,)
        return not self.error and self.named_lines == wanted


def scripts() -> list[Path]:
    return [*sorted((HERE / "leaking").glob("*.py")), *sorted((HERE / "clean").glob("*.py"))]


def marked_line(script: Path) -> int | None:
    lines = [number for number, text in enumerate(script.read_text().splitlines(), 1) if MARK.search(text)]
    return lines[0] if lines else None


def ask(script: Path, steps: int) -> Outcome:
    began = time.perf_counter()
    command = [sys.executable, "-m", "flatout", "memory", "--json", "--steps", str(steps), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        return _outcome(script, [], [], seconds, done.stderr.strip()[-500:] or f"exit code {done.returncode}")
    found = json.loads(done.stdout)["leaks"]
    error = "" if found["verdict"] != "unknown" else "no verdict"
    return _outcome(script, found["leaks"], found["bounded"], seconds, error)


def _outcome(script: Path, leaks: list[Any], bounded: list[Any], seconds: float, error: str) -> Outcome:
    places = [leak["line"].rpartition(":") for leak in leaks]
    return Outcome(
        name=f"{script.parent.name}/{script.stem}",
        marked_line=marked_line(script),
        named_lines=tuple(int(line or 0) if Path(file).name == script.name else 0 for file, _, line in places),
        holders=tuple(leak["holder"] for leak in leaks),
        bytes_per_step=sum(leak["bytes_per_step"] for leak in leaks),
        bounded=tuple(leak["holder"] for leak in bounded),
        seconds=seconds,
        error=error,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: all leaks found at their lines and none invented; 1: not so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.leaks", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="such as leaking/closure")
    parser.add_argument("--steps", type=int, default=8, help="steps to watch (default: %(default)s)")
    arguments = parser.parse_args(words)
    outcomes = []
    for script in scripts():
        if arguments.only and f"{script.parent.name}/{script.stem}" not in arguments.only:
            continue
        outcome = ask(script, arguments.steps)
        outcomes.append(outcome)
        lines = ", ".join(f"{holder} at line {line}" for holder, line in _pairs(outcome)) or "nothing"
        word = "right" if outcome.right else "WRONG"
        print(f"{word}  {outcome.name:28} {lines} (marked: {outcome.marked_line}) {outcome.error}", flush=True)
    leaking = [one for one in outcomes if one.marked_line is not None]
    clean = [one for one in outcomes if one.marked_line is None]
    found, quiet = sum(one.right for one in leaking), sum(one.right for one in clean)
    print(
        f"leaks found at their lines: {found} of {len(leaking)}; no finding in clean scripts: {quiet} of {len(clean)}"
    )
    if arguments.out is not None:
        _save(arguments.out, outcomes, {"found": found, "leaking": len(leaking), "quiet": quiet, "clean": len(clean)})
    return 0 if all(one.right for one in outcomes) else 1


def _pairs(outcome: Outcome) -> list[tuple[str, int]]:
    return list(zip(outcome.holders, outcome.named_lines, strict=True))


def _save(path: Path, outcomes: Sequence[Outcome], counts: dict[str, int]) -> None:
    from flatout.machine.detect import detect

    entries = [{**asdict(one), "right": one.right} for one in outcomes]
    document = {"schema": SCHEMA, "machine": detect().to_json(), **counts, "scripts": entries}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
