"""The parent's end of a trial, with scripts that ask for something of their surroundings."""

from __future__ import annotations

from pathlib import Path

from flatout.script.entry import Target
from flatout.tune.trial_process import TrialProcess, TrialSetup

LOOP = """
import os, sys, torch
{before}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""


def started(folder: Path, before: str, terminal_size: tuple[int, int] | None) -> str:
    """What a script printed until its first step."""
    script = folder / "train.py"
    script.write_text(LOOP.format(before=before))
    setup = TrialSetup(
        target=Target.from_command([str(script)]), work_folder=folder, isolation="auto", terminal_size=terminal_size
    )
    with TrialProcess(setup) as trial:
        trial.start(120)
    return trial.log_tail()


def test_a_script_that_measures_its_terminal_finds_one(tmp_path: Path) -> None:
    before = "print(os.popen('stty size').read().split(), os.isatty(0), flush=True)"
    assert started(tmp_path, before, (31, 117)) == "['31', '117'] True"


def test_who_reads_from_a_trials_terminal_gets_the_end_of_input(tmp_path: Path) -> None:
    before = "print(repr(sys.stdin.readline()), repr(sys.stdin.readline()), flush=True)"
    assert started(tmp_path, before, (24, 80)) == "'' ''"
    assert started(tmp_path, before, None) == "'' ''"
