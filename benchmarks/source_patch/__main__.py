"""Tuned scripts as `flatout run` runs them and as `flatout diff` patches them: losses and speed.

    python -m benchmarks.source_patch --checkouts checkouts [--budget 120] [--only NAME ...] [--out results.json]

Each script is tuned, its patch applied to a copy by `patch -p1`, and the copy run by plain Python. Steps are timed in
turns of two processes (`benchmarks.side_by_side`): plain beside `flatout run`, plain beside patched, and `flatout run`
beside patched. `kept` is the share of the time saved under `flatout run` that the patch saves too. Losses of the first
steps are compared with those of `flatout run`, and those of the plain script beside them.

The environment's variables of a plan's allocator, which the patch names in a comment, are set for the patched run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scripts.catalogue import (
    MAKEMORE,
    MINGPT_ADDER,
    MNIST,
    NANOGPT,
    OWN_EXAMPLES,
    TINY_DIFFUSION,
    VAE,
    WORD_LANGUAGE_MODEL,
    YUNJEY_LANGUAGE_MODEL,
    PublicScript,
)
from benchmarks.scripts.workspace import PROJECT, find_checkout, fresh_workspace
from benchmarks.side_by_side import Command, in_turns
from flatout.machine.detect import detect
from flatout.statistics import median

TURN_SECONDS = 0.5
LEAST_SECONDS, LOSS_STEPS = 12.0, 60
BY_ZERO_GRAD = ("word_language_model",)
"""Scripts without an optimizer."""
GOAL = 0.9


def example(name: str, *arguments: str) -> PublicScript:
    return PublicScript(name=name, repository=OWN_EXAMPLES, directory="examples", argv=(f"{name}.py", *arguments))


SCRIPTS = (
    example("classic_loop", "--epochs", "1000"),
    example("digits_mlp", "--epochs", "10000"),
    example("digits_cnn", "--epochs", "10000"),
    example("char_lm", "--steps", "1000000", "--eval-interval", "1000000"),
    MNIST,
    VAE,
    WORD_LANGUAGE_MODEL,
    MAKEMORE,
    MINGPT_ADDER,
    NANOGPT,
    TINY_DIFFUSION,
    YUNJEY_LANGUAGE_MODEL,
)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """A script as it is, and patched."""

    script: PublicScript
    plain: Path
    patched: Path
    plan: Path
    variables: Mapping[str, str]
    environment: Mapping[str, str]
    folder: Path

    def command(self, kind: str, losses: Path | None = None) -> Command:
        """kind: 'plain', 'planned' or 'patched'."""
        words = list(self.script.tuned_argv or self.script.argv)
        settings = {
            "words": words,
            "plan": str(self.plan) if kind == "planned" else None,
            "ends": "zero_grad" if self.script.name in BY_ZERO_GRAD else "step",
            "losses": None if losses is None else str(losses),
        }
        name = f"{kind}-{'losses' if losses else 'times'}"
        (self.folder / f"{name}.json").write_text(json.dumps(settings))
        changed = self.variables if kind == "patched" else {}
        path = os.pathsep.join(filter(None, [self.environment.get("PYTHONPATH"), str(PROJECT)]))
        where = self.patched if kind == "patched" else self.plain
        path = path.replace(str(self.plain_root), str(self.patched_root)) if kind == "patched" else path
        given = [f"{key}={value}" for key, value in {**self.set_here(), **changed, "PYTHONPATH": path}.items()]
        program = [sys.executable, "-m", "benchmarks.source_patch.timed", str(self.folder / f"{name}.json")]
        return Command(words=["env", "-C", str(where), *given, *program], times=self.folder / f"{name}.times")

    @property
    def plain_root(self) -> Path:
        return self.folder / "plain"

    @property
    def patched_root(self) -> Path:
        return self.folder / "patched"

    def set_here(self) -> dict[str, str]:
        """What of the script's environment is not this process's."""
        return {key: value for key, value in self.environment.items() if os.environ.get(key) != value}


@contextlib.contextmanager
def copies_of(script: PublicScript, checkout: Path, budget: int) -> Iterator[tuple[Copies, dict[str, Any], str]]:
    """(the copies, the tune's document, the patch)."""
    with (
        tempfile.TemporaryDirectory(prefix="source-patch-") as name,
        fresh_workspace(script, checkout, tuned=True) as work,
    ):
        folder = Path(name).resolve()
        shutil.copytree(work.checkout, folder / "plain", symlinks=True)
        shutil.copytree(work.checkout, folder / "patched", symlinks=True)
        inside = work.directory.relative_to(work.checkout)
        environment = {
            key: value.replace(str(work.checkout), str(folder / "plain")) for key, value in work.environment.items()
        }
        words = list(script.tuned_argv or script.argv)
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(PROJECT)]))
        flatout, env = [sys.executable, "-m", "flatout"], {**environment, "PYTHONPATH": path}
        plain = folder / "plain" / inside
        tune = [*flatout, "tune", "--budget", str(budget), "--json", *words]
        done = subprocess.run(tune, cwd=plain, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        diff = [*flatout, "diff", *words]
        made = subprocess.run(diff, cwd=plain, env=env, capture_output=True, check=False)
        if made.returncode:
            raise RuntimeError(made.stderr.decode()[-500:] or made.stdout.decode())
        document = json.loads(
            subprocess.run([*diff[:4], "--json", *words], cwd=plain, env=env, capture_output=True, check=True).stdout
        )
        root = Path(document["folder"]) if document["folder"] else plain
        there = folder / "patched" / root.relative_to(folder / "plain")
        subprocess.run(["patch", "-p1"], cwd=there, input=made.stdout, check=True, capture_output=True)
        variables = dict(one.split("=", 1) for left in document["left"] for one in left["command"])
        copies = Copies(
            script=script,
            plain=plain,
            patched=folder / "patched" / inside,
            plan=plain / "flatout.toml",
            variables=variables,
            environment=environment,
            folder=folder,
        )
        yield copies, json.loads(done.stdout), made.stdout.decode()


def losses_of(copies: Copies, kind: str) -> list[float]:
    file = copies.folder / f"{kind}.losses"
    command = copies.command(kind, file)
    words = [*command.words, "--steps", str(LOSS_STEPS), "--times", str(command.times)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} left with {done.returncode}: {done.stderr[-500:]}")
    found: list[float] = json.loads(file.read_text())
    return found


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, other, strict=False))


