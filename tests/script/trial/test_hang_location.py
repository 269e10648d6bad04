"""The line at which a script is that answers nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import pytest

from flatout.script.entry import Target
from flatout.script.trial.answers import TrialHangs
from flatout.script.trial.hang_location import innermost_line, location
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup

BEGIN_SECONDS = 120.0
"""A timeout, for a process to start on a loaded machine."""
STACKS = f"""Thread 0x00007f12 [loader] (most recent call first):
  File "/home/me/data.py", line 7 in fetch
  File "{os.path.dirname(os.__file__)}/threading.py", line 982 in run

Current thread 0x00007f34 (most recent call first):
  File "{os.path.dirname(os.__file__)}/socket.py", line 3 in recv
  File "/home/me/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775 in _call_impl
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 40 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_location_is_the_innermost_line_of_the_users_in_the_main_thread() -> None:
    assert innermost_line(STACKS, "/home/me") == "model.py:12 in forward"
    assert innermost_line(STACKS, "/elsewhere") == "/home/me/model.py:12 in forward"
    without = "".join(line for line in STACKS.splitlines(keepends=True) if "model.py" not in line)
    assert innermost_line(without, "/home/me") == "train.py:40"
    assert innermost_line(without + STACKS, "/home/me") == "model.py:12 in forward"  # asked twice: the last time


@pytest.mark.parametrize("stacks", ["", "Thread 0x1 (most recent call first):\n", "Thread 0x1", "\0\n  File"])
def test_stacks_without_a_line_of_the_users_have_no_location(stacks: str) -> None:
    assert innermost_line(stacks, "/home/me") == ""


def test_a_process_that_does_not_dump_its_stacks_is_left_alone(tmp_path: Path) -> None:
    assert location(os.getpid(), tmp_path / "stacks", str(tmp_path)) == ""


@pytest.mark.parametrize("isolation", ["auto", "guard"])
@pytest.mark.first_case
def test_a_trial_that_hangs_says_at_which_line(tmp_path: Path, isolation: Literal["auto", "guard"]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "def evaluate():\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(1000)\n"
        "evaluate()\n"
    )
    (tmp_path / "work").mkdir()
    target = Target.from_command([str(script)])
    setup = TrialSetup(target=target, work_folder=tmp_path / "work", isolation=isolation)
    with TrialProcess(setup) as trial:
        trial.spawn()
        until = time.monotonic() + BEGIN_SECONDS
        while "begun" not in trial.log_path.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(TrialHangs, match=r"it hangs at train\.py:5 in evaluate"):
            trial.start(1.0)
