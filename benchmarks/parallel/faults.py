"""`python -m benchmarks.parallel.faults`: random faults, one a run, done to a training under `flatout launch`.

    kill       SIGKILL to a rank                             the job starts again and resumes
    kill all   SIGKILL to every rank at once                 the same
    hang       SIGSTOP to a rank, for good                   found by its heartbeat, named, ended; the same
    slow       SIGSTOP to a rank for a second                the job goes on without a restart
    term       SIGTERM to one rank                           all ranks save and end; the next launch goes on
    disk full  the checkpoints' file system has no room      the save fails, the job starts again once there is room
    network    a simulated host with one rank is cut off     the job goes on, or starts again once the host is back
               for 1 to 40 seconds

Each is drawn from a seed: kind, rank, time, strategy (ddp with 2 ranks, fsdp with 3), for how long. Afterwards the
weights have to be those of a run that nothing happened to, bit for bit, and no process may be left. Results are
appended to --out, and a fault that is there already is not done again. Needs Linux; 'disk full' and 'network' (see
simulated_hosts.py) need root, and are left out without it.

    python -m benchmarks.parallel.faults --faults 100 --out faults.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.parallel.hosts import Job
from benchmarks.parallel.simulated_hosts import missing, simulated_hosts
from flatout.machine.detect import detect

KINDS = ("kill", "kill all", "hang", "slow", "term", "disk full", "network")
WITH_ROOT = ("disk full",)
CUT_SECONDS = (1, 40)
"""A host that is silent for 20 seconds is given up."""
STRATEGIES = {"ddp": 2, "fsdp": 3}
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("faulted.py")
HANG_SECONDS = 5
DEADLINE_SECONDS = 240.0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"faults": {}}
    document |= {"benchmark": "parallel.faults", "machine": detect().to_json()}
    kinds = [one for one in arguments.kinds if one not in WITH_ROOT or os.geteuid() == 0]
    if "network" in kinds and (why := missing()) is not None:
        print(f"without 'network': {why}", file=sys.stderr)
        kinds.remove("network")
    with tempfile.TemporaryDirectory() as folder:
        wanted = {kind: _undisturbed(Path(folder) / kind, kind) for kind in STRATEGIES}
        for seed in range(arguments.first, arguments.first + arguments.faults):
            if str(seed) in document["faults"]:
                continue
            row = _fault(Path(folder) / str(seed), seed, kinds, wanted)
            document["faults"][str(seed)] = row
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
            print(_line(seed, row), flush=True)
    return _summary(document["faults"])


def _summary(rows: dict[str, Any]) -> int:
    good = Counter(row["kind"] for row in rows.values() if row["as_promised"])
    for kind, count in Counter(row["kind"] for row in rows.values()).items():
        print(f"{kind}: {good[kind]} of {count} as promised")
    return 0 if all(row["as_promised"] for row in rows.values()) else 1


def _command(folder: Path, kind: str) -> list[str]:
    options = ["--nproc-per-node", str(STRATEGIES[kind]), "--max-restarts", "3", "--hang-timeout", f"{HANG_SECONDS}s"]
    script = [str(SCRIPT), "--folder", str(folder), "--parallel", kind]
    return [sys.executable, "-m", "flatout", "launch", "--grace", "10s", *options, *script]


def _undisturbed(folder: Path, kind: str) -> Path:
    folder.mkdir()
    done = subprocess.run(_command(folder, kind), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"without a fault it ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return folder / "weights.safetensors"


def _fault(folder: Path, seed: int, kinds: Sequence[str], wanted: dict[str, Path]) -> dict[str, Any]:
    draw = random.Random(seed)
    kind, strategy = draw.choice(list(kinds)), draw.choice(list(STRATEGIES))
    rank, steps = draw.randrange(STRATEGIES[strategy]), draw.randrange(2, 45)
    row: dict[str, Any] = {"kind": kind, "strategy": strategy, "rank": rank, "after_steps": steps}
    if kind == "network":
        with simulated_hosts(STRATEGIES[strategy]) as hosts:
            return row | _network_cut(Job(hosts, folder, strategy), draw, steps, wanted[strategy])
    folder.mkdir()
    with _checkpoints_on_small_disk(folder, kind) as disk, (folder / "log").open("wb") as log:
        command = _command(folder, strategy)
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            pids = _ranks(process.pid, STRATEGIES[strategy])
            time.sleep(2 + 0.04 * steps)  # imports take about as long as this, and so do the steps
            _do(kind, pids, rank, disk)
            status = process.wait(timeout=DEADLINE_SECONDS)
            if kind == "term" and status == 128 + signal.SIGTERM:  # ended as it was asked to; started again
                row["after_term"] = "all ended"
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
                status = process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            left = _end(process, folder)
    row |= {"status": status, "seconds": round(time.monotonic() - began, 1), "processes_left": left}
    lines = (folder / "log").read_text(errors="replace").replace(f"{ROOT}/", "").splitlines()
    row["said"] = [line for line in lines if "[flatout]" in line]
    row["restarts"] = sum("; restart " in line for line in row["said"])
    row["same_weights"] = _same(folder / "weights.safetensors", wanted[strategy])
    row["as_promised"] = status == 0 and row["same_weights"] and not left and (kind != "slow" or row["restarts"] == 0)
    if row["as_promised"]:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _network_cut(job: Job, draw: random.Random, steps: int, wanted: Path) -> dict[str, Any]:
    """Any host but the first, which leads: without it all end (see hosts.py)."""
    host = draw.choice(job.hosts[1:])
    seconds = draw.randint(*CUT_SECONDS)
    job.start(launch=("--max-restarts", "3", "--join-timeout", "60s"))
    job.wait(lambda: job.step > 0)
    time.sleep(0.04 * steps)
    at_step = job.step
    host.cut()
    time.sleep(seconds)
    host.reconnect()
    in_time = job.wait()
    row = job.row()
    said = [line.replace(f"{ROOT}/", "") for line in row["said"]["host0"]]
    same = _same(job.weights, wanted)
    row = {
        "rank": host.number,
        "at_step": at_step,
        "cut_seconds": seconds,
        "status": next((one for one in row["status"].values() if one != 0), 0),
        "seconds": row["seconds"],
        "processes_left": row["processes_left"],
        "said": said,
        "restarts": row["restarts"],
        "same_weights": same,
        "as_promised": in_time and same and not row["processes_left"] and set(row["status"].values()) == {0},
    }
    if row["as_promised"]:
        shutil.rmtree(job.folder, ignore_errors=True)
    return row


def _ranks(launcher: int, count: int) -> dict[int, int]:
    """Rank -> process, once all are there."""
    for _ in range(600):
        found: dict[int, int] = {}
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error, ValueError):
                variables = child.environ()
                if str(SCRIPT) in child.cmdline() and "RANK" in variables:
                    found.setdefault(int(variables["RANK"]), child.pid)
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise SystemExit(f"only {found} of {count} ranks were started")


def _do(kind: str, pids: dict[int, int], rank: int, disk: Path | None) -> None:
    if kind == "kill all":
        for pid in pids.values():
            _signal(pid, signal.SIGKILL)
    elif kind == "disk full" and disk is not None:
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            for _ in range(10_000):
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(3)
        filler.unlink()
    else:
        _signal(pids[rank], {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(kind, signal.SIGSTOP))
        if kind == "slow":
            time.sleep(1)
            _signal(pids[rank], signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(pid, number)


@contextlib.contextmanager
def _checkpoints_on_small_disk(folder: Path, kind: str) -> Iterator[Path | None]:
    if kind != "disk full":
        yield None
        return
    disk = folder / "checkpoints"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _end(process: subprocess.Popen[bytes], folder: Path) -> int:
    """How many processes of the job are left once its launcher has ended; they are killed."""
    if process.poll() is None:
        process.kill()
        process.wait()
    left = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                left.append(one)
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    return len(left)


def _same(found: Path, wanted: Path) -> bool:
    if not found.exists():
        return False
    one, other = load_file(found), load_file(wanted)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _line(seed: int, row: dict[str, Any]) -> str:
    verdict = "as promised" if row["as_promised"] else f"NOT AS PROMISED: {row['said'][-2:]}"
    where = f"{row['kind']:9} rank {row['rank']} of {STRATEGIES[row['strategy']]} ({row['strategy']})"
    weights = "same weights" if row["same_weights"] else "OTHER WEIGHTS"
    return f"{seed:3} {where}: status {row['status']}, {row['restarts']} restarts, {weights}, {verdict}"


if __name__ == "__main__":
    sys.exit(main())
