"""What CONTRIBUTING.md says of levers, checks and models, done in a copy of the project with its own code blocks.

A block's title is its file: a `python` block is a new file, a `diff` block a change of a file that is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flatout.diagnose.machine_checks import CHECKS
from flatout.levers.catalogue import LEVERS
from flatout.plan_choices import declared

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = ("flatout", "tests", "docs", "benchmarks", "examples")

SHOWN = """
import contextlib, io, json, os, sys
from dataclasses import replace
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so that the check has something to find
import torch
import docs.generate, flatout
from flatout.__main__ import main
from flatout.diagnose.machine_checks import CHECKS
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_of_plan
assert Path(flatout.__file__).is_relative_to(os.getcwd()), flatout.__file__

def said(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(words)
    return out.getvalue()

model = flatout.models.Highway(flatout.models.HighwayConfig(inputs=6, layers=2, classes=3))
intervals = []
def loss(model, batch):
    intervals.append(sys.getswitchinterval())
    return model(batch).square().mean()
plan = flatout.Plan.from_toml("[plan]\\nswitch_interval_ms = 50\\n")
before = sys.getswitchinterval()
flatout.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, plan)(torch.randn(4, 6))
work = Path.cwd().parent / "work"
work.mkdir()
os.chdir(work)
Path("plan.toml").write_text(replace(plan, script="train.py").to_toml())
Path("train.py").write_text(TRAIN)
shown = {
    "levers": [lever.name for lever in LEVERS],
    "carries_out": [choice.label for choice in choices_of_plan(plan.choices(), LEVERS)],
    "checks": [check.__name__ for check in CHECKS],
    "models": flatout.models.__all__,
    "in_step": [before, *intervals, sys.getswitchinterval()],
    "in_run": said("run", "--plan", "plan.toml", "--trust-plan", "--no-report", "train.py"),
    "found": [finding["name"] for finding in json.loads(said("check", "--json"))["findings"]],
}
docs.generate.main()
print(json.dumps(shown))
"""

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.ones(12, 4), batch_size=2, num_workers=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    print(sys.getswitchinterval())
"""


def make_changes(page: str, folder: Path) -> list[str]:
    """Carry out the titled blocks of a page in a folder; returns the files that they name."""
    named = []
    for indent, kind, name, block in re.findall(
        r'^( *)```(python|diff) title="([^"\n]+)"\n(.*?)^\1```', page, re.MULTILINE | re.DOTALL
    ):
        block = "".join(line.removeprefix(indent) for line in block.splitlines(keepends=True))
        path = folder / name
        if kind == "python":
            assert not path.exists(), f"{name} is there already"
            path.write_text(block)
        else:
            lines = block.splitlines(keepends=True)
            before, after = (
                "".join(line[1:] or "\n" for line in lines if line[0] not in left_out) for left_out in "+-"
            )
            text = path.read_text()
            assert text.count(before) == 1, f"{name} has {text.count(before)} times:\n{before}"
            path.write_text(text.replace(before, after))
        named.append(name)
    return named


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with all that CONTRIBUTING.md adds."""
    folder = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)  # with what is compiled of it
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)
    assert len(make_changes((ROOT / "CONTRIBUTING.md").read_text(), folder)) > 10
    return folder


def run(folder: Path, *words: str) -> str:
    """`python WORDS` with the copy's modules, not those of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shown(changed: Path) -> dict[str, Any]:
    """What the changed project says of itself, all in one process."""
    found: dict[str, Any] = json.loads(run(changed, "-c", f"TRAIN = {TRAIN!r}\n{SHOWN}").splitlines()[-1])
    return found


def test_the_lever_is_in_the_catalogue_and_in_plans(shown: dict[str, Any]) -> None:
    name = "thread switch interval"
    assert [one for one in shown["levers"] if one != name] == [lever.name for lever in LEVERS]
    assert name in shown["levers"]
    assert shown["carries_out"] == [f"{name} 50"]


def test_the_lever_is_applied_by_a_step_and_by_a_run(shown: dict[str, Any]) -> None:
    assert shown["in_step"] == pytest.approx([0.005, 0.05, 0.005])
    assert float(shown["in_run"].split()[-1]) == pytest.approx(0.05)


def test_the_lever_is_documented(changed: Path, shown: dict[str, Any]) -> None:
    reference = changed / "docs" / "reference"
    row = "| [thread switch interval](#thread-switch-interval) | `switch_interval_ms` | bit-identical | time |"
    assert row in (reference / "levers.md").read_text().splitlines()
    plan = (reference / "plan.md").read_text()
    assert "\n## switch_interval_ms\n\na whole number from 1 to 1000\n" in plan
    assert plan.count("\n## ") == len(declared()) + 1


def test_the_check_is_made_by_the_command(shown: dict[str, Any]) -> None:
    assert shown["checks"] == [*(check.__name__ for check in CHECKS), "single_core"]
    assert "single_core" in shown["found"]


def test_the_model_is_public(shown: dict[str, Any]) -> None:
    assert {"Highway", "HighwayConfig"} <= set(shown["models"])


@pytest.mark.slow
def test_what_was_added_passes_the_tests_that_were_added(changed: Path, shown: dict[str, Any]) -> None:
    tests = ["test_code_rules.py", "test_import_direction.py", "levers/test_catalogue.py", "models/test_highway.py"]
    tests += [
        "models/test_configs.py",
        "diagnose/test_machine_checks.py",
        "test_docs.py::test_reference_pages_are_generated",
    ]
    tests += ["levers/test_numbers.py::test_nothing_stays[thread switch interval]"]
    tests += ["source_patch/test_forms.py::test_every_choice_of_a_script_has_a_form_or_a_reason"]
    cases = ("test_there_is_a_case_for_every_check", "test_it_fires_on_a_fault[garbage-collected]")
    tests += [f"diagnose/test_script_checks.py::{name}" for name in cases]
    tests += [f"models/test_every_model.py::{name}[highway]" for name in EVERY_MODEL]
    passed = run(changed, "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests))
    assert " passed" in passed
    assert "skipped" not in passed


EVERY_MODEL = (
    "test_gradients_reach_every_parameter",
    "test_state_dict_round_trip",
    "test_bf16_weights_give_bf16",
    "test_runs_on_fake_tensors",
)


@pytest.mark.slow
def test_what_was_added_passes_make_check(changed: Path) -> None:
    run(changed, "-m", "ruff", "check", ".")
    run(changed, "-m", "ruff", "format", "--check", ".")
    added = ("levers/switch_interval.py", "models/highway.py", "diagnose/machine_checks/loading.py", "plan_choices.py")
    run(changed, "-m", "mypy", *(f"flatout/{name}" for name in added))


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ('```diff title="a.py"\n absent\n+new\n```\n', "a.py has 0 times"),
        ('```diff title="a.py"\n x = 1\n+new\n```\n', "a.py has 2 times"),
        ('```python title="a.py"\nx = 1\n```\n', "a.py is there already"),
    ],
)
def test_a_block_that_does_not_fit_is_named(tmp_path: Path, blocks: str, complaint: str) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\nx = 1\n")
    with pytest.raises(AssertionError, match=complaint):
        make_changes(textwrap.dedent(blocks), tmp_path)


def test_blocks_are_carried_out_in_order(tmp_path: Path) -> None:
    page = '1. So:\n\n   ```python title="b.py"\n   if x:\n       y\n   ```\n\n'
    page += '```diff title="b.py"\n-if x:\n+if z:\n     y\n```\n'
    assert make_changes(page, tmp_path) == ["b.py", "b.py"]
    assert (tmp_path / "b.py").read_text() == "if z:\n    y\n"
