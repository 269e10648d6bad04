"""The examples run as a user would run them, know nothing of Flatout, and repeat themselves for a seed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

SHORT_RUNS = {
    "digits_mlp.py": ["--epochs", "2", "--samples", "640"],
    "digits_cnn.py": ["--epochs", "3"],
    "char_lm.py": [
        *("--steps", "6", "--characters", "20000", "--width", "32", "--layers", "1", "--eval-batches", "2"),
        *("--eval-interval", "3", "--log-interval", "1", "--sample", "5"),
    ],
    "classic_loop.py": ["--epochs", "2", "--samples", "1000"],
}


def run_example(name: str, arguments: list[str], folder: Path) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout


def without_seconds(output: str) -> str:
    return re.sub(r"[\d.]+ s$", "", output, flags=re.MULTILINE)


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHORT_RUNS)


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_example_trains_and_leaves_nothing_behind(name, tmp_path):
    output = run_example(name, SHORT_RUNS[name], tmp_path)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []


def test_the_seed_decides_the_numbers(tmp_path):
    name = "digits_mlp.py"
    first, again, other = (
        without_seconds(run_example(name, [*SHORT_RUNS[name], "--seed", seed], tmp_path)) for seed in "334"
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_example_knows_nothing_of_flatout(name):
    assert "flatout" not in (EXAMPLES / name).read_text().lower()
