"""`flatout run`, whole: documents, plans, terminals, places that cannot be written."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.cli import run as run_verb
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.script.entry import Target
from flatout.script.process_record import Place
from flatout.serve.run_folder import all_runs
from tests.processes import Python

TRAIN = """
    import os
    os.environ["OMP_NUM_THREADS"] = "1"
    import sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    def epoch(workers):
        for (x,) in DataLoader(TensorDataset(torch.randn(80, 3)), batch_size=4, shuffle=True, num_workers=workers):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item().hex())
    if __name__ == "__main__":
        for workers in (0, 1):
            epoch(workers)
        print(torch.get_num_threads(), torch.get_rng_state().sum().item(), sorted(model.state_dict()))
"""


@pytest.fixture
def run(tmp_path: Path, python: Python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(source, *options)`: `flatout run OPTIONS train.py` in a folder of its own; or without `flatout`.

    forked: from a process that has loaded torch; by default where the script loads it too.
    """

    def run(
        source: str,
        *options: str,
        flatout: bool = True,
        forked: bool | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        environment = {**os.environ, "FLATOUT_CACHE_DIR": str(tmp_path / ".cache"), **(env or {})}
        words = [*(["-m", "flatout", "run", *options] if flatout else []), "train.py"]
        if forked or (forked is None and "torch" in source):
            return python(*words, cwd=tmp_path, env=environment)
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)

    return run


Run = Callable[..., subprocess.CompletedProcess[str]]


