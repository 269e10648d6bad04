"""A plan on a run with other arguments than it was tuned with: what these set stays as they set it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.machine.detect import detect
from flatout.plan import Plan
from tests.processes import Python

SET_BY_ARGUMENTS = """
    import os, sys
    if "--few" in sys.argv:
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7 if "--wide" in sys.argv else 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = set()
    for _ in range(5):
        with torch.autocast("cpu", torch.float16, enabled="--amp" in sys.argv):
            out = model(torch.randn(3, 5))
        seen.add(out.grad_fn.name())
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    print(out.dtype, torch.get_num_threads(), sorted(seen))
"""
LOOP = "Linear of 36 weights (float32), SGD over 2 tensors, on cpu"


@pytest.mark.parametrize(
    ("arguments", "loop", "applied"),
    [
        (["--epochs", "9"], LOOP, ["threads 2", "bf16 autocast"]),
        pytest.param(["--amp", "--few"], LOOP, [], marks=pytest.mark.slow),
        (["--wide"], LOOP, ["threads 2"]),
        (["--epochs", "9"], None, ["threads 2"]),
    ],
)
@pytest.mark.first_case
def test_a_plan_never_overrides_what_the_arguments_set(
    python: Python, tmp_path: Path, arguments: list[str], loop: str | None, applied: list[str]
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SET_BY_ARGUMENTS))
    machine = replace(detect(), cpu=replace(detect().cpu, fast_dtypes=("bf16",), available_cores=4, physical_cores=4))
    plan = Plan(
        precision="bf16", threads=2, script="train.py", argv=("--epochs", "3"), loop=loop,
        machine_fingerprint=machine.fingerprint, torch_version=machine.versions.torch,
    )  # fmt: skip
    (tmp_path / "flatout.toml").write_text(plan.to_toml())
    (tmp_path / "go.py").write_text(
        "import sys\nfrom dataclasses import replace\nimport flatout.machine.detect as here\n"
        "seen = here.detect()\n"
        "other = replace(seen, cpu=replace(seen.cpu, fast_dtypes=('bf16',), available_cores=4, physical_cores=4))\n"
        "here.detect = lambda: other\n"
        "from flatout.cli.run import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "FLATOUT_CACHE_DIR": str(tmp_path / ".cache"), "OMP_NUM_THREADS": "3"}
    words = ["go.py", "train.py", *arguments]
    if "--few" in arguments:  # torch reads what that sets while it is loaded
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    else:
        done = python(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0
    told = done.stderr.splitlines()
    assert len(told) == 2 - len(applied)
    assert all(line.startswith("flatout: left off ") for line in told)
    seen = json.loads((tmp_path / "flatout-run.json").read_text())
    assert seen["applied"] == applied
    assert seen["plan_notes"][0].startswith("the plan was tuned with other arguments (--epochs 3): tune again")
    assert len(seen["plan_notes"]) == 3 - len(applied)
    if "--few" in arguments:
        assert " 1 [" in done.stdout
