"""Does watching change anything? Plain and under `flatout run` in turns: output, exit code, files, seconds.

Each run works in a fresh copy of the checkout. The order alternates (plain first, then second), so that a machine that
warms up or slows down favours neither side.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.scripts.catalogue import PublicScript
from benchmarks.scripts.workspace import fresh_workspace
from flatout.statistics import Comparison, compare_paired

RUN_LIMIT_SECONDS = 900
MOST_OVERHEAD = 0.01  # of the whole run


@dataclass(frozen=True, kw_only=True)
class Run:
    """One whole run, reduced to what two runs are compared by."""

    exit_code: int | None
    stdout: str  # with the times blanked
    artifacts: Mapping[str, str | None]  # digest of each file; None: it was not written
    last_error: str
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """One script, plainly and watched, round after round."""

    name: str
    same_exit_code: bool
    exit_codes: tuple[int | None, ...]
    same_stdout: bool
    same_artifacts: bool
    first_difference: str | None
    repeatable: bool  # the plain runs among themselves: where they differ, nothing follows from the rest
    seeded_by_us: bool
    plain_seconds: tuple[float, ...]
    watched_seconds: tuple[float, ...]
    plain_cpu_seconds: tuple[float, ...]
    watched_cpu_seconds: tuple[float, ...]
    comparison: Comparison

    @property
    def overhead(self) -> float:
        """Seconds more, as a share of the plain run's."""
        return 1 / self.comparison.ratio - 1

    @property
    def overhead_interval(self) -> tuple[float, float]:
        return 1 / self.comparison.high - 1, 1 / self.comparison.low - 1

    @property
    def holds(self) -> bool:
        same = self.same_exit_code and self.same_stdout and self.same_artifacts
        return same and self.overhead <= MOST_OVERHEAD


def blank_times(stdout: str, patterns: Sequence[str], checkout: Path) -> str:
    """The output without what differs between any two runs: what the clock says, and where the copy lies."""
    for pattern in patterns:
        stdout = re.sub(pattern, "<time>", stdout)
    return stdout.replace(str(checkout), "<checkout>")


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def run_once(script: PublicScript, checkout: Path, command: Sequence[str]) -> Run:
    with fresh_workspace(script, checkout) as workspace:
        finished = workspace.run([*command, *script.argv], limit_seconds=RUN_LIMIT_SECONDS)
        return Run(
            exit_code=finished.exit_code,
            stdout=blank_times(finished.stdout, script.time_patterns, workspace.checkout),
            artifacts={name: digest(workspace.directory / name) for name in script.artifacts},
            last_error=finished.stderr.strip().rpartition("\n")[2],
            seconds=finished.seconds,
            cpu_seconds=finished.cpu_seconds,
        )


def first_difference(before: Run, after: Run) -> str | None:
    """In words, the first thing in which two runs differ."""
    if before.exit_code != after.exit_code:
        return f"exit code {before.exit_code} and {after.exit_code}: {after.last_error or before.last_error}"
    lines = zip_longest(before.stdout.splitlines(), after.stdout.splitlines())
    for number, (left, right) in enumerate(lines, start=1):
        if left != right:
            return f"line {number}: {left!r} and {right!r}"
    for name, value in before.artifacts.items():
        if value != after.artifacts[name]:
            return f"file {name}"
    return None


def take_turns(
    script: PublicScript, checkout: Path, watched_command: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> tuple[list[Run], list[Run]]:
    commands = {"plain": [sys.executable], "watched": list(watched_command)}
    runs: dict[str, list[Run]] = {"plain": [], "watched": []}
    for number in range(rounds):
        for kind in ("plain", "watched") if number % 2 == 0 else ("watched", "plain"):
            run = run_once(script, checkout, commands[kind])
            runs[kind].append(run)
            progress(f"{script.name}: round {number + 1} of {rounds}, {kind}, {run.seconds:.1f} s")
    return runs["plain"], runs["watched"]


def check_faithfulness(
    script: PublicScript, checkout: Path, flatout: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> Faithfulness:
    plain, watched = take_turns(script, checkout, [*flatout, "run"], rounds, progress)
    reference = plain[0]
    differences = [first_difference(reference, run) for run in watched]
    return Faithfulness(
        name=script.name,
        same_exit_code=all(run.exit_code == reference.exit_code for run in watched),
        exit_codes=tuple(run.exit_code for run in (reference, *watched)),
        same_stdout=all(run.stdout == reference.stdout for run in watched),
        same_artifacts=all(run.artifacts == reference.artifacts for run in watched),
        first_difference=next((difference for difference in differences if difference), None),
        repeatable=all(first_difference(reference, run) is None for run in plain),
        seeded_by_us=not script.seeded,
        plain_seconds=tuple(run.seconds for run in plain),
        watched_seconds=tuple(run.seconds for run in watched),
        plain_cpu_seconds=tuple(run.cpu_seconds for run in plain),
        watched_cpu_seconds=tuple(run.cpu_seconds for run in watched),
        comparison=compare_paired([run.seconds for run in plain], [run.seconds for run in watched]),
    )


def describe(result: Faithfulness) -> str:
    """One line for a terminal."""
    low, high = result.overhead_interval
    same = ", ".join(
        f"{what} {'same' if is_same else 'DIFFERENT'}"
        for what, is_same in (
            ("stdout", result.same_stdout),
            ("exit code", result.same_exit_code),
            ("files", result.same_artifacts),
        )
    )
    lines = [f"{result.name:22} {same}; overhead {result.overhead:+.2%} ({low:+.2%} to {high:+.2%})"]
    if result.first_difference:
        lines.append(f"{'':22} {result.first_difference}")
    if not result.repeatable:
        lines.append(f"{'':22} the plain runs differ among themselves")
    return "\n".join(lines)