def document(folder: Path, name: str = "flatout-run.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_watched_run_is_the_same_run(run: Run, tmp_path: Path, forked: bool) -> None:
    plain, watched = run(TRAIN, flatout=False, forked=forked), run(TRAIN, forked=forked)
    assert plain.returncode == 0
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, plain.stdout, plain.stderr)
    seen = document(tmp_path)
    assert (seen["steps"], seen["script"]) == (40, {"name": "train.py", "arguments": [], "status": 0})
    assert (seen["samples_per_step"], seen["tokens_per_step"]) == (4, None)
    assert seen["observed"]["step_kind"] == "optimizer"
    assert seen["observed"]["breakdown_seconds"].keys() >= {"data", "forward", "backward", "optimizer", "other"}
    assert 20 <= len(seen["measurement"]["samples_seconds"]) <= 39  # quick steps are timed several at a time
    assert (seen["applied"], seen["rolled_back"], seen["plan_notes"]) == ([], [], [])
    assert seen["machine"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("name", "status"), [("profiled", 0), pytest.param("many_compiled", 1, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_what_reads_or_compiles_frames_finds_the_scripts_own(name: str, status: int, run: Run, tmp_path: Path) -> None:
    odd = Path(__file__).parents[2] / "benchmarks" / "scripts" / "odd"
    shutil.copy(odd / "small.py", tmp_path)
    torchs_own = "import warnings; warnings.filterwarnings('ignore', '.*Profiler clears events')\n"  # of torch 2.11
    text = torchs_own + (odd / f"{name}.py").read_text()
    plain, watched = (run(text, flatout=flatout) for flatout in (False, True))
    timed = re.compile(
        r"^(USDT|ERROR):\d{4}-\d\d-\d\d .*\n", re.MULTILINE
    )  # lines of the profiler's own, with the time of day
    assert plain.returncode == watched.returncode == status
    assert timed.sub("", watched.stdout) == timed.sub("", plain.stdout)
    assert timed.sub("", watched.stderr) == timed.sub("", plain.stderr)


@pytest.mark.slow
def test_a_run_that_dies_of_memory_tells_who_held_it(run: Run, tmp_path: Path) -> None:
    source = f"""{TRAIN}
    kept = torch.ones(1 << 18)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    """
    plain, watched = run(source, flatout=False), run(source)
    assert plain.returncode == watched.returncode == 1
    assert watched.stdout == plain.stdout
    assert watched.stderr == plain.stderr
    death = document(tmp_path)["out_of_memory"]
    assert death["requested_bytes"] == 3 << 30
    assert death["categories"]["weights"] > 0
    held = {one["name"]: one["size_bytes"] for one in death["holders"]}
    assert held["kept"] == 1 << 20


def test_a_script_that_never_trains_is_told_so(run: Run, tmp_path: Path) -> None:
    assert run("print('hello')").stdout == "hello\n"
    seen = document(tmp_path)
    assert (seen["steps"], seen["observed"]) == (0, None)
    assert [finding["name"] for finding in seen["findings"]] == ["no-step"]
    assert "measurement" not in seen


@pytest.mark.slow
def test_exceptions_that_pass_through_our_wrappers_show_none_of_them(run: Run) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader
        class Model(torch.nn.Module):
            def forward(self, x):
                raise ValueError("forward")
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()
            @staticmethod
            def backward(context, gradient):
                raise ValueError("backward")
        class Data:
            def __len__(self):
                return 3
            def __getitem__(self, index):
                raise ValueError("data")
        def closure():
            raise ValueError("closure")
        w = torch.ones(1, requires_grad=True)
        torch.optim.SGD([w], 0.1).step()
        try:
            torch.nn.Sequential(Model())(w)
        except ValueError:
            try:
                Function.apply(w).backward()
            except ValueError:
                try:
                    torch.autograd.grad(Function.apply(w), w)
                except ValueError:
                    try:
                        for batch in DataLoader(Data()):
                            pass
                    except ValueError:
                        torch.optim.SGD([w], 0.1).step(closure)
    """
    plain, watched = run(source, flatout=False), run(source)
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)
    assert watched.stderr.count("Traceback") == 5
    assert "flatout" not in watched.stderr


def test_only_the_first_of_several_ranks_reports(run: Run, tmp_path: Path) -> None:
    assert run("print(1)", env={"RANK": "1"}).stdout == "1\n"
    assert not (tmp_path / "flatout-run.json").exists()
    assert run("print(1)", env={"RANK": "0"}).stdout == "1\n"
    assert (tmp_path / "flatout-run.json").exists()


CONVOLUTION = """
    import torch
    torch.manual_seed(0)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 3)
            self.head = torch.nn.Linear(4 * 6 * 6, 1)
        def forward(self, x):
            return self.head(self.convolution(x).view(-1, 4 * 6 * 6))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(6):
        loss = model(torch.randn(2, 3, 8, 8)).mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    print(model.convolution.weight.stride())
"""


def test_a_run_that_dies_under_a_plan_names_the_lever_and_the_command_without_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flatout.toml").write_text(Plan(memory_format="channels_last", allocator="retain").to_toml())
    planned = run(CONVOLUTION, "--trust-plan", "--no-report")
    assert planned.returncode == 1
    trace, _, message = planned.stderr.partition("flatout: ")
    assert "RuntimeError: view size is not compatible" in trace
    assert message.splitlines() == [
        "the script failed in the model under its plan (channels_last, malloc retains memory). "
        "If the plan is the cause, run",
        "    flatout run --trust-plan --no-report --without memory_format train.py    (without channels_last)",
        "    flatout run --no-plan --no-report train.py    (without the plan)",
    ]
    without = run(CONVOLUTION, "--trust-plan", "--no-report", "--without", "memory_format")
    assert (without.returncode, without.stderr) == (0, "")


@pytest.mark.slow
def test_the_users_own_error_is_theirs_with_a_plan_too(run: Run, tmp_path: Path) -> None:
    source = CONVOLUTION.replace("optimizer.step()", "optimizer.step(); x = torch.randn(1, 9, 9); model(x)")
    (tmp_path / "flatout.toml").write_text(Plan(memory_format="channels_last").to_toml())
    plain, planned = run(source, flatout=False), run(source, "--trust-plan")
    trace, _, message = planned.stderr.partition("flatout: ")
    assert (planned.returncode, trace) == (1, plain.stderr)
    assert message.startswith("the script failed in the model under its plan (channels_last). If the plan is the cause")


NET = "import torch\nclass Net(torch.nn.Sequential):\n    pass\n"
SAVING = """
    import copy, functools, torch
    from net import Net
    torch.compile = functools.partial(torch.compile, backend="eager")  # without a C++ compiler, and quick
    torch.manual_seed(0)
    model = Net(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    average = copy.deepcopy(model)
    for _ in range(5):
        model(torch.randn(6, 3)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        copied = copy.deepcopy(model)
        for mean, weight in zip(average.parameters(), copied.parameters()):
            mean.data.lerp_(weight.data, 0.1)
    average(torch.randn(2, 3))
    print(list(model.state_dict()), type(model).__name__, isinstance(model, torch.nn.Sequential))
    groups = optimizer.state_dict()["param_groups"]
    print([{name: group[name] for name in ("fused", "foreach")} for group in groups])
    torch.save([model, average, copied, optimizer, optimizer.state_dict()], "saved.pt")
"""
LOADING = """
    import sys, torch
    for name in ("plain.pt", "saved.pt"):
        model, average, copied, optimizer, state = torch.load(name, weights_only=False)
        assert "flatout" not in sys.modules
        torch.optim.AdamW(model.parameters()).load_state_dict(state)
        with torch.no_grad():
            assert model(torch.ones(1, 3)).equal(copied(torch.ones(1, 3)))
        print("as saved", *vars(model).keys())
"""


@pytest.mark.slow
def test_what_a_planned_run_saves_is_what_a_plain_one_saves(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    plain = run(SAVING, flatout=False)
    (tmp_path / "saved.pt").rename(tmp_path / "plain.pt")
    (tmp_path / "flatout.toml").write_text(Plan(compile="default", optimizer="fused").to_toml())
    planned = run(SAVING, "--trust-plan")
    assert (planned.returncode, planned.stdout) == (0, plain.stdout)
    assert document(tmp_path)["applied"] == ["fused optimizer", "torch.compile"]
    as_plain, as_planned = run(LOADING, flatout=False, forked=False).stdout.splitlines()  # Flatout is not loaded
    assert as_planned == as_plain


@pytest.mark.usefixtures("in_removed_folder")
def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(5)")
    with pytest.raises(UsageError, match=r"the current folder was removed; flatout-run\.json is written there"):
        run_verb.main([str(script)])


def test_a_plan_for_another_script_is_left_alone(run: Run, tmp_path: Path) -> None:
    plan = Plan(script="other.py", optimizer="fused")
    (tmp_path / "flatout.toml").write_text(plan.to_toml())
    done, (note,) = run("print(1)"), document(tmp_path)["plan_notes"]
    assert note.startswith("flatout.toml is for other.py: not applied")
    assert (done.stdout, done.stderr) == ("1\n", f"flatout: {note}\n")
    assert run("print(1)", "--quiet").stderr == ""
    for same in ("train.py", "./train.py", str(tmp_path / "train.py")):
        (tmp_path / "flatout.toml").write_text(Plan(script=same, optimizer="fused").to_toml())
        run("print(1)", "--trust-plan")
        assert document(tmp_path)["plan_notes"] == []
        assert document(tmp_path)["plan"] == {"optimizer": "fused"}


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[plan\n", "flatout.toml"),
        ("[plan]\nprecison = 'bf16'\n", "precision"),
        ("[plan]\ncompile = 'fast'\n", "fast"),
    ],
)
def test_a_malformed_plan_stops_before_the_script(run: Run, tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "flatout.toml").write_text(toml)
    stopped = run("print('started')")
    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert stopped.stderr.startswith("error: ")
    assert message in stopped.stderr
    assert stopped.stderr.count("\n") == 1
    assert not (tmp_path / "flatout-run.json").exists()
    assert run("print('started')", "--no-plan").stdout == "started\n"


@pytest.mark.parametrize("read", ["train.py", "p.toml", "flatout.toml"])
def test_a_report_replaces_no_file_that_is_read(run: Run, tmp_path: Path, read: str) -> None:
    for name in ("p.toml", "flatout.toml"):
        (tmp_path / name).write_text("[plan]\n")
    refused = run("print('started')", "--plan", "p.toml", "--report", read)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the report would replace a file that is only read" in refused.stderr
    assert (tmp_path / read).read_text() in ("print('started')", "[plan]\n")


@pytest.mark.parametrize("place", ["missing/run.json", ".", "train.py/run.json"])
def test_a_report_that_cannot_be_is_refused_first(run: Run, place: str) -> None:
    refused = run("print('started')", "--report", place)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: cannot write /")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-plan", "--plan", "p.toml"], "--plan with --no-plan"),
        (["--no-plan", "--without", "compile"], "--without with --no-plan"),
        (["--report", "x.json", "--no-report"], "--report with --no-report"),
        (["--check-deterministic", "--report", "x.json"], "--report with --check-deterministic"),
        (["--check-deterministic", "--serve"], "--serve with --check-deterministic"),
        (["--devices", "2", "--device", "cpu", "--prove", "--deterministic"], "--deterministic with --prove"),
    ],
)
def test_options_that_would_be_ignored_are_refused(run: Run, options: list[str], said: str) -> None:
    refused = run("print('started')", *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {said}")


def test_where_the_report_goes(run: Run, tmp_path: Path) -> None:
    run("import os; os.mkdir('elsewhere'); os.chdir('elsewhere')", "--report", "r.json")
    assert document(tmp_path, "r.json")["steps"] == 0
    run("print(1)", "--no-report")
    assert not (tmp_path / "flatout-run.json").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_was_seen_until_then(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    code = (
        "import sys, flatout.cli.run as run; run.WRITTEN_EVERY_SECONDS = 0.1; sys.argv[1:] = ['run', 'train.py']; "
        "from flatout.cli.main import main; main(sys.argv[1:])"
    )
    place = tmp_path / "flatout-run.json"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        try:
            until = time.monotonic() + 200.0
            while not place.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            process.kill()
    document = json.loads(place.read_text())
    assert document["script"]["status"] is None
    assert document["steps"] > 0


def test_a_report_that_cannot_be_written_after_all_harms_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flatout-run.json").mkdir()
    done = run("import sys; print(1); sys.exit(4)")
    assert (done.returncode, done.stdout) == (4, "1\n")
    assert done.stderr.startswith(f"flatout: no report of this run: cannot write {tmp_path}/flatout-run.json: Is a dir")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flatout-run.json", "train.py"]


def test_a_report_of_an_earlier_run_is_called_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise UsageError("cannot write it: No space left on device")

    monkeypatch.setattr("flatout.report.document.write_document", full)
    (tmp_path / "run.json").write_text("{}")
    run_verb.Run(Target(path="train.py"), {"--quiet": ""}, tmp_path / "run.json", None).finish()
    said = "flatout: no report of this run: cannot write it: No space left on device; run.json is an older one\n"
    assert capsys.readouterr().err == said


def test_a_training_loop_does_not_wait_for_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.script.record_file.last_records", lambda *_: pytest.fail("it waited"))
    watched = run_verb.Run(Target(path="train.py"), {}, tmp_path / "run.json", None)
    watched._among = tmp_path, Place(rank=0, ranks=2)
    watched._write_early()
    assert document(tmp_path, "run.json")["script"]["status"] is None


def test_a_summary_may_name_what_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    shown = run_verb.Run(Target(path="train.py"), {}, None, None)
    shown._show, shown._terminal = True, theirs
    shown._say(os.fsdecode(b"caf\xe9.py"))
    assert os.read(ours, 100) == b"caf\\udce9.py\r\n"
    os.close(ours)
    os.close(theirs)


# on a terminal

TICKING = """
    import os, sys, time, torch
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    print("first line")
    sys.stdout.write("no line end")
    sys.stdout.flush()
    step = 0
    while step < 60 or not os.path.exists("enough"):
        w.sum().backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
    print(" and its rest")
    for step in range(3):
        sys.stdout.write(f"\\rprogress {step}")
        sys.stdout.flush()
    print("\\nlast line")
    sys.exit(3)
"""


class Terminal:
    """Just enough of a terminal to tell what a person would see: [rows] of text."""

    SEQUENCE = re.compile(r"\x1b(?:\[([\d;]*)([A-Za-z])|([78D]))|([\r\n])|([^\x1b\r\n])")

    def __init__(self, rows: int, columns: int) -> None:
        self.grid = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.bottom = rows - 1
        self.saved = (0, 0)

    def feed(self, text: str) -> list[str]:
        for numbers, command, escape, control, letter in self.SEQUENCE.findall(text):
            if letter:
                self.grid[self.row][self.column] = letter
                self.column += 1
            elif control:
                self.column = 0 if control == "\r" else self.column
                self._down() if control == "\n" else None
            elif escape == "D":
                self._down()
            elif escape == "7":
                self.saved = (self.row, self.column)
            elif escape == "8":
                self.row, self.column = self.saved
            else:
                getattr(self, f"_{command}")([int(number) for number in numbers.split(";") if number])
        return ["".join(row).rstrip() for row in self.grid]

    def _down(self) -> None:
        if self.row == self.bottom:
            self.grid[: self.bottom + 1] = [*self.grid[1 : self.bottom + 1], [" "] * len(self.grid[0])]
        elif self.row < len(self.grid) - 1:
            self.row += 1

    def _r(self, numbers: list[int]) -> None:
        self.bottom = (numbers[1] if numbers else len(self.grid)) - 1
        self.row = self.column = 0

    def _H(self, numbers: list[int]) -> None:
        self.row, self.column = numbers[0] - 1, numbers[1] - 1

    def _A(self, numbers: list[int]) -> None:
        self.row -= numbers[0]

    def _K(self, numbers: list[int]) -> None:
        self.grid[self.row] = [" "] * len(self.grid[0])

    def _m(self, numbers: list[int]) -> None:
        """Colours: not followed."""


class Session:
    """`flatout run OPTIONS train.py` on a pseudo terminal."""

    def __init__(
        self,
        python: Python,
        folder: Path,
        *options: str,
        size: tuple[int, int] = (24, 100),
        source: str = TICKING,
        kind: str = "xterm",
    ) -> None:
        (folder / "train.py").write_text(textwrap.dedent(source))
        self.folder, self.output = folder, ""
        self.master, slave = pty.openpty()
        self.resize(*size)
        self.process = python.server.start(
            ["-m", "flatout", "run", *options, "train.py"],
            streams=[slave] * 3,
            folder=folder,
            environment={
                **os.environ,
                "FLATOUT_CACHE_DIR": str(folder / ".cache"),
                "FLATOUT_RUNS_DIR": str(folder / ".runs"),
                "OMP_NUM_THREADS": "1",
                "TERM": kind,
            },
        )
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, wanted: str | None) -> None:
        """Read until `wanted` stands in the output; None: until the program has ended."""
        while wanted is None or wanted not in self.output:
            ready, _, _ = select.select([self.master], [], [], 200)
            assert ready, f"{wanted!r} did not come; so far: {self.output!r}"
            try:
                data = os.read(self.master, 65536)
            except OSError:  # Linux's way to say that nobody has the other end any more
                data = b""
            if not data:
                assert wanted is None, f"ended before {wanted!r} came: {self.output!r}"
                break
            self.output += data.decode()

    def finish(self) -> int:
        (self.folder / "enough").touch()
        self.read_until(None)
        os.close(self.master)
        return self.process.wait(timeout=200)


@pytest.fixture
def session(tmp_path: Path, python: Python) -> Iterator[Callable[..., Session]]:
    started: list[Session] = []

    def start(*options: str, **given: Any) -> Session:
        started.append(Session(python, tmp_path, *options, **given))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_a_terminal_shows_the_panel_and_then_the_summary(session: Callable[..., Session]) -> None:
    on = session(size=(24, 200))
    on.read_until("other ")
    during = Terminal(24, 200).feed(on.output)
    assert during[:2] == ["first line", "no line end"]
    (first,) = [row for row, text in enumerate(during) if text.startswith(" flatout · ")]
    assert first in (21, 22)
    assert re.match(r" flatout · step [\d,]+ · [\d.]+ ms · [\d.]+ steps/s", during[first])
    assert "CPU " in during[first + 1]
    assert on.finish() == 3
    after = Terminal(24, 200).feed(on.output)
    assert after[:5] == ["first line", "no line end and its rest", "progress 2", "last line", ""]
    assert after[-1] == ""
    labels = [row.split()[0] for row in after[5:] if row[:1].strip()]
    assert labels[:5] == ["script", "step", "ceiling", "memory", "plan"]
    assert labels[-1] == "report"
    assert "train.py · " in after[5]


def test_a_script_may_put_any_object_in_the_place_of_stdout(session: Callable[..., Session]) -> None:
    tee = "class Tee:\n        def write(self, text): os.write(1, text.encode())\n    sys.stdout = Tee()\n    "
    on = session(
        "--no-report", source=TICKING.replace("sys.stdout.flush()", "").replace("step = 0", tee + "step = 0", 1)
    )
    on.finish()
    assert "script    train.py · " in on.output
    assert "Traceback" not in on.output


def test_a_file_that_has_the_number_of_a_closed_descriptor_gets_nothing_of_ours(
    session: Callable[..., Session], tmp_path: Path
) -> None:
    """As a daemon closes all that it has inherited: the terminal's number is then that of its first file."""
    files = "os.closerange(3, 64)\n    files = [os.open(f'file-{one}', os.O_WRONLY | os.O_CREAT) for one in range(8)]"
    on = session("--no-report", source=TICKING.replace('print(" and its rest")', files))
    assert on.finish() == 3
    assert [path.read_bytes() for path in sorted(tmp_path.glob("file-*"))] == [b""] * 8


@pytest.mark.slow
def test_a_small_terminal_that_is_resized_keeps_the_scripts_text(session: Callable[..., Session]) -> None:
    on = session("--no-report", size=(6, 60))
    on.read_until("\x1b[1;5r")
    on.resize(12, 80)
    on.read_until("\x1b[1;11r")
    on.resize(2, 80)  # no room: the line waits
    on.resize(10, 70)
    on.read_until("\x1b[1;9r")
    assert on.finish() == 3
    assert "progress 2" in on.output
    assert on.output.rindex("\x1b[r") > on.output.rindex("\x1b[1;9r")


@pytest.mark.slow
def test_a_terminal_without_a_cursor_shows_the_summary_alone(session: Callable[..., Session]) -> None:
    on = session("--no-report", kind="dumb")
    assert on.finish() == 3
    assert "\x1b" not in on.output
    assert "\nscript    train.py · " in on.output


@pytest.mark.slow
def test_quiet_is_quiet_on_a_terminal_too(session: Callable[..., Session], tmp_path: Path) -> None:
    on = session("--quiet")
    assert on.finish() == 3
    assert "\x1b" not in on.output
    assert on.output.endswith("last line\r\n")
    assert document(tmp_path)["script"]["status"] == 3


ASKING = """
    import os, sys, time, torch
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    def steps(count):
        for _ in range(count):
            w.sum().backward()
            optimizer.step()
            time.sleep(0.01)
    steps(60)
    while not os.path.exists("shown"):
        steps(10)
    name = input("your name? ")
    for number in range(40):
        print("hello", name, number, flush=True)
        sys.stdout.write(f"\\r{number:4d}%|####|")
        sys.stdout.flush()
        steps(2)
    breakpoint()
    print("after the debugger")
    while not os.path.exists("enough"):
        steps(10)
"""
CLEARED, TAKEN = r"\x1b7(?:\x1b\[\d+;1H\x1b\[2K)+\x1b8", r"(?:\x1bD)+\x1b\[\d+A\x1b7\x1b\[1;\d+r\x1b8"
DRAWN = re.compile(rf"(?:{CLEARED})?(?:{TAKEN})?\x1b7\x1b\[\d+;1H.*?\x1b8")
"""One drawing of the status lines, as it is written."""


@pytest.mark.slow
def test_prompts_bars_and_the_debugger_stay_the_scripts_own(session: Callable[..., Session], tmp_path: Path) -> None:
    on = session("--no-report", source=ASKING)
    on.read_until("CPU ")
    (tmp_path / "shown").touch()
    on.read_until("your name? ")
    os.write(on.master, b"Ada\n")
    on.read_until("(Pdb) ")
    os.write(on.master, b"continue\n")
    on.read_until("after the debugger")
    assert on.finish() == 0
    itself = DRAWN.sub("", on.output).partition("after the debugger")[0]
    assert "\x1b" not in itself
    hello = "".join(f"hello Ada {number}\r\n\r{number:4d}%|####|" for number in range(40))
    assert itself.startswith(f"your name? Ada\r\n{hello}")


def test_a_run_that_is_killed_gives_the_terminal_back_and_is_seen_as_killed(
    session: Callable[..., Session], tmp_path: Path
) -> None:
    on = session("--no-report")
    on.read_until("CPU ")
    (running,) = all_runs(tmp_path / ".runs")
    assert (running.condition, running.state.script) == ("running", "train.py")
    os.kill(running.state.pid, signal.SIGKILL)
    on.read_until("\x1b[r")
    on.process.wait()
    (killed,) = all_runs(tmp_path / ".runs")
    assert (killed.condition, killed.state.steps > 0) == ("killed", True)
    on.read_until(None)
    assert on.output.rpartition("\x1b[r")[2].count("\x1b[2K") in (2, 3)
    os.close(on.master)


# its state and its page


SECONDS = """
    import time, torch
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    began = time.monotonic()
    while time.monotonic() < began + 1.3:
        w.sum().backward()
        optimizer.step()
    raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_run_without_a_terminal_can_be_watched_and_prints_nothing(run: Run, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = run(SECONDS, "--no-report", "--quiet", env={"FLATOUT_RUNS_DIR": str(runs)})
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    (seen,) = all_runs(runs)
    assert (seen.condition, seen.state.status, seen.state.device) == ("ended", 3, "cpu")
    assert seen.state.steps > 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["runs", "train.py"]


def test_of_several_ranks_the_first_keeps_a_state(run: Run, tmp_path: Path) -> None:
    for rank, kept in (("1", False), ("0", True)):
        runs = tmp_path / f"runs-{rank}"
        assert run("print(1)", "--no-report", env={"FLATOUT_RUNS_DIR": str(runs), "RANK": rank}).returncode == 0
        assert bool(all_runs(runs)) is kept


def test_a_folder_of_states_that_cannot_be_had_harms_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {"FLATOUT_RUNS_DIR": str(tmp_path / "file")}
    done = run("import sys; print(1); sys.exit(4)", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (4, "1\n", "")
    (note,) = document(tmp_path)["plan_notes"]
    assert note.startswith("processes that the script starts are not watched (PermissionError: ")
    served = run("print(1)", "--no-report", "--serve", env=env)
    assert (served.returncode, served.stdout) == (0, "1\n")
    assert served.stderr.startswith("flatout: no page: PermissionError: ")


def test_the_page_of_a_run(run: Run, tmp_path: Path) -> None:
    script = """
        import json, os, re, sys, urllib.request
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child")
    """
    done = run(script, "--no-report", "--serve", forked=False, env={"FLATOUT_RUNS_DIR": str(tmp_path / "runs")})
    assert (done.returncode, done.stdout) == (0, "no child\n")
    url = re.fullmatch(r"flatout: this run's page is (http://127\.0\.0\.1:\d+/[\w-]{32}/)\n", done.stderr)
    assert url is not None
    with urllib.request.urlopen(f"{url[1]}state", timeout=20) as answer:
        found = json.load(answer)
    assert (found["script"], found["condition"]) == ("train.py", "ended")
    (folder,) = (tmp_path / "runs").iterdir()
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or ()):
            process.terminate()


def test_a_choice_that_no_script_can_be_given_is_refused_before_the_script_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flatout.toml").write_text(Plan(optimizer="fused", micro_batches=4, nonfinite="skip").to_toml())
    refused = run(TRAIN, "--trust-plan")
    assert (refused.returncode, refused.stdout) == (2, "")
    limit = "flatout run does not apply it (TrainStep would); remove micro_batches"
    assert refused.stderr == f"error: flatout.toml: the plan's micro_batches is 4; {limit}\n"
