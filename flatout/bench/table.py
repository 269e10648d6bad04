"""Measure the table: each workload's contenders in turns, in another order every round.

A peer is tried in every setting of its grid first, and Flatout's training plan is searched for; then all start anew, so
that every contender is equally fresh. What cannot run has its reason in place of a row.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import psutil

from flatout.bench.inference import INFERENCE
from flatout.bench.process import ContenderProcess, NotInstalled, Ready, in_child
from flatout.bench.results import BenchResult, Row, Tried, WorkloadResult
from flatout.bench.training import BERT_BASE, COMPILE, GPT2_124M, RESNET50
from flatout.bench.workload import Contender, Found, Settings, Setup, Workload
from flatout.errors import FlatoutError, MachineError
from flatout.machine.detect import available_memory_bytes, installed_version
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.timing import LoadWatch
from flatout.units import format_bytes

_QUICK = (RESNET50, *INFERENCE)
WORKLOADS = {one.key: one for one in (*_QUICK, COMPILE, GPT2_124M, BERT_BASE)}
"""First the table of the guides, then two more."""
QUICK = tuple(one.key for one in _QUICK)
"""Those of a quick bench."""
PACKAGES = ("torch", "transformers", "lightning", "accelerate")
TRIED_TURNS = 2
"""Of a peer in each of its settings, once warm."""
ROOM = 1.2
"""Times what the largest contender so far holds must be free before another starts."""
LEAST_ROUNDS = 3

Progress = Callable[[str], None]
T = TypeVar("T")


class Running(NamedTuple):
    """A contender that is ready for its turns."""

    process: ContenderProcess
    ready: Ready


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to look and to measure."""

    rounds: int
    tune_seconds: float
    most_seconds: float = float("inf")
    """For the rounds of one workload, once there are LEAST_ROUNDS."""


def measure_table(workloads: Sequence[Workload], setup: Setup, effort: Effort, progress: Progress) -> BenchResult:
    """One result for each workload. `progress` is called with what is being done. Ctrl-C ends it early, with the
    workloads that were measured until then."""
    load = LoadWatch()
    machine = machine_with_ceilings(progress)
    results: list[WorkloadResult] = []
    with contextlib.suppress(KeyboardInterrupt):
        for workload in workloads:
            results.append(_Run(workload, setup, effort, progress).measure())
    seen = load.read()
    return BenchResult(
        machine=machine,
        device=setup.device,
        quick=setup.quick,
        versions=installed_versions(),
        contended=None if seen is None else seen.contended,
        workloads=tuple(results),
    )


