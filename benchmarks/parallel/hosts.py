"""`python -m benchmarks.parallel.hosts`: `flatout launch` over three simulated hosts (see simulated_hosts.py).

    plain            one rank on each                       it ends; it listens only on the hosts' own addresses, looked
                                                             at every 0.3 s (the same in the other cases)
    cut for 3 s      host 2 is cut off, then back           the job goes on without a restart
    cut for 30 s     the same                               host 2 is given up, then taken back: one restart
    back later       host 2 until the job goes on with two  it starts again with three
    cut for good     host 2, with --min-nnodes 2            the job goes on with two hosts from its checkpoint
    killed           host 2's launcher and rank, SIGKILL    the same
    host 0 cut       the one that leads                     all hosts end in bounded time, and say why
    slow link        host 2 at 20 Mbit/s                    the job ends well; launch --check names machine 2

With three ranks the weights have to be those of three ranks on one host, bit for bit. Where the job went on with two,
they have to differ from those by no more than LARGEST_RATIO times what two ranks from the start do, or three that begin
one rounding away (without dropout: another number of ranks draws other masks).

The checkpoints are on a file system that the hosts share. Ranks talk by gloo: NCCL needs a GPU for each rank, and is
not shown here. Latency is not tested either. Needs Linux and root.

    python -m benchmarks.parallel.hosts --out hosts.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.parallel.simulated_hosts import Host, missing, simulated_hosts
from flatout.errors import MachineError
from flatout.machine.detect import detect
from flatout.parallel.launching.leader import RETURN_SECONDS
from flatout.parallel.launching.machines import LOST_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("faulted.py")
PORT = 29500
JOIN_SECONDS, GRACE_SECONDS = 20, 5
DEADLINE_SECONDS = 240.0
LOOK_SECONDS = 0.3
"""Between two looks at what listens."""
LEAVE_SECONDS = 5.0
"""For the guard of a launcher that was killed to end what it left."""
CUT_AFTER_STEPS = 10
SAVE_EVERY_STEPS = 5
"""As the script does."""
LARGEST_RATIO = 4.0
ENDS_SECONDS = LOST_SECONDS + 2 * GRACE_SECONDS + max(JOIN_SECONDS, RETURN_SECONDS) + 20.0
"""Once host 0 is cut off, until every launcher has ended."""
RATE = "20mbit"
WITHOUT_DROPOUT = ("--dropout", "0")
TWO_ARE_ENOUGH = ("--max-restarts", "3", "--min-nnodes", "2")


@dataclass
class Job:
    """A training on some of the hosts, and what was seen of it."""

    hosts: list[Host]
    folder: Path
    parallel: str = "fsdp"
    listened: set[str] = field(default_factory=set)
    began: float = 0.0

    def start(self, *, launch: Sequence[str] = (), script: Sequence[str] = (), pause: float = 0.2) -> None:
        """A launcher on each host."""
        self.folder.mkdir()
        words = [str(SCRIPT), "--folder", str(self.folder), "--parallel", self.parallel, "--pause", str(pause), *script]
        self.began = time.monotonic()
        for host in self.hosts:
            self.launch(host, (*launch, *words))

    def launch(self, host: Host, words: Sequence[str], *, out: Path | None = None) -> None:
        machines = ["--nnodes", str(len(self.hosts)), "--node-rank", str(host.number), "--nproc-per-node", "1"]
        machines += ["--rendezvous", f"{self.hosts[0].address}:{PORT}"]
        if len(self.hosts) == 1:
            machines = []  # as it is without any other
        times = ["--grace", f"{GRACE_SECONDS}s", "--join-timeout", f"{JOIN_SECONDS}s", "--hang-timeout", "90s"]
        command = [sys.executable, "-m", "flatout", "launch", *times, *machines, *words]
        host.started.clear()
        host.start(command, self.log(host), out=out, environment={"PYTHONPATH": str(ROOT)})

    def log(self, host: Host) -> Path:
        return self.folder / f"{host.name}.log"

    def trains(self) -> bool:
        """Wait until a checkpoint after the first steps is there; False: it never came."""
        return self.wait(lambda: self.step >= CUT_AFTER_STEPS) and not self.ended

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        found = (self.folder / "checkpoints").glob("[0-9]*-step-*")
        return max((int(one.name.rpartition("-")[2]) for one in found if one.name[-1].isdecimal()), default=0)

    @property
    def first_steps(self) -> list[int]:
        """That ranks took, each time they were started."""
        log = self.log(self.hosts[0]).read_text(errors="replace")
        return [int(one) for one in re.findall(r"^begins with step (\d+)$", log, re.MULTILINE)]

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for host in self.hosts for process in host.started)

    def wait(self, there: Callable[[], bool] = lambda: False) -> bool:
        """Until that is so, or all launchers have ended; False: neither in time."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not there() and not self.ended:
            if time.monotonic() > deadline:
                return False
            for host in self.hosts:
                self.listened |= host.listening()
            time.sleep(LOOK_SECONDS)
        return True

    def row(self) -> dict[str, Any]:
        """What became of it; whatever is left of it is ended."""
        seconds = round(time.monotonic() - self.began, 1)
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.ended and any(host.pids() for host in self.hosts) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        status = {host.name: host.started[0].poll() for host in self.hosts}
        left = sum(host.end() for host in self.hosts)
        said = {host.name: _said(self.log(host)) for host in self.hosts}
        own = {host.address for host in self.hosts}
        return {
            "seconds": seconds,
            "status": status,
            "began_with_steps": self.first_steps,
            "restarts": sum("; restart " in line or "all ranks start again" in line for line in said["host0"]),
            "processes_left": left,
            "listened_on": sorted(self.listened),
            "listened_elsewhere": sorted(self.listened - own),
            "said": said,
        }

    @property
    def weights(self) -> Path:
        return self.folder / "weights.safetensors"


