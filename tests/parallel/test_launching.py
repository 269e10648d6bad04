"""Jobs of several ranks: what is printed, what fails and how, and that nothing is left of them.

The ranks import no torch, and meet at no store, but for the tests that are marked slow.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flatout.errors import MachineError, UsageError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching import leader, local_ranks, output
from flatout.parallel.launching.events import Event, RankFailed, RanksHang
from flatout.parallel.launching.launch import launch
from flatout.report.launch_text import event_text

Job = Callable[..., tuple[int, list[Event]]]


class NoStore:
    """Ranks that import no torch need none."""

    def __init__(self, listener: object, **_: object) -> None:
        vars(self)["listener"] = listener
        listener.close()  # type: ignore[attr-defined]

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """(script, **fields of Launch) -> exit status and events."""
    monkeypatch.setattr(leader, "Store", NoStore)
    monkeypatch.setattr(local_ranks, "LEFTOVER_SECONDS", 0.2)

    def run(script: str, **fields: object) -> tuple[int, list[Event]]:
        path = tmp_path / "train.py"
        path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script))
        events: list[Event] = []
        request = Launch(command=(sys.executable, "-S", str(path)), **fields)  # type: ignore[arg-type]
        status = launch(request, tell=events.append)
        return status, events

    return run


def told(events: list[Event]) -> list[str]:
    return [event_text(event) for event in events]


# output


def test_lines_of_ranks_are_whole_and_in_order(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    status, events = job("for i in range(20000): print(rank, i, 'x' * (i % 80))", nproc_per_node=3)
    assert (status, events) == (0, [])
    lines = capfd.readouterr().out.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {rank} {i} {'x' * (i % 80)}" for i in range(20000)]
    assert len(lines) == 60000


def test_streams_stay_apart_and_bytes_that_are_no_text_survive(
    job: Job, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = r"""
    sys.stdout.buffer.write(b"\xff\xfe \r\n"); sys.stdout.buffer.write(b"without an end")
    sys.stderr.write("to stderr\n")
    """
    assert job(script, nproc_per_node=2)[0] == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == sorted(
        line for rank in (b"[0] ", b"[1] ") for line in (rank + b"\xff\xfe ", rank + b"without an end")
    )
    assert sorted(err.splitlines()) == [b"[0] to stderr", b"[1] to stderr"]


def test_one_rank_writes_for_itself(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert job("print('alone', os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")[0] == 0
    assert capfd.readouterr().out == "alone 1 0\n"


def test_only_the_first_rank_prints_where_that_is_wanted(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert job("print('loss', rank); print('why', file=sys.stderr)", nproc_per_node=2, stdout_of="first")[0] == 0
    out, err = capfd.readouterr()
    assert (out, sorted(err.splitlines())) == ("loss 0\n", ["[0] why", "[1] why"])


def test_a_progress_bar_is_a_line_when_it_is_done(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    script = r"""
    for share in range(0, 101, 10): print(f"\r{share}%", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    """
    assert job(script, nproc_per_node=2)[0] == 0
    lines = capfd.readouterr().err.splitlines()
    assert {lines.count("[0] 100%"), lines.count("[1] 100%")} == {1}
    assert len(lines) <= 4  # and at most its first state


def piped(tmp_path: Path, *writes: bytes) -> bytes:
    """What comes out where a rank writes this, each read by itself."""
    shown = tmp_path / "shown"
    reading, writing = os.pipe()
    with shown.open("wb") as file:
        stream = output.Stream(reading, output.Sink(file.fileno(), None), b"[0] ")
        for data in writes:
            os.write(writing, data)
            while select.select([reading], [], [], 0)[0]:
                time.sleep(0.001)
        os.close(writing)
        stream.thread.join(timeout=60)
    return shown.read_bytes()


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        ((b"\r0%\r100%", b"\n"), b"[0] 100%\n"),  # a bar that is read when it is done already
        ((b"\r0%\r100%", b"\nnext\n"), b"[0] 100%\n[0] next\n"),
        ((b"\r0%", b"\r100%", b"\n"), b"[0] 0%\n[0] 100%\n"),
        ((b"\r0%", b"\r100%"), b"[0] 0%\n[0] 100%\n"),  # without an end
        ((b"\r100%",), b"[0] 100%\n"),
        ((b"\r100%\n", b"100%\n"), b"[0] 100%\n[0] 100%\n"),  # two lines, not two states
    ],
)
def test_the_state_of_a_bar_is_written_once(tmp_path: Path, writes: tuple[bytes, ...], shown: bytes) -> None:
    assert piped(tmp_path, *writes) == shown


def test_what_nobody_reads_keeps_no_signal_from_being_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "BLOCKED_SECONDS", 0.05)
    monkeypatch.setattr(output, "HURRIED_SECONDS", 0.05)
    monkeypatch.setattr(output, "IDLE_SECONDS", 60.0)
    unread, stderr = os.pipe()
    of_rank, rank = os.pipe()
    out = output.Output(stdout=stderr, stderr=stderr)
    with out.between_lines() as readable:
        assert readable
    stream = out.follow(of_rank, error=True, prefix=b"[0] ")
    os.set_blocking(rank, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(rank, b"x" * 99 + b"\n")
    while not stream.writes:
        time.sleep(0.01)
    with out.between_lines() as readable:
        assert not readable
    out.drain(hurried=lambda: True)
    for descriptor in (unread, rank):  # which ends the thread
        os.close(descriptor)
    stream.thread.join()
    os.close(stderr)


def test_a_process_outside_that_goes_on_talking_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "TALK_SECONDS", 0.1)
    of_rank, rank = os.pipe()
    with (tmp_path / "out").open("wb") as file:
        out = output.Output(stdout=file.fileno(), stderr=file.fileno())
        stream = out.follow(of_rank, error=False, prefix=b"")
        talker = subprocess.Popen(["sh", "-c", "while sleep 0.05; do echo x; done"], stdout=rank)
        os.close(rank)
        out.drain()
        assert stream.thread.is_alive()
        talker.kill()
        talker.wait()
        stream.thread.join()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    (tmp_path / "x.py").write_text(
        "import os, sys\nprint('x', flush=True)\nopen('done' + os.environ['RANK'], 'w').close()\n"
    )
    command = f"exec '{sys.executable}' -m flatout launch --nproc-per-node 2 x.py {closed}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def test_a_job_goes_on_where_nobody_reads_what_is_said_of_it(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import os, sys\nsys.exit(3 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n")
    words = [sys.executable, "-m", "flatout", "launch", "--nproc-per-node", "2", "--max-restarts", "1", "x.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    unread, stderr = os.pipe()
    os.close(unread)
    done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    assert done.returncode == 0


def test_ranks_learn_who_they_are_and_share_the_cores(
    job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local_ranks, "usable_cores", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS EXTRA"
    script = f"print([os.environ[name] for name in {names.split()!r}])"
    assert job(script, nproc_per_node=2, variables=(("EXTRA", "1"),))[0] == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"[{rank}] ['2', '{rank}', '2', '0', '127.0.0.1', '2', '1']" for rank in range(2)
    ]


def test_the_users_own_number_of_threads_stays(
    job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    job("print(os.environ['OMP_NUM_THREADS'])", nproc_per_node=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 3", "[1] 3"]


# failures


def test_a_rank_that_raises_is_named_and_the_others_are_ended(job: Job, tmp_path: Path) -> None:
    script = """
    (open(f"{os.path.dirname(__file__)}/pid{rank}", "w")).write(str(os.getpid()))
    if rank == 1:
        raise ValueError("bad")
    time.sleep(1000)
    """
    status, events = job(script, nproc_per_node=2)
    assert status == 1
    assert told(events) == [
        f"rank 1 failed with exit status 1: ValueError: bad ({tmp_path / 'train.py'}, line 6); the others are ended"
    ]
    assert not psutil.pid_exists(int((tmp_path / "pid0").read_text()))


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        ("os._exit(3)", 3, "rank 1 failed with exit status 3; the others are ended"),
        ("sys.exit('no')", 1, "rank 1 failed with exit status 1; the others are ended"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL (out of memory? see: dmesg, or the memory "),
        ("os.kill(os.getpid(), 11)", 139, "rank 1 was killed by SIGSEGV (a crash in native code; "),
    ],
)
def test_the_exit_status_is_that_of_the_rank(job: Job, end: str, status: int, text: str) -> None:
    code, events = job(f"if rank == 1: {end}\ntime.sleep(1000)", nproc_per_node=2)
    assert code == status
    assert len(events) == 1
    assert event_text(events[0]).startswith(text)


def test_nothing_is_left_of_what_ranks_started(job: Job, tmp_path: Path) -> None:
    script = """
    import subprocess
    if rank == 1:
        for more in ({}, {"start_new_session": True}):
            child = subprocess.Popen(["sleep", "1000"], **more)
            open(f"{os.path.dirname(__file__)}/children", "a").write(f"{child.pid}\\n")
        raise KeyError("x")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    """
    status, _ = job(script, nproc_per_node=2, grace_seconds=0.3)
    assert status == 1
    assert [pid for pid in (tmp_path / "children").read_text().split() if psutil.pid_exists(int(pid))] == []


def test_ranks_start_again_and_say_so(job: Job, tmp_path: Path) -> None:
    script = """
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 and again < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    status, events = job(script, nproc_per_node=2, max_restarts=3)
    assert status == 0
    assert told(events) == [f"rank 1 was killed by SIGKILL; restart {number} of 3" for number in (1, 2)]


def test_a_job_that_fails_after_its_last_restart_ends(job: Job) -> None:
    status, events = job("sys.exit(7 * (rank == 0))", nproc_per_node=2, max_restarts=1)
    assert status == 7
    assert [event.again is None for event in events if isinstance(event, RankFailed)] == [False, True]


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_says_only_why_it_ended(job: Job, quiet: bool) -> None:
    _, events = job("sys.exit(1)", nproc_per_node=1, max_restarts=1, quiet=quiet)
    assert len(events) == (1 if quiet else 2)


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "Store", NoStore)
    with pytest.raises(MachineError, match="cannot start /no/such: No such file or directory; each rank is a process"):
        launch(Launch(command=("/no/such",), nproc_per_node=2))


