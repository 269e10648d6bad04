"""The parent's end of a trial, with scripts that ask for something of their surroundings."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.errors import TrialError
from flatout.script.entry import Target
from flatout.script.numerics import NumericsRequest
from flatout.script.trial import process as trial_process
from flatout.script.trial.answers import TrialEnded, TrialHangs, explain_end
from flatout.script.trial.commands import Patience
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import Starts, TrialSetup
from flatout.tuning.numerics import Numerics

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
    return trial.log_path.read_text().strip()


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_script_that_measures_its_terminal_finds_one(
    tmp_path: Path, forked: bool, request: pytest.FixtureRequest
) -> None:
    if forked:
        request.getfixturevalue("forked_trials")
    before = "print(os.popen('stty size').read().split(), os.isatty(0), flush=True)"
    assert started(tmp_path, before, (31, 117)) == "['31', '117'] True"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_who_reads_from_a_trials_terminal_gets_the_end_of_input(tmp_path: Path) -> None:
    before = "print(repr(sys.stdin.readline()), repr(sys.stdin.readline()), flush=True)"
    assert started(tmp_path, before, (24, 80)) == "'' ''"
    assert started(tmp_path, before, None) == "'' ''"


SURROUNDINGS = """
import errno, multiprocessing, pathlib, socket, subprocess, urllib.request
import torch.multiprocessing

def answer(queue):
    queue.put("from the fork server")

def use_surroundings():
    socket.create_server(("127.0.0.1", 28767))
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path("train.lock").touch()
    pathlib.Path("/dev/shm/flatout-test-left").touch()
    try:
        urllib.request.urlopen("http://192.0.2.1/metrics", data=b"x", timeout=5)
    except OSError as error:
        print(error.reason.strerror)
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=answer, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    for strategy in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(strategy)
        loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
        print(torch.cat(list(loader)).sum().item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_what_scripts_ask_of_their_surroundings_works_in_two_trials_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    body = LOOP.format(before="use_surroundings()").replace("\n", "\n    ")
    script.write_text(f"import os, sys, torch\n{SURROUNDINGS}\nif __name__ == '__main__':\n    {body}")
    work = tmp_path / "work"
    work.mkdir()
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=work)
    with TrialProcess(setup) as first, TrialProcess(setup) as second:
        for trial in (first, second):
            trial.start(120)
        seen = ["Network is unreachable", "from the fork server", "28.0", "28.0"]
        assert [line for line in first.log_path.read_text().splitlines() if line in seen] == seen
        assert first.isolation["network"] == "loopback"
    assert second.log_path.read_text() == first.log_path.read_text()
    assert [path.name for path in tmp_path.iterdir() if path != work] == ["train.py"]
    assert not Path("/dev/shm/flatout-test-left").exists()


