"""Trials that are forked from a process with torch in memory: the script sees a new process, and ends like one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.script.entry import Target
from flatout.script.numerics import NumericsRequest
from flatout.script.trial import fork_server as module
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.fork_server import KILLED, ForkServer
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.last_comparison import trials_as_used
from flatout.tuning.windows import FewSteps

STEPS = """
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(40):
    loss = (model(torch.randn(16, 8)) ** 2).mean() * random.random()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LIBCUDA = """
#include <stddef.h>
int cuDeviceGetCount(int *count) { *count = 1; return %d; }
"""
LOOKS = """
import sys
shown = {"numpy", "torch", "sympy", "tqdm", "torchgen", "torch._dynamo", "__mp_main__"} & set(sys.modules)
assert not shown, shown
import random
import tqdm
assert "torch" not in sys.modules
import torch.nn as nn
import torch
assert nn is torch.nn and torch.__spec__.name == "torch" and torch.__spec__.loader is torch.__loader__
assert sys.modules["__mp_main__"] is sys.modules["__main__"]
import sympy
assert torch.utils._sympy.functions.sympy is sympy
"""


class NewProcess(Exception):
    pass


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        assert server.is_ready(), server.obstacle
        yield server
        assert server.obstacle == ""


def trial(folder: Path, script: str, server: ForkServer | None) -> TrialProcess:
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "work").mkdir(exist_ok=True)
    target = Target(path=str(folder / "train.py"))
    return TrialProcess(TrialSetup(target=target, work_folder=folder / "work", fork_server=server))


@pytest.mark.slow
def test_a_script_sees_a_new_process(tmp_path: Path, server: ForkServer) -> None:
    with trial(tmp_path, LOOKS + STEPS, server) as forked:
        forked.start()
        assert forked.startup_seconds is not None
        assert forked.start_seconds is not None
        assert forked.startup_seconds == pytest.approx(forked.start_seconds + server.load_seconds)
        with pytest.raises(TrialEnded) as ended:
            forked.window([], settle=1, steps=1000)
    assert (ended.value.status, ended.value.steps) == (0, 40)


@pytest.mark.slow
def test_its_numbers_are_those_of_a_new_process(tmp_path: Path, server: ForkServer) -> None:
    found = []
    for way in (server, None):
        with trial(tmp_path, "import random, torch\n" + STEPS, way) as process:
            process.start()
            found.append(process.numerics([], NumericsRequest(steps=20)))
    forked, new = ({name: value for name, value in one.items() if "resident" not in name} for one in found)
    assert forked == new
    assert forked["unseeded"] == []


@pytest.mark.slow
def test_windows_are_compared_in_new_processes(tmp_path: Path, server: ForkServer) -> None:
    forked = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path, fork_server=server)
    assert forked.spared_seconds() == server.load_seconds > 0.0
    assert trials_as_used(forked, FewSteps(steps=5, compared=4)) is forked
    new = trials_as_used(forked)
    assert isinstance(new, TrialSetup)
    assert (new.fork_server, new.spared_seconds()) == (None, 0.0)


@pytest.mark.parametrize(
    ("before", "file", "obstacle"),
    [
        ("import os; os.environ['KMP_BLOCKTIME'] = '3'", "", "it changes the environment before it imports torch"),
        ("", "sympy.py", "the script's folder has a module 'sympy', which torch imports too"),
        ("", "colorsys.py", "the script's folder has a module 'colorsys', which torch imports too"),
        ("import sys; sys.path.insert(0, 'elsewhere')", "elsewhere/numpy.py", "its path leads to "),
    ],
)
@pytest.mark.first_case
def test_what_needs_a_process_of_its_own_gets_one(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch, before: str, file: str, obstacle: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    script = "import torch, random\n" + STEPS if "numpy" not in file else "import numpy\nimport torch, random\n" + STEPS

    def new_process(*_: Any, **__: Any) -> None:
        raise NewProcess

    monkeypatch.setattr("flatout.script.trial.process.subprocess.Popen", new_process)
    try:
        with trial(tmp_path, f"{before}\n{script}", server) as process, pytest.raises(NewProcess):
            process.start()
        assert server.obstacle is not None
        assert server.obstacle.startswith(obstacle)
    finally:
        server.obstacle = ""


@pytest.mark.slow
def test_a_script_that_sets_variables_for_torch_runs(tmp_path: Path, server: ForkServer) -> None:
    script = "import os; os.environ['KMP_BLOCKTIME'] = '3'\nimport torch, random\n" + STEPS
    try:
        with trial(tmp_path, script, server) as process:
            process.spawn()
            process.start()
            assert server.obstacle == "it changes the environment before it imports torch"
            assert process.startup_seconds == process.start_seconds
    finally:
        server.obstacle = ""


@pytest.mark.slow
def test_ends_are_told(tmp_path: Path, server: ForkServer) -> None:
    with trial(tmp_path, "import torch\nraise ValueError('no')", server) as process:
        with pytest.raises(TrialEnded) as ended:
            process.start()
        assert ended.value.headline == "ValueError: no"
    script = "import torch, random, os, signal\n" + STEPS.replace(
        "loss.b", "os.kill(os.getpid(), signal.SIGKILL); loss.b"
    )
    with trial(tmp_path, script, server) as process:
        with pytest.raises(Exception, match="SIGKILL"):
            process.start()
        assert not process.alive


def test_an_answer_that_nobody_read_is_passed_over(tmp_path: Path, server: ForkServer) -> None:
    with trial(tmp_path, "import random, torch\n" + STEPS, server) as process:
        process.start()
        assert process._process is not None
        server._answer({"poll": process._process.pid})
        module.socket.send_fds(server._connection, [b'{"poll": %d, "number": 0}' % process._process.pid], [])
        assert process.alive
        process._process.send_signal(signal.SIGKILL)
        assert process._process.wait(60) == KILLED


@pytest.mark.slow
def test_without_a_server_trials_are_new_processes(tmp_path: Path, server: ForkServer) -> None:
    with ForkServer() as other:
        other._process.kill()
        assert not other.is_ready()
        with trial(tmp_path, "import random, torch\n" + STEPS, other) as process:
            process.start()
            assert process.startup_seconds == process.start_seconds
    other.obstacle = ""  # it ended after it had been asked
    assert other.exit_code(1) == KILLED
    assert other.start(tmp_path, [], []) is None
    assert other.obstacle == "it ended"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("answer", "touched"), [(3, False), (0, True), (100, True)])
def test_a_loaded_driver_is_no_obstacle_until_it_was_started(tmp_path: Path, answer: int, touched: bool) -> None:
    """Torch's CUDA build loads libcuda.so as it is imported; 3: it was not initialised."""
    (tmp_path / "cuda.c").write_text(LIBCUDA % answer)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    asks = f"""
        import ctypes
        from flatout.script.trial import fork_server
        assert not fork_server._gpu_was_touched()
        ctypes.CDLL({str(library)!r})
        assert fork_server._gpu_was_touched() is {touched}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(asks)], check=True)
