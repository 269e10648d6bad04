"""Two processes of training scripts at once, of which only one is let go on at a time.

They take turns of a fraction of a second (SIGSTOP, SIGCONT), their main threads on the same core: what disturbs the
machine disturbs both. Each writes down when its steps ended, and knows nothing of the other.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flatout.statistics import median


@dataclass(frozen=True)
class Command:
    """A training script that takes `--steps N` and `--times FILE`."""

    words: list[str]
    times: Path
    """Made by the script when training begins; at its end the seconds at which its steps ended, on the machine's clock,
    as JSON."""


def in_turns(one: Command, other: Command, steps: int, turn_seconds: float) -> list[tuple[float, float]]:
    """Medians (one, other) of the steps in neighbouring turns, in seconds, once a third of the steps is over.

    More steps where the one has ended before the other was warm. Raises RuntimeError if one of them fails.
    """
    for times in (1, 2, 4, 8):
        if pairs := _turns(one, other, times * steps, turn_seconds):
            return pairs
    raise RuntimeError(f"{8 * steps} steps of {one.words} are too few to have both in turns")


def _turns(one: Command, other: Command, steps: int, turn_seconds: float) -> list[tuple[float, float]]:
    commands = (one, other)
    for command in commands:
        command.times.unlink(missing_ok=True)
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen([*command.words, "--steps", str(steps), "--times", str(command.times)], **quiet)
        for command in commands
    ]
    turns: list[tuple[int, float, float]] = []
    try:
        processes[1].send_signal(signal.SIGSTOP)
        while all(process.poll() is None for process in processes):
            number = 1 if len(turns) % 4 in (1, 2) else 0
            if commands[number].times.exists():  # it has counted the cores that it may use
                _put_on_cores(processes[number].pid)
            processes[number].send_signal(signal.SIGCONT)
            began = time.perf_counter()
            time.sleep(turn_seconds)
            ended = time.perf_counter()
            processes[number].send_signal(signal.SIGSTOP)
            turns.append((number, began, ended))
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    for process in processes:
        if process.wait() != 0:
            raise RuntimeError(f"{process.args} exited with {process.returncode}")
    taken = [_steps(command.times) for command in commands]
    medians = [(number, _median_within(taken[number], began, ended)) for number, began, ended in turns]
    pairs: list[tuple[float, float]] = []
    for (number, first), (_, second) in zip(medians[::2], medians[1::2], strict=False):
        if first is not None and second is not None:
            pairs.append((second, first) if number else (first, second))
    return pairs


def _put_on_cores(process: int) -> None:
    """Its main thread on the first, the others on any: also those that it has started since, which inherit its own."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in map(int, os.listdir(f"/proc/{process}/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores[:1] if thread == process else cores)


def _steps(times: Path) -> list[tuple[float, float]]:
    """(begin, end) of the steps after a third."""
    ends = json.loads(times.read_text())
    return list(itertools.pairwise(ends))[len(ends) // 3 :]


def _median_within(steps: list[tuple[float, float]], began: float, ended: float) -> float | None:
    """The first step of a turn, which finds its memory out of the caches, is left out."""
    inside = [end - begin for begin, end in steps if began <= begin and end <= ended][1:]
    return median(inside) if inside else None