OPTIMIZER_PER_PARAMETER = """
import time, torch
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
optimizers = {}
for step in range(60):
    time.sleep(0.05)
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        if parameter not in optimizers:
            optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
        optimizers[parameter].step()
    model.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("watched", [False, True])
def test_the_first_steps_that_are_timed_are_whole_where_each_parameter_has_an_optimizer(
    tmp_path: Path, watched: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OPTIMIZER_PER_PARAMETER)
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        trial.start(120)
        if watched:
            assert (trial.breakdown([], steps=2).step_seconds or 0.0) >= 0.05
        else:
            window = trial.window([], settle=1, steps=2)
            assert min(window.settle_seconds + window.seconds) >= 0.05


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_an_end_without_pythons_own_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before="") + "    if step == 4: os._exit(3)\n")
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        trial.start(120)
        with pytest.raises(TrialEnded) as ended:
            trial.window([], settle=0, steps=9)
    assert (ended.value.status, ended.value.steps) == (3, 5)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(("steps", "made", "status"), [(6, 6, None), (40, 10, 7)])
@pytest.mark.first_case
@pytest.mark.slow
def test_a_command_that_holds_from_the_first_line_has_one_answer_and_the_scripts_end_if_that_comes_first(
    tmp_path: Path, steps: int, made: int, status: int | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before="") + "sys.exit(7)\n")
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        answer, end = trial.watch({"do": "determinism", "steps": steps, "deterministic": True}, 120)
        assert trial.isolation["network"] == "loopback"
    assert answer["steps"] == made
    assert status == (end.status if end is not None else None)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_script_that_fails_for_want_of_the_network_is_told_how_to_have_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import socket\nsocket.create_connection(('192.0.2.1', 80))\n")
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial, pytest.raises(TrialEnded) as ended:
        trial.start(120)
    assert "pass --allow-network" in str(explain_end(ended.value, "train.py"))


@pytest.mark.parametrize(
    ("status", "steps", "note", "said"),
    [
        (2, 0, "", "t.py exited with code 2 before its first step, without any lever: bye; see what it says without"),
        (
            3,
            1,
            "",
            "t.py exited with code 3 after 1 step, without any lever, and the last line that it printed is 'bye'",
        ),
        (3, 1, "", "; flatout run turns levers on after a script's first step"),
        (3, 2, "", "if that code is no failure, let it run more steps while it is tuned"),
        (0, 2, "it became another program: sh", "t.py ended after 2 steps (it became another program: sh)"),
    ],
)
def test_an_early_end_is_told_with_its_exit_code_and_a_remedy(status: int, steps: int, note: str, said: str) -> None:
    end = TrialEnded(status, "", max(0, steps - 1), note, script_steps=steps, last_line="bye")
    assert said in str(explain_end(end, "t.py", levers=True))
    assert "a step after the first" in str(explain_end(end, "t.py", needed="a step after the first")) or not steps


def test_a_failure_is_said_without_dangling_marks() -> None:
    error = "Traceback:\n  File x\nValueError: boom\n"
    said = str(explain_end(TrialEnded(1, error, 0), "exc.py"))
    assert said == "exc.py failed by itself: ValueError: boom\n" + error.strip()
    assert "without any lever: ValueError" in str(explain_end(TrialEnded(1, error, 0), "exc.py", levers=True))
    assert "lever" not in str(explain_end(TrialEnded(3, "", 2), "exc.py"))


@pytest.mark.parametrize(
    ("status", "error", "by_itself"),
    [(0, "", True), (7, "", True), (1, "Traceback (most recent call last):\nKeyError: 1\n", False), (-9, "", False)],
)
def test_a_script_comes_to_its_end_with_any_exit_code(status: int, error: str, by_itself: bool) -> None:
    assert TrialEnded(status, error, 50).by_itself == by_itself


@pytest.mark.parametrize(
    ("error", "headline"),
    [
        ("", ""),
        ("no module named train", "no module named train"),
        (
            "Traceback (most recent call last):\n  File 'a.py', line 3, in f\n    g()\nKeyError: 'x'\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File 'a.py', line 9, in <module>\n    f()\n    ~^^\n"
            "RuntimeError: CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA\n",
            "RuntimeError: CUDA error: out of memory",
        ),
    ],
)
def test_a_long_message_has_a_headline(error: str, headline: str) -> None:
    assert TrialEnded(1, error, 0).headline == headline


PLAIN = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("seconds", "cores", "fit"), [(6.0, 1.0, True), (6.0, 1.9, False), (0.4, 1.0, False), (None, None, False)]
)
def test_long_starts_that_leave_cores_idle_go_side_by_side(
    seconds: float | None, cores: float | None, fit: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flatout.script.trial.setup.usable_cores", lambda: 2)
    server: Any = SimpleNamespace(is_ready=lambda: True)
    setup = TrialSetup(
        target=Target(path="train.py"),
        work_folder=tmp_path,
        fork_server=server,
        starts=Starts(seconds=seconds, cores=cores),
    )
    assert setup.starts_overlap is fit
    assert not replace(setup, allow_network=True).starts_overlap
    assert replace(setup, fork_server=None).starts_overlap


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_plain_start_is_timed_with_the_cores_that_it_kept_busy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(0.5)\n" + PLAIN)
    setup = TrialSetup(target=Target(path=str(tmp_path / "train.py")), work_folder=tmp_path)
    with setup.trial() as trial:
        trial.start(120)
        assert setup.starts.seconds == trial.start_seconds
        assert 0 < (setup.starts.cores or 0.0) < 4
        assert trial.waiting_seconds > 0.1  # it slept for 0.5 s; several threads may have made up for some of that


SHORT_LAST = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(4 * 64 + 4, 64)), 64)
for epoch in range(1000):
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_peak_is_never_that_of_an_epochs_short_last_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHORT_LAST)
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path, isolation="auto")
    with TrialProcess(setup) as trial:
        trial.start(120)
        peaks = set()
        for _ in range(5):  # epochs of five steps: one of them starts at each
            peaks.add(trial.peak([]).peak_bytes)
    assert len(peaks) == 1


GAN = """
import torch
from torch import nn
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
of_critic = torch.optim.Adam(critic.parameters(), 1e-2)
of_generator = torch.optim.Adam(generator.parameters(), 1e-2)
for step in range(40):
    fake = generator(torch.randn(8, 4))
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(8, 3)).mean()).backward()
    of_critic.step()  # the graph of `fake` is alive, and its weights must not change
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_script_first_waits_for_commands_where_no_graph_of_a_later_backward_pass_is_alive(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GAN)
    setup = TrialSetup(
        target=Target.from_command([str(tmp_path / "train.py")]), work_folder=tmp_path, shared=(tmp_path,)
    )
    reference = NumericsRequest(steps=6, role="reference", folder=str(tmp_path), checks=(0, 2, 4))
    nudged = replace(reference, role="checked", nudge="rounding")
    for request in (reference, nudged):
        with TrialProcess(setup) as trial:
            trial.start(120)
            found = Numerics.from_answer(trial.numerics([], request))
    assert found.steps == 6
    assert [one.step for one in found.checks] == [0, 2, 4]


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    ("before", "fails"),
    [
        ("sys.excepthook = lambda *error: print('shown in my own way', file=sys.stderr)", "raise ValueError('broken')"),
        ("", "exec('try:\\n  raise ValueError(1, \"broken\")\\nexcept ValueError:\\n  sys.exit(1)')"),
    ],
    ids=["a hook of its own", "an exit in a handler"],
)
@pytest.mark.first_case
def test_a_failure_is_no_end_however_the_script_shows_it(tmp_path: Path, before: str, fails: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before=before) + f"    if step == 4: {fails}\n")
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        trial.start(120)
        with pytest.raises(TrialEnded) as ended:
            trial.window([], settle=0, steps=8)
    assert (ended.value.status, ended.value.by_itself) == (1, False)
    assert "broken" in ended.value.headline


