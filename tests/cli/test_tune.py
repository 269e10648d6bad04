"""`flatout tune` as a new user meets it: bad input, interruption, and a script's files afterwards."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.cli.tune import Wanted, _prepare, _save
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.private_details import arguments_digest
from flatout.script.entry import Target
from flatout.tuning.script_tuning import TuneRequest
from tests.cli.in_process import Said, said_by
from tests.processes import Python

pytestmark = pytest.mark.usefixtures("forked_trials")

LOOP = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {body}
    optimizer.zero_grad()
    loss = (model(torch.randn(8, 4)) ** 2).mean()
    loss.backward()
    optimizer.step()
"""
FUNCTIONAL = """
import torch
weights = torch.ones(4)
slope = torch.func.grad(lambda weights: (torch.randn(8, 4) @ weights).square().mean())
for _ in range(20):
    weights -= 0.1 * slope(weights)
"""


def tune(folder: Path, *words: str, stdin: str | None = None) -> Said:
    """With more time than a busy machine needs: a search with few levers ends long before."""
    return said_by(folder, "tune", "--budget", "5m", *words, stdin=stdin)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing.py"], 2, "no such script: missing.py"),
        (["-m", "no.such.module"], 1, "No module named"),
        (["--budget", "soon", "train.py"], 2, "soon"),
        (["--budget", "0s", "train.py"], 2, "--budget is 0"),
        (["--exactness", "perhaps", "train.py"], 2, "not one of 'bit-identical', 'rounding', 'reduced'"),
        (["--steps", "0", "train.py"], 2, "at least 1"),
        (["--steps", "0", "--devices", "2", "train.py:make"], 2, "at least 1"),
        (["--out", "train.py/results", "train.py"], 2, "cannot write to"),
        (["--logs", "train.py", "train.py"], 2, "logs cannot be kept in train.py"),
        (["--fit", "small", "train.py"], 2, "'small' is not a size"),
        (["--devices", "0", "train.py"], 2, "--devices is '0'; it is a number from 1"),
        (["--devices", "1000", "train.py"], 2, "--devices is 1000, and "),
        (["--device", "cpu", "--devices", "auto", "train.py"], 2, "--devices is auto, and there is no GPU"),
        (["--device", "cpu", "--devices", "1", "--fit", "1GiB", "train.py"], 2, "and a memory limit (fit)"),
        (["--devices", "1", "--exactness", "bit-identical", "train.py"], 2, "in another order; allow rounding"),
        (["--devices", "1", "--isolation", "guard", "train.py"], 2, "--isolation guard with --devices"),
        (["--loss", "sum", "train.py"], 2, "--loss without --devices"),
        (["--allow-local-batchnorm", "train.py"], 2, "--allow-local-batchnorm without --devices"),
        (["syntax.py"], 1, "syntax.py, line 2: SyntaxError"),
        (["idle.py"], 1, "idle.py ended without a single step"),
        (["functional.py"], 1, "gradients of torch.func are not followed"),
        (["usage.py"], 1, "without any lever: usage.py: error: the following arguments are required: --data"),
        (["usage.py", "--lr", "fast"], 1, "lever: usage.py: error: argument --lr: invalid float value: 'fast'"),
        (["raises.py"], 1, "ValueError: at step 7"),
        (["stdin.py"], 1, "EOFError"),
        (["short.py"], 1, "short.py ended after 2 steps"),
        (["--budget", "8s", "slow.py"], 1, "try --budget"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(steps=10, body="pass"))
    (tmp_path / "syntax.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "idle.py").write_text("import torch\ntorch.zeros(3) + 1\n")
    (tmp_path / "functional.py").write_text(FUNCTIONAL)
    (tmp_path / "usage.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
        "parser.add_argument('--lr', type=float)\nparser.parse_args()\n"
    )
    (tmp_path / "raises.py").write_text(LOOP.format(steps=90, body="if step == 6: raise ValueError('at step 7')"))
    (tmp_path / "stdin.py").write_text(LOOP.format(steps=90, body="input()"))
    (tmp_path / "short.py").write_text(LOOP.format(steps=2, body="pass"))
    (tmp_path / "slow.py").write_text(LOOP.format(steps=90, body="import time; time.sleep(0.3)"))
    before = sorted(tmp_path.iterdir())
    result = tune(tmp_path, *words)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "flatout/" not in result.stderr  # no traceback of ours
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_for_the_results_is_made_when_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    request, folder = TuneRequest(target=Target.from_command([str(tmp_path / "train.py")])), tmp_path / "results/today"
    _prepare(request, folder, None)
    assert not folder.parent.exists()
    _save(Plan(precision="bf16"), {}, Wanted(folder=folder, json=False, include_private=False), plans=True)
    assert sorted(path.name for path in folder.iterdir()) == ["flatout-report.json", "flatout.toml"]


@pytest.mark.usefixtures("in_removed_folder")
def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    """Not even torch can be loaded there."""
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UsageError, match="the current folder was removed"):
        _prepare(TuneRequest(target=Target.from_command([str(script)])), tmp_path, None)


