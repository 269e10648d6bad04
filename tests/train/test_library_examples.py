"""The library's examples: they train, go on where they were stopped, and evaluate what they saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import Python

EXAMPLES = Path(__file__).parents[2] / "examples" / "library"


def run(python: Python, name: str, folder: Path, *words: str) -> str:
    ended = python("-W", "error", str(EXAMPLES / name), "--folder", str(folder / "run"), *words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.slow
def test_digits_are_learnt_resumed_and_evaluated(tmp_path: Path, python: Python) -> None:
    first = run(python, "digits.py", tmp_path, "--epochs", "3")
    assert "69 steps, 3 epochs in all" in first
    assert float(re.findall(r"accuracy ([\d.]+)%", first)[0]) > 85
    again = run(python, "digits.py", tmp_path, "--epochs", "3")
    assert "0 steps after step 69, 3 epochs in all" in again
    best = run(python, "digits.py", tmp_path, "--evaluate")
    assert re.match(r"step \d+: test loss", best)


@pytest.mark.slow
def test_characters_are_learnt_and_resumed(tmp_path: Path, python: Python) -> None:
    small = ("--characters", "30000", "--width", "32", "--layers", "1", "--block", "32")
    assert run(python, "char_lm.py", tmp_path, "--steps", "20", *small).startswith("20 steps\n")
    assert run(python, "char_lm.py", tmp_path, "--steps", "30", *small).startswith("10 steps after step 20\n")