def test_a_process_that_computes_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, computed = [0.0], [0.0]
    monkeypatch.setattr("flatout.script.trial.commands.time.monotonic", lambda: now[0])

    def passes(seconds: float, busy: float) -> None:
        now[0] += seconds
        computed[0] += busy

    patience = Patience(10.0, lambda: computed[0])
    for _ in range(3):  # an evaluation, say
        passes(10.0, 5.0)
        assert not patience.is_over()  # it is looked at
        passes(2.0, 1.0)
        assert not patience.is_over()
    passes(10.0, 9.0)
    assert not patience.is_over()
    passes(2.0, 0.1)
    assert patience.is_over()
    assert patience.waited_seconds == 48.0
    endless = Patience(10.0, lambda: now[0])
    began = now[0]
    while not endless.is_over():
        passes(1.0, 1.0)
        assert now[0] - began < 120
    assert now[0] - began > 100
    idle = Patience(10.0, None)
    passes(10.0, 0.0)
    assert idle.is_over()


def test_each_step_has_the_patience_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more, although the process computes."""
    trial = TrialProcess(TrialSetup(target=Target(path="train.py"), work_folder=tmp_path))
    monkeypatch.setattr(trial, "start", lambda seconds: None)
    monkeypatch.setattr(trial, "_computed_seconds", lambda: pytest.fail("it was asked whether it computes"))
    trial.start_within(0.3)
    trial._command_write, trial._answer_read = os.pipe()[1], os.pipe()[0]
    with pytest.raises(TrialHangs, match="no step for 0 s"):
        trial.operators([])


def test_a_cache_that_cannot_be_made_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial ended at it, with no word of it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    setup = TrialSetup(target=Target.from_command(["train.py"]), work_folder=tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    assert setup.written == (tmp_path / "shared",)
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "folder"))
    assert setup.written == (tmp_path / "folder" / "inductor", tmp_path / "shared")


BECOMES_ANOTHER = "os.execvp('{program}', ['sh', '-c', 'sleep 1000'])"


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("program", ["sh", "/bin/sh"])
@pytest.mark.first_case
def test_a_script_that_becomes_another_program_is_not_waited_for(tmp_path: Path, program: str) -> None:
    with pytest.raises(TrialError, match=r"train.py becomes another program before its first step: /\S*/sh -c 'sleep"):
        started(tmp_path, BECOMES_ANOTHER.format(program=program), None)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_script_that_becomes_another_program_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before="") + f"    if step == 4: {BECOMES_ANOTHER.format(program='sh')}\n")
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        trial.start(120)
        with pytest.raises(TrialEnded) as ended:
            trial.window([], settle=0, steps=9)
    assert (ended.value.status, ended.value.steps) == (0, 5)
    assert "became another program" in ended.value.note


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_forks_become_other_programs_and_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    before = (
        "if os.fork() == 0: os.execvp('sh', ['sh', '-c', 'exit 5'])\n"
        "try: os.execvp('no-such-program', ['no-such-program'])\n"
        "except FileNotFoundError: print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"
    )
    assert started(tmp_path, before, None) == "5"


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_the_line_that_makes_an_optimizer_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before=""))
    setup = TrialSetup(target=Target.from_command([str(script)]), work_folder=tmp_path)
    with TrialProcess(setup) as trial:
        trial.start(120)
        (optimizer,) = trial.describe().optimizers
    assert optimizer.made_at == "train.py:5"


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_process_that_the_script_forks_ends_by_itself(tmp_path: Path) -> None:
    """It answers nobody: that the trial has ended without a step."""
    before = "if os.fork() == 0: sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"
    assert started(tmp_path, before, None) == "5"


def test_a_trial_is_closed_although_its_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has found in minutes counts for more; the folder of all trials is removed later."""

    def busy(folder: Path) -> None:
        raise TrialError(f"cannot remove {folder}: Device or resource busy")

    monkeypatch.setattr(trial_process, "cleanup", busy)
    trial = TrialProcess(TrialSetup(target=Target(path="train.py"), work_folder=tmp_path))
    trial._folder, trial._command_write, trial._answer_read = tmp_path, *os.pipe()
    trial._process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    trial.close()
    assert not trial.alive