class Cases:
    """All of them, over the same hosts."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._references: dict[tuple[int, tuple[str, ...]], Path] = {}

    def plain(self) -> dict[str, Any]:
        job = self._started("plain")
        job.wait()
        return self._exact(job, restarts=0)

    def cut_for_3_s(self) -> dict[str, Any]:
        return self._cut_for("cut-3", 3.0, restarts=0)

    def cut_for_30_s(self) -> dict[str, Any]:
        return self._cut_for("cut-30", 30.0, restarts=1)

    def _cut_for(self, name: str, seconds: float, *, restarts: int) -> dict[str, Any]:
        job = self._started(name, launch=TWO_ARE_ENOUGH)
        at = self._cut(job, self._hosts[2])
        time.sleep(seconds)
        at["steps_while_cut"] = job.step - at["at_step"]
        self._hosts[2].reconnect()
        job.wait()
        row = at | self._exact(job, restarts=restarts)
        # A save that was under way may have become whole just after the cut.
        row["as_promised"] &= at["trained"] and at["steps_while_cut"] <= SAVE_EVERY_STEPS
        return row

    def back_later(self) -> dict[str, Any]:
        options = (*TWO_ARE_ENOUGH, "--join-timeout", "120s")
        job = self._started("back", launch=options, script=WITHOUT_DROPOUT, pause=0.5)
        at = self._cut(job, self._hosts[2])
        job.wait(lambda: len(job.first_steps) == 2)
        self._hosts[2].reconnect()
        job.wait()
        row = self._with_two(job, at, restarts=2)
        row["as_promised"] &= row["status"]["host2"] == 0 and len(row["began_with_steps"]) == 3
        return row

    def cut_for_good(self) -> dict[str, Any]:
        job = self._started("cut", launch=TWO_ARE_ENOUGH, script=WITHOUT_DROPOUT)
        at = self._cut(job, self._hosts[2])
        job.wait()
        row = self._with_two(job, at)
        self._hosts[2].reconnect()
        return row

    def killed(self) -> dict[str, Any]:
        job = self._started("killed", launch=TWO_ARE_ENOUGH, script=WITHOUT_DROPOUT)
        ready = job.trains()
        at = {"trained": ready, "at_step": job.step}
        launcher = self._hosts[2].started[0].pid
        for pid in (_rank(self._hosts[2]), launcher):
            with contextlib.suppress(ProcessLookupError):  # it has ended already, which the row will show
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
        job.wait()
        return self._with_two(job, at)

    def host_0_cut(self) -> dict[str, Any]:
        job = self._started("cut-0", launch=TWO_ARE_ENOUGH)
        at = self._cut(job, self._hosts[0])
        began = time.monotonic()
        ended = job.wait()
        seconds = round(time.monotonic() - began, 1)
        self._hosts[0].reconnect()
        row = at | job.row() | {"seconds_until_all_ended": seconds, "at_most_seconds": ENDS_SECONDS}
        clear = all(
            any(" is lost: " in line for line in lines) and lines[-1].startswith("error: ")
            for lines in row["said"].values()
        )
        ended = ended and seconds <= ENDS_SECONDS and all(status == 1 for status in row["status"].values())
        row["as_promised"] = at["trained"] and ended and clear and not row["processes_left"]
        return row

    def slow_link(self) -> dict[str, Any]:
        row: dict[str, Any] = {"rate": RATE, "check_before": self._check("check-before")}
        self._hosts[2].slow_down(RATE)
        try:
            job = self._started("slow", pause=0.0)
            job.wait()
            row |= self._exact(job, restarts=0)
            row["check"] = self._check("check")
        finally:
            self._hosts[2].speed_up()
        named = [one["numbers"] for one in row["check"]["slow"] if one["kind"] == "machine"]
        before = [one for one in row["check_before"]["slow"] if one["kind"] == "machine" and one["what"] == "bandwidth"]
        alike = row["check"]["same_on_all_hosts"] and row["check_before"]["same_on_all_hosts"]
        row["as_promised"] = row["as_promised"] and named == [[2]] and not before and alike
        return row

    # their parts

    def _started(self, name: str, **options: Any) -> Job:  # Any: those of Job.start
        job = Job(self._hosts, self._folder / name)
        job.start(**options)
        return job

    def _cut(self, job: Job, host: Host) -> dict[str, Any]:
        ready = job.trains()
        at = {"trained": ready, "at_step": job.step}
        host.cut()
        return at

    def _check(self, name: str) -> dict[str, Any]:
        """What `flatout launch --check` finds, on host 0."""
        job = Job(self._hosts, self._folder / name)
        job.folder.mkdir()
        job.began = time.monotonic()
        out = {host.name: job.folder / f"{host.name}.json" for host in self._hosts}
        for host in self._hosts:
            job.launch(host, ("--check", "--json"), out=out[host.name])
        job.wait()
        row = job.row()
        texts = [one.read_text() for one in out.values()]
        found = json.loads(texts[0]) if texts[0] else {"slow": [], "between": None}
        return row | {"slow": found["slow"], "between": found["between"], "same_on_all_hosts": len(set(texts)) == 1}

    def _exact(self, job: Job, *, restarts: int) -> dict[str, Any]:
        """With three ranks to the end."""
        row = job.row()
        row["bit_identical"] = _difference(job.weights, self._reference(3)) == 0.0
        good = row["bit_identical"] and all(status == 0 for status in row["status"].values())
        row["as_promised"] = (
            good and row["restarts"] == restarts and not row["processes_left"] and not row["listened_elsewhere"]
        )
        return row

    def _with_two(self, job: Job, at: dict[str, Any], *, restarts: int = 1) -> dict[str, Any]:
        """With three ranks, then with two for a while or to the end."""
        row = at | job.row()
        three = self._reference(3, *WITHOUT_DROPOUT)
        row["difference"] = _difference(job.weights, three)
        row["difference_of_two_ranks"] = _difference(self._reference(2, *WITHOUT_DROPOUT), three)
        row["difference_of_one_rounding"] = _difference(self._reference(3, *WITHOUT_DROPOUT, "--one-ulp"), three)
        allowed = LARGEST_RATIO * max(row["difference_of_two_ranks"], row["difference_of_one_rounding"])
        good = row["status"]["host0"] == row["status"]["host1"] == 0 and row["restarts"] == restarts
        with_two = any("2 ranks on host0, host1 start again" in line for line in row["said"]["host0"])
        resumed = with_two and row["began_with_steps"][-1] > row["at_step"]
        clean = not row["processes_left"] and not row["listened_elsewhere"]
        row["as_promised"] = good and resumed and row["difference"] <= allowed and clean
        return row

    def _reference(self, ranks: int, *script: str) -> Path:
        """The weights of so many ranks on host 0 alone, which nothing happened to."""
        if (ranks, script) not in self._references:
            job = Job(self._hosts[:1], self._folder / f"reference-{len(self._references)}")
            job.start(launch=("--nproc-per-node", str(ranks)), script=script, pause=0.0)
            job.wait()
            row = job.row()
            if row["status"] != {"host0": 0}:
                raise SystemExit(f"without a fault it ended so: {row}")
            self._references[ranks, script] = job.weights
        return self._references[ranks, script]


CASES: dict[str, Callable[[Cases], dict[str, Any]]] = {
    "plain": Cases.plain,
    "cut for 3 s": Cases.cut_for_3_s,
    "cut for 30 s": Cases.cut_for_30_s,
    "back later": Cases.back_later,
    "cut for good": Cases.cut_for_good,
    "killed": Cases.killed,
    "host 0 cut": Cases.host_0_cut,
    "slow link": Cases.slow_link,
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="some of them only"
    )
    arguments = parser.parse_args(words)
    if (why := missing()) is not None:
        print(f"no simulated hosts: {why}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    document: dict[str, Any] = {
        "benchmark": "parallel.hosts",
        "machine": detect().to_json(),
        "backend": "gloo; NCCL needs a GPU for each rank, and is not shown here",
        "not_tested": ["latency"],
        "cases": {},
    }
    try:
        _write(arguments.out, document)
        with tempfile.TemporaryDirectory(prefix="flatout-hosts-") as folder, simulated_hosts(3) as hosts:
            cases = Cases(hosts, Path(folder))
            for name in arguments.cases:
                row = document["cases"][name] = CASES[name](cases)
                _write(arguments.out, document)
                print(_line(name, row), flush=True)
    except (MachineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0 if all(row["as_promised"] for row in document["cases"].values()) else 1


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _said(log: Path) -> list[str]:
    """The launcher's own lines."""
    return [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("[flatout]", "error: "))]


