"""A preflight starts the ranks of a job, and says what became of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from flatout.errors import MachineError, UsageError
from flatout.parallel import preflight as module
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.events import Event, Killing, Tell
from flatout.parallel.preflight import preflight
from flatout.parallel.rank_timings import Timings
from flatout.report.preflight_text import preflight_text
from tests.parallel.test_preflight import timings

JOB = Launch(
    command=("python", "train.py"),
    nnodes=2,
    rendezvous=("here", 29_500),
    min_nnodes=1,
    max_restarts=3,
    script=Path("train.py"),
)


class Launched:
    """Stands in for `launch`: keeps the request, writes timings, ends with a status."""

    def __init__(self, status: int, written: Timings | None) -> None:
        self.status, self.written = status, written
        self.requests: list[Launch] = []

    def __call__(self, request: Launch, *, tell: Tell) -> int:
        self.requests.append(request)
        tell(Killing())
        if self.written is not None:
            Path(request.command[4]).write_text(json.dumps(asdict(self.written)))
        return self.status


def test_the_ranks_of_the_job_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(0, timings(4))
    monkeypatch.setattr(module, "launch", launched)
    told: list[Event] = []
    assert preflight(JOB, seconds=3, tell=told.append).timings == timings(4)
    assert told == [Killing()]  # why a machine was lost is said
    request = launched.requests[0]
    assert request.command[:4] == (sys.executable, "-P", "-m", "flatout.parallel.measure_collectives")
    assert request.command[5] == "3.0"
    assert (request.nnodes, request.rendezvous) == (2, ("here", 29_500))
    assert (request.script, request.min_nnodes, request.max_restarts) == (None, None, 0)
    assert not Path(request.command[4]).exists()


@pytest.mark.parametrize(
    ("status", "written", "said"),
    [
        (1, None, "the ranks of the preflight ended with exit code 1; they measure to the end"),
        (139, timings(2), "the ranks of the preflight ended with exit code 139"),
        (0, None, "the ranks of the preflight ended with exit code 0"),
        (130, None, "the preflight was interrupted"),
        (143, None, "the preflight was interrupted"),
    ],
)
def test_ranks_that_do_not_measure_to_the_end(
    status: int, written: Timings | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "launch", Launched(status, written))
    with pytest.raises(MachineError, match=said):
        preflight(JOB)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "10"])
def test_impossible_times_are_refused(seconds: object) -> None:
    with pytest.raises(UsageError, match="seconds is"):
        preflight(JOB, seconds=seconds)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_are_started_and_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('not of Python')")
    found = preflight(Launch(command=("python", "train.py"), nproc_per_node=2), seconds=0.5)
    assert [(one.rank, one.machine) for one in found.timings.ranks] == [(0, 0), (1, 0)]
    assert found.timings.backend == "gloo"
    assert all(len(one.sizes) >= 1 for one in found.timings.collectives)
    assert preflight_text(found).startswith("ranks           2 on 1 machine · cpu · gloo\n")


ON_TWO_MACHINES = """
import json, sys
from flatout.parallel.launch_request import Launch
from flatout.parallel.preflight import preflight
here, port = map(int, sys.argv[1:])
job = Launch(command=("x",), nnodes=2, node_rank=here, rendezvous=("127.0.0.1", port))
print(json.dumps(preflight(job, seconds=0.5).to_json()))
"""


@pytest.mark.slow
def test_machines_measure_together_and_find_the_same() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", ON_TWO_MACHINES]
    both = [
        subprocess.Popen([*command, str(number), str(port)], stdout=subprocess.PIPE, text=True) for number in (0, 1)
    ]
    try:
        first, second = (json.loads(process.communicate()[0]) for process in both)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert first == second
    assert [one["machine"] for one in first["timings"]["ranks"]] == [0, 1]