def ratio(copies: Copies, one: str, other: str, step_seconds: float) -> dict[str, float]:
    """How many times as fast the other is."""
    steps = max(60, int(LEAST_SECONDS / step_seconds))
    pairs = in_turns(copies.command(one), copies.command(other), steps, TURN_SECONDS)
    ratios = sorted(first / second for first, second in pairs)
    return {
        "ratio": median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "pairs": len(ratios),
    }


def measured(script: PublicScript, checkout: Path, budget: int) -> dict[str, Any]:
    with copies_of(script, checkout, budget) as (copies, document, patch):
        row: dict[str, Any] = {"script": script.name, "plan": document["plan"], "patch": patch}
        row["tuned"] = document["speedup"]
        losses = {kind: losses_of(copies, kind) for kind in ("plain", "planned", "patched")}
        row["loss_difference"] = largest_difference(losses["patched"], losses["planned"])
        row["loss_difference_plain"] = largest_difference(losses["plain"], losses["planned"])
        step_seconds = document["observed"]["step_seconds"] or 0.1
        row["planned"] = ratio(copies, "plain", "planned", step_seconds)
        row["patched"] = ratio(copies, "plain", "patched", step_seconds)
        row["patched_to_planned"] = ratio(copies, "planned", "patched", step_seconds)
        saved = 1 - 1 / row["planned"]["ratio"]
        row["kept"] = None if saved <= 0 else (1 - 1 / row["patched"]["ratio"]) / saved
        return row


def described(row: Mapping[str, Any]) -> str:
    if "problem" in row:
        return f"{row['script']:20} {row['problem']}"
    kept = "nothing saved" if row["kept"] is None else f"keeps {row['kept']:.0%}"
    parts = [f"flatout run x{row['planned']['ratio']:.2f}", f"patched x{row['patched']['ratio']:.2f}, {kept}"]
    parts.append(f"patched to flatout run x{row['patched_to_planned']['ratio']:.2f}")
    parts.append(f"losses differ by {row['loss_difference']:.1e} (plain: {row['loss_difference_plain']:.1e})")
    return f"{row['script']:20} {'; '.join(parts)}; {row['plan']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=120)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for script in SCRIPTS:
        if arguments.only and script.name not in arguments.only:
            continue
        checkout = find_checkout(script, arguments.checkouts.resolve())
        if checkout is None:
            row: dict[str, Any] = {"script": script.name, "problem": "no checkout"}
        else:
            try:
                row = measured(script, checkout, arguments.budget)
            except RuntimeError as error:
                row = {"script": script.name, "problem": str(error)}
        rows.append(row)
        print(described(row), flush=True)
        if arguments.out:
            machine = detect()
            found = {"machine": {"processor": machine.cpu.name, "torch": machine.versions.torch}, "results": rows}
            arguments.out.write_text(json.dumps({"budget_seconds": arguments.budget, **found}, indent=1) + "\n")
    return 0 if all(row.get("kept") is None or row["kept"] >= GOAL for row in rows if "problem" not in row) else 1


if __name__ == "__main__":
    sys.exit(main())
