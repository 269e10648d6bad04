"""Trials of one script draw the same numbers, whatever it leaves unseeded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Python

DRAWS = """
import sys, json, random, time
from flatout.script.seeds import TrialSeeds
seeds = TrialSeeds()
seeds.install()
import numpy, torch
code = '''
drawn = [
    random.random(), random.Random().random(), random.Random(3).random(),
    float(numpy.random.default_rng().random()), float(numpy.random.RandomState().rand()), float(numpy.random.rand()),
    float(numpy.random.default_rng(7).random()), float(torch.rand(())),
]
random.seed(); drawn.append(random.random())
numpy.random.seed(int(time.time())); drawn.append(float(numpy.random.rand()))
torch.manual_seed(int(time.time() * 1000)); drawn.append(float(torch.rand(())))
torch.seed(); drawn.append(float(torch.rand(())))
torch.manual_seed(5); drawn.append(float(torch.rand(())))
import tempfile; tempfile.mkdtemp()
'''
exec(compile(code, "train.py", "exec"))
print(json.dumps([drawn, seeds.unseeded]))
"""


@pytest.mark.slow
def test_unseeded_generators_repeat_and_seeded_ones_stay_as_they_are(tmp_path: Path, python: Python) -> None:
    """Once in a process that loads its libraries afterwards, and once in one that has them."""
    (tmp_path / "draws.py").write_text(DRAWS)
    runs = [subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True)]
    runs.append(python("draws.py", cwd=tmp_path))
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    (drawn, unseeded), (again, _) = (json.loads(run.stdout) for run in runs)
    assert drawn == again
    assert len(set(drawn)) == len(drawn)
    import random

    import numpy
    import torch

    assert drawn[2] == random.Random(3).random()
    assert drawn[6] == numpy.random.default_rng(7).random()
    assert drawn[-1] == float(torch.rand((), generator=torch.Generator().manual_seed(5)))
    assert any(place.startswith("numpy.random.default_rng at train.py:") for place in unseeded)
    assert any(place.startswith("torch.manual_seed at train.py:") for place in unseeded)
    assert not any("tempfile" in place for place in unseeded)


@pytest.mark.slow
def test_a_repetition_with_moved_seeds_draws_other_numbers_everywhere(tmp_path: Path, python: Python) -> None:
    for moved in (0, 1, 2):
        (tmp_path / f"draws{moved}.py").write_text(DRAWS.replace("TrialSeeds()", f"TrialSeeds(moved={moved})"))
    runs = [python(f"draws{moved}.py", cwd=tmp_path) for moved in (0, 1, 2)]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stderr
    drawn = [json.loads(run.stdout)[0] for run in runs]
    import torch

    assert drawn[1][-1] == float(torch.rand((), generator=torch.Generator().manual_seed(6)))
    assert len({number for run in drawn for number in run}) == 3 * len(drawn[0])