def _rank(host: Host) -> int | None:
    """Its rank's process."""
    for pid in host.pids():
        try:
            process = psutil.Process(pid)
            if str(SCRIPT) in process.cmdline() and "RANK" in process.environ():
                return pid
        except psutil.Error:
            continue
    return None


def _difference(found: Path, wanted: Path) -> float:
    """The largest absolute one; infinite where there are no weights."""
    if not found.exists():
        return float("inf")
    one, other = load_file(found), load_file(wanted)
    if one.keys() != other.keys():
        return float("inf")
    return max(
        0.0 if torch.equal(one[name], other[name]) else float((one[name] - other[name]).abs().max()) for name in one
    )


def _line(name: str, row: dict[str, Any]) -> str:
    verdict = "as promised" if row["as_promised"] else "NOT AS PROMISED"
    weights = ""
    if "bit_identical" in row:
        weights = "same weights, " if row["bit_identical"] else "OTHER WEIGHTS, "
    elif "difference" in row:
        beside = f"two ranks {row['difference_of_two_ranks']:.1e}, one rounding {row['difference_of_one_rounding']:.1e}"
        weights = f"weights differ by {row['difference']:.1e} ({beside}), "
    return f"{name:13} {row['seconds']:5.1f} s, {row['restarts']} restarts, {weights}{verdict}"


if __name__ == "__main__":
    sys.exit(main())
