"""`python -m benchmarks.scripts.alike`: is a script under `flatout run` the same program as under Python alone?

Public scripts, odd scripts written for this (`odd/`), and scripts that leave the loop to a framework (`frameworks/`).
Each runs once by Python and once by `flatout run` without a plan; compared are the exit status as a shell sees it,
stdout and stderr, and every file that was written, byte for byte. Where they differ, Python runs the script again: what
differs between two plain runs says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from benchmarks.scripts.__main__ import what_is_missing
from benchmarks.scripts.catalogue import PUBLIC_SCRIPTS, PublicScript
from benchmarks.scripts.faithfulness import RUN_LIMIT_SECONDS, blank_times, digest
from benchmarks.scripts.workspace import PROJECT, find_checkout, fresh_workspace, split_command
from flatout.machine.detect import detect

SCHEMA = "flatout-scripts-alike-1"
HERE = Path(__file__).resolve().parent
STDIN = "one line\nand another, without an end"
TIMES_OF_TRAINER = r"""(['"])\w+_(?:runtime|per_second)\1: '?[\d.]+'?"""
"""How long an evaluation took, in a line and in a file of transformers' own."""
FRAMEWORK_PACKAGES = {
    "accelerate_loop": ("accelerate",),
    "command_lines": ("absl", "fire"),
    "geometric_graphs": ("torch_geometric",),
    "gpytorch_exact": ("gpytorch",),
    "hf_trainer": ("transformers", "accelerate"),
    "hydra_main": ("hydra",),
    "ignite_trainer": ("ignite",),
    "lightning_fit": ("pytorch_lightning",),
    "opacus_private": ("opacus",),
    "optuna_study": ("optuna",),
    "peft_lora": ("transformers", "peft"),
    "pyro_vae": ("pyro",),
    "sentence_transformer": ("sentence_transformers",),
    "skorch_fit": ("skorch",),
    "stable_baselines": ("stable_baselines3",),
    "tabnet_fit": ("pytorch_tabnet",),
    "trl_sft": ("trl",),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run left."""

    exit_status: int | None
    """Negative: the signal that it died of; None: it was stopped at the time limit."""
    stdout: str
    stderr: str
    files: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """One script, by Python alone and under `flatout run`."""

    name: str
    group: str
    identical: bool
    first_difference: str | None
    repeatable: bool | None
    """Of two plain runs; None: not asked, because nothing differed."""
    exit_status: int | None
    seconds: float


def compare(name: str, group: str, run: Callable[[Sequence[str]], Outcome], flatout: Sequence[str]) -> Alike:
    began = time.perf_counter()
    plain, watched = run([sys.executable]), run([*flatout, "run", "--no-report"])
    difference = first_difference(plain, watched)
    return Alike(
        name=name,
        group=group,
        identical=difference is None,
        first_difference=None if difference is None else difference.replace(f"{PROJECT}/", ""),
        repeatable=None if difference is None else first_difference(plain, run([sys.executable])) is None,
        exit_status=plain.exit_status,
        seconds=time.perf_counter() - began,
    )


def first_difference(one: Outcome, other: Outcome) -> str | None:
    if one.exit_status != other.exit_status:
        last = (other.stderr.strip().splitlines() or [""])[-1]
        return f"exit status {one.exit_status} and {other.exit_status}: {last}"
    for stream, ours, theirs in (("stdout", one.stdout, other.stdout), ("stderr", one.stderr, other.stderr)):
        for number, (left, right) in enumerate(zip_longest(ours.split("\n"), theirs.split("\n")), start=1):
            if left != right:
                return f"{stream}, line {number}: {left!r} and {right!r}"
    names = sorted(set(one.files) | set(other.files))
    return next((f"file {name}" for name in names if one.files.get(name) != other.files.get(name)), None)


def run_own(script: Path, folder: Path, command: Sequence[str]) -> Outcome:
    """In a fresh copy of the script's folder, always at the same place: its path stands in tracebacks."""
    shutil.rmtree(folder, ignore_errors=True)
    root = HERE / script.relative_to(HERE).parts[0]
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / script.parent.relative_to(root)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, script.name],
        cwd=place,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(STDIN, timeout=RUN_LIMIT_SECONDS)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        status = None
    files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    stdout = blank_times(stdout, (TIMES_OF_TRAINER,), HERE)
    return Outcome(exit_status=status, stdout=stdout, stderr=without_log_times(stderr), files=files)


def _digest(path: Path) -> str | None:
    if path.name == "trainer_state.json":
        path.write_text(blank_times(path.read_text(), (TIMES_OF_TRAINER,), HERE))
    return digest(path)


def without_log_times(stderr: str) -> str:
    """Lines of torch's own logs and of its profiler begin with the time and the process; progress bars have a rate."""
    begins = (r"(?m)^[VIWE]\d{4} [\d:.]+ \d+", r"(?m)^\w+:[\d-]+ [\d:]+ \d+:\d+")
    return blank_times(stderr, (*begins, r"\[[\d:]+<[\d:?]+, +[\d.?]+ ?(?:it/s|s/it|examples/s)\]"), HERE)


def run_public(script: PublicScript, checkout: Path, command: Sequence[str]) -> Outcome:
    with fresh_workspace(script, checkout) as workspace:
        finished = workspace.run([*command, *script.argv], limit_seconds=RUN_LIMIT_SECONDS)
        patterns = (*script.time_patterns, r"\d+%\|.*\r?", r"[\d.]+(s/it|it/s)")
        return Outcome(
            exit_status=finished.exit_code,
            stdout=blank_times(finished.stdout, script.time_patterns, workspace.checkout),
            stderr=blank_times(finished.stderr, patterns, workspace.checkout),
            files={name: digest(workspace.directory / name) for name in script.artifacts},
        )


def own_scripts() -> list[tuple[str, Path]]:
    odd = [("odd", path) for path in sorted((HERE / "odd").glob("*.py")) if path.name != "small.py"]
    return [
        *odd,
        ("odd", HERE / "odd" / "local_modules" / "main.py"),
        *[("framework", path) for path in sorted((HERE / "frameworks").glob("*.py"))],
    ]


def name_of(path: Path) -> str:
    return path.parent.name if path.stem == "main" else path.stem


def jobs_of(arguments: argparse.Namespace, scratch: Path) -> tuple[list[Callable[[], Alike]], dict[str, str]]:
    """(comparisons to be run, name -> why it is left out)."""
    flatout = split_command(arguments.flatout)
    jobs: list[Callable[[], Alike]] = []
    left_out: dict[str, str] = {}
    for group, path in own_scripts():
        name = name_of(path)
        missing = [package for package in FRAMEWORK_PACKAGES.get(name, ()) if find_spec(package) is None]
        if missing:
            left_out[name] = f"it needs the package {', '.join(missing)}"
            continue

        def own(name: str = name, group: str = group, path: Path = path) -> Alike:
            return compare(name, group, lambda command: run_own(path, scratch / name, command), flatout)

        if not arguments.only or name in arguments.only:
            jobs.append(own)
    for script in PUBLIC_SCRIPTS if arguments.checkouts else ():
        if reason := what_is_missing(script, arguments.checkouts):
            left_out[script.name] = reason
            continue

        def public(script: PublicScript = script) -> Alike:
            checkout = find_checkout(script, arguments.checkouts)
            assert checkout is not None
            return compare(script.name, "public", lambda command: run_public(script, checkout, command), flatout)

        if not arguments.only or script.name in arguments.only:
            jobs.append(public)
    return jobs, left_out


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts.alike", description=__doc__)
    parser.add_argument("--checkouts", type=Path, help="folder with the clones, as README.md lists them")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default: %(default)s)")
    parser.add_argument("--flatout", default="{python} -m flatout", help="the command to test (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write everything there, as JSON")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="alike-") as name, ThreadPoolExecutor(arguments.jobs) as pool:
        jobs, left_out = jobs_of(arguments, Path(name).resolve())
        found: list[Alike] = []
        for result in pool.map(lambda job: job(), jobs):
            found.append(result)
            print(f"{result.name:24} {'identical' if result.identical else result.first_difference}", flush=True)
            if arguments.out:
                document = {"schema": SCHEMA, "machine": detect().to_json(), "left_out": left_out}
                document |= {
                    "identical": sum(one.identical for one in found),
                    "scripts": [asdict(one) for one in found],
                }
                arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, reason in left_out.items():
        print(f"{name:24} left out: {reason}")
    print(f"{sum(one.identical for one in found)} identical of {len(found)}")
    return 0 if all(one.identical for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
