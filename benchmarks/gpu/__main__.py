"""`python -m benchmarks.gpu --out FOLDER`: everything that only a GPU can show, in one command and one document.

Each stage is a command of the project with a limit of its own. Those whose figures are times run alone; then the others
run side by side. FOLDER/gpu.json holds the machine, the versions and each stage's command, exit code, seconds, last
lines and figures; FOLDER/NAME.txt its whole output.

    python -m benchmarks.gpu --out results --only tests check

Beside what `pip install -e '.[dev]'` brings it compares with liger-kernel and cut-cross-entropy where they are
installed. On a machine without a network, bring the wheels that its Python lacks, such as tomli-w, libcst, torchao and
these two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.infer.surroundings import surroundings

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-rfE", "-p", "no:benchmark")
"""pytest-benchmark, where it is installed, warns beside pytest-xdist, and warnings are errors here."""
LAST_LINES = 40
GRACE_SECONDS = 10.0
GPT = ("examples/char_lm.py", "--width", "512", "--layers", "8", "--heads", "8", "--block-size", "256")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`{folder}` in the command is where files go."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    document: str | None = None
    """The file of figures that the command writes into the folder."""
    alone: bool = True


def tuned(name: str, *script: str, budget: int = 60) -> Stage:
    """`flatout tune` of this script."""
    options = ("--budget", str(budget), "--out", f"{{folder}}/{name}")
    command = (PYTHON, "-m", "flatout", "tune", *options, *script)
    document = f"{name}/flatout-report.json"
    return Stage(name=name, command=command, limit_seconds=1.3 * budget + 30, document=document)


STAGES = (
    Stage(
        name="tests",
        command=(*PYTEST, "-n", "4", "tests/gpu", "tests/kernels/test_score_gradients.py"),
        limit_seconds=240,
        alone=False,
    ),
    Stage(name="check", command=(PYTHON, "-m", "flatout", "check", "--measure"), limit_seconds=180),
    Stage(
        name="training",
        command=(PYTHON, "-m", "benchmarks.gpu.training", "--out", "{folder}/training.json"),
        limit_seconds=300,
        document="training.json",
    ),
    Stage(
        name="bench",
        command=(PYTHON, "-m", "flatout", "bench", "--quick", "--budget", "30s", "--out", "{folder}/bench.json"),
        limit_seconds=400,
        document="bench.json",
    ),
    Stage(
        name="claims",
        command=(PYTHON, "-m", "flatout", "bench", "claims", "--quick", "--out", "{folder}/claims.json"),
        limit_seconds=240,
        document="claims.json",
    ),
    Stage(
        name="generation",
        command=(
            *(PYTHON, "-m", "benchmarks.infer.generation", "--device", "cuda", "--rounds", "6"),
            *("--out", "{folder}/generation.json"),
        ),
        limit_seconds=240,
        document="generation.json",
    ),
    Stage(
        name="kernels",
        command=(
            *(PYTHON, "-m", "benchmarks.kernels.linear_cross_entropy", "--device", "cuda"),
            *("--out", "{folder}/linear_cross_entropy.json"),
        ),
        limit_seconds=180,
        document="linear_cross_entropy.json",
    ),
    Stage(
        name="steps",
        command=(
            *(PYTHON, "-m", "benchmarks.whatif.measured", "--seconds", "0.5", "--operator-seconds", "0.02"),
            *("--out", "{folder}/steps.json"),
        ),
        limit_seconds=180,
        document="steps.json",
    ),
    Stage(
        name="profile",
        command=(
            *(PYTHON, "-m", "flatout", "profile", "--by", "shape", "--operators", "{folder}/operators.json"),
            *("--trace", "{folder}/trace.json.gz", *GPT, "--batch-size", "64"),
        ),
        limit_seconds=120,
    ),
    Stage(
        name="run",
        command=(
            *(PYTHON, "-m", "flatout", "run", "--no-plan", "--report", "{folder}/run/flatout-run.json"),
            *(*GPT, "--batch-size", "64", "--steps", "200"),
        ),
        limit_seconds=120,
        document="run/flatout-run.json",
    ),
    Stage(
        name="watch",
        command=(
            *(PYTHON, "-m", "benchmarks.watch", "--device", "cuda", "--pairs", "12"),
            *("--out", "{folder}/watch.json"),
        ),
        limit_seconds=180,
        document="watch.json",
    ),
    tuned("tune_gpt", *GPT, "--batch-size", "64", budget=60),
    tuned("tune_digits_mlp", "examples/digits_mlp.py"),
    tuned("tune_digits_cnn", "examples/digits_cnn.py", "--epochs", "400"),
    tuned("tune_no_device", "benchmarks/gain/training.py", "gpt", "--width=256", "--batch=64", "--steps=100000"),
    Stage(
        name="diagnose",
        command=(
            *(PYTHON, "-m", "benchmarks.diagnose", "--only", "cuda", "--repeats", "1", "--untimed"),
            *("--side-by-side", "5", "--out", "{folder}/diagnose.json"),
        ),
        limit_seconds=300,
        document="diagnose.json",
        alone=False,
    ),
    Stage(
        name="memory",
        command=(PYTHON, "-m", "flatout", "memory", *GPT),
        limit_seconds=120,
        alone=False,
    ),
    Stage(
        name="forecast",
        command=(
            *(PYTHON, "-m", "benchmarks.memory.forecast", "--cuda", "--side-by-side", "6"),
            *("--out", "{folder}/forecast.json"),
        ),
        limit_seconds=540,
        document="forecast.json",
        alone=False,
    ),
    Stage(
        name="whole_suite",
        command=(*PYTEST, "-n", "8", "--dist", "worksteal", "tests"),
        limit_seconds=540,
        alone=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    command: str
    exit_code: int | None
    """None: stopped at its limit."""
    seconds: float
    last_lines: tuple[str, ...]
    figures: Any


def main(words: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for everything written")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if stage.name in arguments.only]
    results: list[Result] = []
    for stage in chosen:
        if stage.alone:
            results.append(_run(stage, arguments.out))
            _write(arguments.out, results)
    beside = [stage for stage in chosen if not stage.alone]
    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        for result in pool.map(lambda stage: _run(stage, arguments.out), beside):
            results.append(result)
            _write(arguments.out, results)
    return 0 if all(result.exit_code == 0 for result in results) else 1


def _run(stage: Stage, folder: Path) -> Result:
    command = [word.format(folder=folder.resolve()) for word in stage.command]
    log = folder / f"{stage.name}.txt"
    if stage.document:
        (folder / stage.document).parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code: int | None = process.wait(stage.limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
    seconds = time.perf_counter() - began
    lines = log.read_text(errors="replace").splitlines()
    result = Result(
        name=stage.name,
        command=" ".join(stage.command),
        exit_code=code,
        seconds=seconds,
        last_lines=tuple(lines[-LAST_LINES:]),
        figures=_figures(stage, folder),
    )
    ended = "stopped at its limit" if code is None else f"exit code {code}"
    print(f"{stage.name}: {ended} after {seconds:.0f} s", flush=True)
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C first: then it saves what it has measured."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _figures(stage: Stage, folder: Path) -> Any:
    """What the stage wrote, if it came so far."""
    path = folder / stage.document if stage.document else None
    return json.loads(path.read_text()) if path is not None and path.exists() else None


def _write(folder: Path, results: list[Result]) -> None:
    document = {
        "benchmark": "gpu",
        **surroundings("triton", "transformers"),
        "stages": [asdict(result) for result in results],
    }
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
