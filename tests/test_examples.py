"""The examples run as a user would run them, know nothing of Flatout, and repeat themselves for a seed."""

import re
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


def run_examples(python, folder, *runs):
    """What each (name, arguments) prints; all at once."""
    finished = python.together(*(["-W", "error", str(EXAMPLES / name), *words] for name, words in runs), cwd=folder)
    for one in finished:
        assert one.returncode == 0, one.stderr
        assert one.stderr == ""
    return [one.stdout for one in finished]


def without_seconds(output: str) -> str:
    return re.sub(r"[\d.]+ s$", "", output, flags=re.MULTILINE)


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHORT_RUNS)


@pytest.mark.parametrize("name", SHORT_RUNS)
@pytest.mark.first_case
def test_example_trains_and_leaves_nothing_behind(name, tmp_path, python):
    (output,) = run_examples(python, tmp_path, (name, SHORT_RUNS[name]))
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_seed_decides_the_numbers(tmp_path, python):
    name = "digits_mlp.py"
    runs = [(name, [*SHORT_RUNS[name], "--seed", seed]) for seed in "334"]
    first, again, other = map(without_seconds, run_examples(python, tmp_path, *runs))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_example_knows_nothing_of_flatout(name):
    assert "flatout" not in (EXAMPLES / name).read_text().lower()