# hanging

BEATS = """
import faulthandler, sys
sys.path[:0] = [{root!r}, *{path!r}]
from flatout.parallel.heartbeat import heartbeat
def wait():
    time.sleep(1000)
folder = os.path.dirname(__file__)
open(f"{{folder}}/here{{rank}}", "w").close()
while not os.path.exists(f"{{folder}}/here{{1 - rank}}"):
    time.sleep(0.01)
for step in range(3):
    heartbeat().write(step, inside=True)
    heartbeat().write(step + 1, inside=False)
"""


@pytest.mark.slow
def test_the_rank_that_keeps_the_others_waiting_is_named(
    job: Job, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root, path = str(Path(__file__).parents[2]), [entry for entry in sys.path if "site-packages" in entry]
    script = BEATS.format(root=root, path=path) + "if rank == 0: heartbeat().write(3, inside=True)\nwait()"
    status, events = job(script, nproc_per_node=2, hang_seconds=2.0, grace_seconds=5)
    assert status == 124
    (hang,) = events
    assert isinstance(hang, RanksHang)
    assert (hang.ranks, hang.step, hang.where) == ((1,), 3, f"{tmp_path / 'train.py'}, line 8")
    assert "rank 1 hangs: no step for " in event_text(hang)
    assert "in wait" in capfd.readouterr().err


def test_scripts_that_never_beat_are_not_judged(job: Job) -> None:
    assert job("time.sleep(0.5)", nproc_per_node=2, hang_seconds=0.1) == (0, [])


# signals: of the command, in a process of its own

READY = """
import os, signal, sys, time
def save(number, frame):
    print("saved", os.environ["RANK"]); sys.exit(0)
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, save if len(sys.argv) == 1 else signal.SIG_IGN)
print("ready", os.getpid())
while True:
    time.sleep(0.1)
"""


class Started:
    """`flatout launch` with two ranks that are ready, and the numbers of their processes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "ready.py").write_text(READY)
        words = [sys.executable, "-m", "flatout", "launch", "--nproc-per-node", "2", "ready.py", *arguments]
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ranks = [int(self.process.stdout.readline().split()[-1]) for _ in range(2)]

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_ranks_and_is_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    job = Started(tmp_path)
    job.process.send_signal(number)
    code, out, err = job.ended()
    assert (code, sorted(out.splitlines())) == (128 + number, ["[0] saved 0", "[1] saved 1"])
    assert err == f"[flatout] {number.name}: waiting for the ranks to end; once more: kill them\n"


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(job: Job, tmp_path: Path) -> None:
    """Whoever sends it, such as a scheduler, sends no second one."""
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{os.path.dirname(__file__)}/up{rank}", "w").close()
    if rank == 0:
        while not os.path.exists(f"{os.path.dirname(__file__)}/up1"):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1000)
    """
    status, events = job(script, nproc_per_node=2, grace_seconds=0.3)
    assert status == 128 + signal.SIGTERM
    assert told(events) == ["SIGTERM: waiting for the ranks to end; once more: kill them", "killing the ranks"]


@pytest.mark.slow
def test_ranks_that_hang_after_ctrl_c_are_ended(job: Job) -> None:
    root, path = str(Path(__file__).parents[2]), [entry for entry in sys.path if "site-packages" in entry]
    script = BEATS.format(root=root, path=path) + (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "if rank == 0: os.kill(os.getppid(), signal.SIGINT)\n"
        "if rank == 0: heartbeat().write(3, inside=True)\nwait()"
    )
    status, events = job(script, nproc_per_node=2, hang_seconds=2.0, grace_seconds=5)
    assert status == 128 + signal.SIGINT
    assert told(events)[0] == "SIGINT: waiting for the ranks to end; once more: kill them"
    assert isinstance(events[1], RanksHang)
    assert len(events) == 2


def test_a_second_signal_kills(tmp_path: Path) -> None:
    job = Started(tmp_path, "stubborn")
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr is not None
    job.process.stderr.readline()  # it has been passed on
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.ended()
    assert (code, err) == (130, "[flatout] killing the ranks\n")
    assert not any(map(psutil.pid_exists, job.ranks))


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    job = Started(tmp_path, "stubborn")
    job.process.kill()
    job.ended()  # returns once the ranks have closed the pipes
    while any(map(_runs, job.ranks)):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


# requests


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"command": ()}, "the command is empty"),
        ({"nproc_per_node": 0}, "nproc_per_node is 0; it is from 1 to 1024"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"nnodes": 2}, "2 machines, and no rendezvous"),
        ({"nnodes": 2, "min_nnodes": 3, "rendezvous": ("a", 1)}, "min_nnodes is 3; it is from 1 to 2"),
        ({"nnodes": 2, "rendezvous": ("a", 70_000)}, "the rendezvous is 'a', port 70000"),
        ({"node_rank": 1}, "node_rank is 1"),
        ({"node_rank": "0"}, "node_rank is '0'; machines are numbered from 0 to 0"),
        ({"hang_seconds": float("nan")}, "hang_seconds is nan"),
        ({"hang_seconds": "3"}, "hang_seconds is '3'"),
        ({"nproc_per_node": "2"}, "nproc_per_node is '2'"),
        ({"max_restarts": 1.5}, "max_restarts is 1.5"),
        ({"command": "python x.py"}, "the command is 'python x.py'"),
        ({"command": ("python", "a\0b")}, "a word of the command is"),
        ({"variables": (("A=B", "x"),)}, "the variable 'A=B' cannot be set"),
        ({"nnodes": 2, "rendezvous": ("a..b", 29500)}, "the rendezvous' host is 'a..b'"),
        ({"nnodes": 2, "rendezvous": ("0.0.0.0", 29500)}, "the rendezvous' host is 0.0.0.0; that is every address"),
        ({"nnodes": 2, "rendezvous": ("::", 29500)}, "the rendezvous' host is ::"),
    ],
)
def test_requests_that_cannot_be_met(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Launch(**{"command": ("python",), **fields})  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_train_together(tmp_path: Path) -> None:
    script = """
    import torch
    from torch import distributed
    distributed.init_process_group("gloo")
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    print(int(ones))
    distributed.destroy_process_group()
    """
    (tmp_path / "sum.py").write_text(textwrap.dedent(script))
    words = [sys.executable, "-m", "flatout", "launch", "--nproc-per-node", "2", "sum.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2", "[1] 2"])