@pytest.mark.slow
def test_a_tuned_script_leaves_its_files_alone_and_reads_what_is_piped_in(tmp_path: Path) -> None:
    body = "line = sys.stdin.readline() if step < 2 else ''; open('log.txt', 'a').write('x'); open('new.txt', 'w')"
    (tmp_path / "my train.py").write_text(LOOP.format(steps=10_000_000, body=body))
    (tmp_path / "log.txt").write_text("mine")
    options = ["--exactness", "bit-identical", "--json", "--out", "results/today"]
    result = tune(tmp_path, *options, "my train.py", "--name", "two words", stdin="a\nb\n")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["flatout"]["document"] == "tune"
    assert report["script"]["arguments"] is None
    assert report["script"]["arguments_digest"] == arguments_digest(["--name", "two words"])
    assert {trial["exactness"] for trial in report["trials"]} <= {"bit-identical"}
    assert (tmp_path / "log.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "my train.py", "results"]
    assert sorted(p.name for p in (tmp_path / "results/today").iterdir()) == ["flatout-report.json", "flatout.toml"]


@pytest.mark.parametrize("moment", ["starting the script", pytest.param("trying ", marks=pytest.mark.slow)])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    """At a moment that the progress line tells, on a terminal."""
    (tmp_path / "train.py").write_text(LOOP.format(steps=10_000_000, body="import time; time.sleep(0.0005)"))
    terminal, stderr = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "flatout", "tune", "--budget", "5m", "train.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as process:
        os.close(stderr)
        told = read_until(terminal, moment)
        os.killpg(process.pid, signal.SIGINT)
        told += read_until(terminal, None)
        assert process.wait(timeout=100) in (130, -signal.SIGINT)
    os.close(terminal)
    assert "Traceback" not in told
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
    assert subprocess.run(["pgrep", "-f", f"fork_server.*{process.pid}$"], capture_output=True).stdout == b""


def read_until(terminal: int, wanted: str | None) -> str:
    """What comes until `wanted` has come; None: until nobody writes any more."""
    text = ""
    while wanted is None or wanted not in text:
        try:
            data = os.read(terminal, 65536)  # the alarm of every test ends a wait that is in vain
        except OSError:  # Linux's way to say that nobody has the other end any more
            data = b""
        if not data:
            assert wanted is None, f"ended before {wanted!r} came: {text!r}"
            return text
        text += data.decode()
    return text


@pytest.mark.slow
def test_a_module_of_a_package_is_tuned_and_then_run_by_its_plan(tmp_path: Path, python: Python) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(LOOP.format(steps=4000, body="pass") + "print('done', sys.argv[1:])")
    result = tune(tmp_path, "--exactness", "bit-identical", "-m", "package.train", "--help", "-x")
    assert result.returncode == 0, result.stderr
    assert "next: flatout run -m package.train --help -x" in result.stdout
    ran = python("-m", "flatout", "run", "-m", "package.train", "--help", "-x", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "done ['--help', '-x']\n")
    report = json.loads((tmp_path / "flatout-run.json").read_text())
    assert report["steps"] == 4000
    assert report["plan"] == json.loads((tmp_path / "flatout-report.json").read_text())["plan"]


def test_where_copy_on_write_is_refused_a_trial_stops_before_the_first_write(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch itself sets this variable once it has compiled, for all processes that it starts
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "not there yet"))
    (tmp_path / "train.py").write_text(LOOP.format(steps=10_000_000, body="if step == 5: open('x.txt', 'w')"))
    result = tune(tmp_path, "--isolation", "guard", "train.py")
    assert result.returncode == 1
    assert "stopped before the script's first write" in result.stderr
    assert "x.txt" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


VERIFYING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.processes import fork_trials
fork_trials(setattr)
from flatout.cli.run import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_plan_from_another_machine_is_verified_before_it_is_applied(tmp_path: Path, python: Python) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(steps=3000, body="pass"))
    (tmp_path / "flatout.toml").write_text(
        'schema = 1\n[plan]\nthreads = 7\n[provenance]\nscript = "train.py"\nmachine_fingerprint = "elsewhere"\n'
    )
    (tmp_path / "verify.py").write_text(VERIFYING)
    ran = python("verify.py", str(Path(__file__).parents[2]), "train.py", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "")
    report = json.loads((tmp_path / "flatout-run.json").read_text())
    assert report["applied"] == []
    assert "verified here: nothing holds" in report["plan_notes"][0]
    assert ran.stderr == f"flatout: {report['plan_notes'][0]}\n"
