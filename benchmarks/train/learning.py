"""`python -m benchmarks.train.learning`: the library learns: digits, and characters, in fp32 and in bf16.

Digits: test accuracy over several seeds in each precision. Characters: held-out loss against the entropy of the
character frequencies. bf16 counts as within noise where its mean lies within two standard errors of fp32's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.machine.detect import detect

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "library"


def run(name: str, *words: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / name), "--folder", folder, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def digits(seeds: int, epochs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for seed in range(seeds):
        for precision, accuracies in found.items():
            text = run("digits.py", "--epochs", str(epochs), "--seed", str(seed), "--precision", precision)
            accuracies.append(float(re.findall(r"accuracy ([\d.]+)%", text)[-1]) / 100)
    return found


def characters(seeds: int, steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {"fp32": [], "bf16": []}
    for seed in range(seeds):
        for precision in ("fp32", "bf16"):
            text = run("char_lm.py", "--steps", str(steps), "--seed", str(seed), "--precision", precision)
            loss, entropy = re.findall(r"loss ([\d.]+) nats a character; of frequencies alone ([\d.]+)", text)[-1]
            found[precision].append(float(loss))
            found["unigram_entropy"] = float(entropy)
    return found


def describe(name: str, found: dict[str, Any]) -> str:
    plain, reduced = found["fp32"], found["bf16"]
    difference = statistics.mean(reduced) - statistics.mean(plain)
    noise = 2 * (statistics.variance(plain) / len(plain) + statistics.variance(reduced) / len(reduced)) ** 0.5
    verdict = "within noise" if abs(difference) <= noise else "DIFFERENT"
    return (
        f"{name}: fp32 {statistics.mean(plain):.4f}, bf16 {statistics.mean(reduced):.4f} over {len(plain)} seeds: "
        f"difference {difference:+.4f}, two standard errors {noise:.4f}: {verdict}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.learning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    accuracy = digits(arguments.seeds, arguments.epochs)
    print(describe("digits, test accuracy", accuracy), flush=True)
    loss = characters(min(3, arguments.seeds), arguments.steps)
    print(describe("characters, held-out loss", loss), f"(frequencies alone: {loss['unigram_entropy']:.3f})")
    if arguments.out:
        document = {"benchmark": "train.learning", "machine": detect().to_json(), "digits": accuracy}
        arguments.out.write_text(json.dumps({**document, "characters": loss}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