@dataclass
class _Run:
    """One workload, while it is measured."""

    workload: Workload
    setup: Setup
    effort: Effort
    progress: Progress
    left_out: dict[str, str] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    largest_bytes: int = 0

    def measure(self) -> WorkloadResult:
        chosen = {one.name: self._chosen(one) for one in self.workload.contenders}
        with self._started({name: found for name, found in chosen.items() if found is not None}) as processes:
            flops = self._flops(processes)
            outputs = {name: self._asked(processes, name, ContenderProcess.outputs) for name in list(processes)}
            seconds, losses = self._rounds(processes)
            peaks = {name: self._asked(processes, name, ContenderProcess.peak_bytes) for name in list(processes)}
            rows = [
                Row(
                    name=name,
                    role=self.workload.contender(name).role,
                    how=", ".join(filter(None, [one.ready.how, self.notes.get(name, "")])),
                    seconds=tuple(seconds[name]),
                    losses=tuple(losses[name]),
                    first_seconds=one.ready.first_seconds,
                    peak_bytes=peaks[name],
                    other_numbers=self.workload.contender(name).other_numbers,
                )
                for name, one in processes.items()
            ]
        rows = self._with_differences(rows, outputs)
        return WorkloadResult(
            key=self.workload.key,
            title=self.workload.title,
            unit=self.workload.unit,
            size=self.workload.size(self.setup),
            items=self.workload.items(self.setup),
            guides=self.workload.guides,
            compared=self.workload.compared,
            flops=flops,
            rows=tuple(rows),
            left_out=self.left_out,
            tried=tuple(self.tried),
        )

    # what takes part

    def _chosen(self, contender: Contender) -> Settings | None:
        """None: it cannot take part."""
        if contender.search is not None:
            found = self._searched(contender)
            return None if found is None else found.settings
        grid = contender.grid(self.setup)
        return grid[0] if len(grid) == 1 else self._fastest_of(contender, grid)

    def _searched(self, contender: Contender) -> Found | None:
        assert contender.search is not None
        self._say(f"{contender.name}: tuning for {self.effort.tune_seconds:.0f} s")
        try:
            found: Found = in_child(contender.search, self.setup, self.effort.tune_seconds)
        except FlatoutError as error:
            self.left_out[contender.name] = str(error)
            return None
        self.notes[contender.name] = found.note
        return found

    def _fastest_of(self, contender: Contender, grid: Sequence[Settings]) -> Settings | None:
        best: tuple[float, Settings] | None = None
        for number, settings in enumerate(grid):
            self._say(f"{contender.name}: setting {number + 1} of {len(grid)}")
            try:
                how, seconds = self._tried(contender.name, settings)
            except NotInstalled as error:
                self.left_out[contender.name] = f"not installed ({error})"
                return None
            except FlatoutError as error:
                how = ", ".join(f"{name} = {value}" for name, value in settings.items())
                self.tried.append(Tried(name=contender.name, how=how, seconds=None, reason=str(error)))
                continue
            self.tried.append(Tried(name=contender.name, how=how, seconds=seconds))
            if best is None or seconds < best[0]:
                best = seconds, settings
        if best is None:
            self.left_out[contender.name] = f"every setting failed: {self.tried[-1].reason}"
            return None
        return best[1]

    def _tried(self, name: str, settings: Settings) -> tuple[str, float]:
        """(its settings in words, seconds of its fastest turn)"""
        process, ready = self._ready(self._begun(name, settings))
        with contextlib.closing(process):
            return ready.how, min(process.turn()[0] for _ in range(TRIED_TURNS))

    @contextlib.contextmanager
    def _started(self, chosen: dict[str, Settings]) -> Iterator[dict[str, Running]]:
        """Those that could start; all at once where it is to be quick, else one after the other."""
        starting: dict[str, ContenderProcess] = {}
        running: dict[str, Running] = {}
        try:
            for name, settings in chosen.items() if self.setup.quick else ():
                try:
                    starting[name] = self._begun(name, settings)
                except FlatoutError as error:
                    self.left_out[name] = str(error)
            for name, settings in chosen.items():
                if name in self.left_out:
                    continue
                self._say(f"{name}: starting")
                try:
                    running[name] = self._ready(starting[name] if self.setup.quick else self._begun(name, settings))
                except NotInstalled as error:
                    self.left_out[name] = f"not installed ({error})"
                except FlatoutError as error:
                    self.left_out[name] = str(error)
            yield running
        finally:
            for process in (*starting.values(), *(one.process for one in running.values())):
                process.close()

    def _begun(self, name: str, settings: Settings) -> ContenderProcess:
        """MachineError where too little memory is left for one more."""
        free = available_memory_bytes()  # not the host's, of which a container may have little
        if free < ROOM * self.largest_bytes:
            raise MachineError(
                f"{format_bytes(free)} of memory are left",
                limit=f"another contender took {format_bytes(self.largest_bytes)}",
            )
        return ContenderProcess(self.workload.contender(name).prepare, self.setup, settings)

    def _ready(self, process: ContenderProcess) -> Running:
        ready = process.wait_until_ready()
        with contextlib.suppress(psutil.Error):
            self.largest_bytes = max(self.largest_bytes, psutil.Process(process.process_id).memory_info().rss)
        return Running(process, ready)

    # what is measured

    def _flops(self, processes: dict[str, Running]) -> float | None:
        name = self.workload.flops_of
        return None if name not in processes else self._asked(processes, name, ContenderProcess.flops)

    def _asked(self, processes: dict[str, Running], name: str, ask: Callable[[ContenderProcess], T]) -> T | None:
        """Its answer; None where it has failed, and takes part no longer."""
        try:
            return ask(processes[name].process)
        except FlatoutError as error:
            self.left_out[name] = str(error)
            processes.pop(name).process.close()
            return None

    def _rounds(self, processes: dict[str, Running]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Seconds and losses by contender."""
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        losses: dict[str, list[float]] = {name: [] for name in processes}
        began = time.perf_counter()
        for number in range(self.effort.rounds):
            if number >= LEAST_ROUNDS and time.perf_counter() - began > self.effort.most_seconds:
                break
            self._say(f"round {number + 1} of {self.effort.rounds}")
            for name in random.sample(list(processes), len(processes)):
                turn = self._asked(processes, name, ContenderProcess.turn)
                if turn is None:
                    continue
                took, loss = turn
                seconds[name].append(took)
                losses[name] += [] if loss is None else [loss]
        return seconds, losses

    def _with_differences(self, rows: list[Row], outputs: dict[str, list[float] | None]) -> list[Row]:
        plain = next((outputs[row.name] for row in rows if row.role == "plain"), None)
        if plain is None:
            return rows
        return [
            row
            if row.role == "plain" or (own := outputs[row.name]) is None
            else replace(row, difference=difference(plain, own, tokens=self.workload.compared == "tokens"))
            for row in rows
        ]

    def _say(self, what: str) -> None:
        self.progress(f"{self.workload.title}: {what}")


def difference(plain: Sequence[float], other: Sequence[float], *, tokens: bool) -> float | None:
    """Relative, in the Euclidean norm; of tokens, the share that differs. None: they are not equally many."""
    if len(plain) != len(other) or not plain:
        return None
    if tokens:
        return sum(a != b for a, b in zip(plain, other, strict=True)) / len(plain)
    size = sum(a * a for a in plain)
    apart = sum((a - b) ** 2 for a, b in zip(plain, other, strict=True))
    return float((apart / size) ** 0.5) if size else None


def installed_versions(*more: str) -> dict[str, str | None]:
    """Of torch, the peers and `more`; None: not installed."""
    return {package: installed_version(package) for package in (*PACKAGES, *more)}
