"""A trial's side of a session: executes the parent's commands at step boundaries of the running script.

The script runs until its first recognized step boundary and then waits for commands (listed in the package). Time spent
waiting for the parent belongs to no window, so windows of several levers, or of several processes, can be interleaved.
Between commands the script does not run: its next step starts on command.

Only one of a search's trials runs steps at a time (`Turn`); others load, or wait. Two that start at once reach their
first steps at once, and with as many threads each as there are cores, threads that wait for the other half of a
parallel loop keep a core that this half needs: on 2 cores, steps of 28 ms took seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING

from flatout.environment import thread_variables
from flatout.levers.applied import Applied
from flatout.levers.lever import Choice, Lever, choices_from_json
from flatout.machine.device import Device
from flatout.machine.process_memory import peak_resident_bytes, resident_bytes
from flatout.machine.ranks import joined_ranks
from flatout.plan_choices import ChoiceValue
from flatout.script.batch_count import BatchCount
from flatout.script.describe import NOT_AS_NOW, allows_tf32, observe
from flatout.script.device_calls import device_name, device_of
from flatout.script.numerics import NumericsRecorder, NumericsRequest
from flatout.script.patches import Patches, noting
from flatout.script.places import Places
from flatout.script.process_end import leave_at_once
from flatout.script.seeds import TrialSeeds
from flatout.script.step_memory import MemorySample, follow_memory
from flatout.script.trial.answers import most_of
from flatout.script.trial.forking import ForkPoint
from flatout.script.trial.isolated_child import Answer, IsolatedChild
from flatout.script.trial.messages import Command
from flatout.script.watch import Watch
from flatout.tracebacks import within

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.script.trial.commanded_rank import CommandedRank

STEPPING = frozenset(("window", "breakdown", "work", "operators", "peak", "numerics"))
"""Commands for which steps are run."""


class Turn:
    """One process's turn to run steps. The kernel takes it from a process that ends. folder: shared by the trials."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "turn"
        self._file: IO[bytes] | None = None
        """Open while it has the turn."""

    def take(self) -> None:
        """Waits until no other trial has it; nothing changes where it has it already."""
        import fcntl  # Windows lacks it, and must be able to import this file

        if self._file is None:
            self._file = open(self._path, "ab")  # noqa: SIM115 - closed by `leave`
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def leave(self) -> None:
        import fcntl

        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a loader's workers may have it open too
            self._file.close()
            self._file = None


class Session:
    """Drives one script; `read` blocks for the next command line. levers, choices: as in TrialConfig."""

    def __init__(
        self,
        child: IsolatedChild | CommandedRank,
        levers: str,
        choices: Sequence[Sequence[ChoiceValue]],
        read: Callable[[], str],
        point: ForkPoint | None = None,
        turn: Turn | None = None,
    ) -> None:
        """point: where other trials are forked from this process; turn: to run steps, which trials take in turn."""
        self.watch = Watch()
        self.levers = load_levers(levers)
        self.applied = Applied(self.watch.subject)
        self._child, self._read, self._write = child, read, child.write
        self._point, self._turn = point, turn
        self._start_choices = choices_from_json(choices, self.levers)
        self._task: Callable[[], bool] | None = None
        self._device: Device | None = None
        self._threads_at_start: int | None = None
        self._thread_variables = thread_variables()
        self._recorder: NumericsRecorder | None = None
        self._patches = Patches()
        self._unseeded: list[str] = []
        """Places in the script that took a seed from the system or the clock, and got ours instead."""
        self.watch.at_boundary.append(child.guarded(self._boundary))
        if turn is not None:
            self.watch.at_call.append(turn.take)

    def install(self) -> None:
        seeds = TrialSeeds(self.at_torch)
        self._unseeded = seeds.unseeded
        seeds.install()

    def install_late(self, torch: ModuleType) -> None:
        """In a process that has imported torch, and begins to train."""
        seeds = TrialSeeds()
        self._unseeded = seeds.unseeded
        seeds.install_late()
        for hook in self.at_torch:
            hook(torch)

    @property
    def at_torch(self) -> list[Callable[[ModuleType], object]]:
        """Called once torch has been imported."""
        of_fork = [] if self._point is None else [self._point.follow_threads]
        return [*of_fork, self.watch.install, self._note_made, self._torch_imported, *self._child.torch_hooks]

    def ended(self) -> Answer | None:
        """What was recorded until then; an unfinished window has no answer but the end."""
        if self._recorder is None or self._task is None or not self._recorder.steps:
            return None
        return {"event": "numerics", "ended": True, **self._recorder.finish(), **self._state()}

    def _note_made(self, torch: ModuleType) -> None:
        """Which line makes which optimizer."""
        places, made_at = Places(self._child.target.folder), self.watch.subject.made_at

        def note(optimizer: Optimizer, *_: object, **__: object) -> None:
            file, number = places.here()
            made_at[id(optimizer)] = f"{within(os.path.realpath(file), places.folder)}:{number}" if number else ""

        self._patches.replace(torch.optim.Optimizer, "__init__", noting(note))

    def _torch_imported(self, torch: ModuleType) -> None:
        """Turn on what must be on before the first loader creates its iterator."""
        by_variable = thread_variables() != self._thread_variables
        self._threads_at_start = NOT_AS_NOW if by_variable else torch.get_num_threads()
        self.applied.set(self._start_choices)

    def _boundary(self) -> None:
        if self.watch.finder.kind is None:
            return
        if self._device is None:
            if self.watch.may_be_inside_a_step():
                return
            self._device = device_of(self.watch.subject)
            self.watch.at_call.clear()
            self._write_ready()
        elif self._task is not None and not self._task():
            return
        self._task = None
        if self._turn is not None:
            self._turn.leave()
        while self._task is None:
            self._task = self._command()

    def _write_ready(self) -> None:
        told = {"steps": self.watch.steps, "step_kind": self.watch.finder.kind, "ranks": joined_ranks()}
        self._write({"event": "ready", **told})

    def _command(self) -> Callable[[], bool] | None:
        """Read and start a command; returns a function to call at each boundary until it returns True, or None."""
        line = self._read()
        command: Command = json.loads(line) if line else {"do": "stop"}
        self.watch.resume()
        if self._turn is not None and command["do"] in STEPPING:
            self._turn.take()
        start: Callable[[Command], Callable[[], bool] | None] = {
            "describe": self._describe,
            "window": self._window,
            "breakdown": self._breakdown,
            "work": self._work,
            "operators": self._operators,
            "peak": self._peak,
            "numerics": self._numerics,
            "forkable": self._of_forks,
            "fork": self._fork,
            "poll": self._of_forks,
            "kill": self._of_forks,
            "stop": lambda command: leave_at_once(0),  # all ranks, after the same step: none waits for another
        }[command["do"]]
        return start(command)

    def _choices(self, command: Command) -> list[Choice]:
        return self._start_choices + self._choices_of(command)

    def _choices_of(self, command: Command) -> list[Choice]:
        return choices_from_json(command.get("levers", ()), self.levers)

    def _describe(self, command: Command) -> None:
        observed = observe(self.watch, threads_at_start=self._threads_at_start, rows=())
        self._write({"event": "described", "observed": observed.to_json()})

    def _parts_of_steps(self) -> Callable[[], bool]:
        """To be asked at each boundary: were those until now inside a step, as an optimizer has taken the lead?"""
        finder = self.watch.finder
        before = finder.replaced_leaders

        def were_parts() -> bool:
            nonlocal before
            replaced, before = before != finder.replaced_leaders, finder.replaced_leaders
            return replaced

        return were_parts

    def _window(self, command: Command) -> Callable[[], bool]:
        assert self._device is not None
        device, settle, steps = self._device, command["settle"], command["steps"]
        before = time.perf_counter()
        self.applied.set(self._choices(command))
        apply_seconds = time.perf_counter() - before
        if command.get("suspended"):
            self.watch.suspend()
        device.synchronize()
        marks, drawn = [device.mark()], [self.watch.subject.samples_drawn]
        were_parts = self._parts_of_steps()

        def boundary() -> bool:
            if were_parts():
                marks.clear()
                drawn.clear()
            marks.append(device.mark())
            drawn.append(self.watch.subject.samples_drawn)
            if len(marks) <= settle + steps:
                return False
            device.synchronize()
            seconds = [device.elapsed_seconds(a, b) for a, b in itertools.pairwise(marks)]
            self._write(
                {
                    "event": "window",
                    "settle_seconds": seconds[:settle],
                    "seconds": seconds[settle:],
                    "apply_seconds": apply_seconds,
                    "samples": [_grown(a, b) for a, b in itertools.pairwise(drawn)][settle:],
                    **self._state(),
                }
            )
            return True

        return boundary

    def _breakdown(self, command: Command) -> Callable[[], bool]:
        self.applied.set(self._choices(command))
        self.watch.open_window()
        were_parts = self._parts_of_steps()

        def boundary() -> bool:
            if self.watch.rows and were_parts():
                self.watch.rows.clear()
            if len(self.watch.rows or ()) < command["steps"]:
                return False
            rows = self.watch.close_window()
            observed = observe(self.watch, threads_at_start=self._threads_at_start, rows=rows)
            self._write(
                {
                    "event": "breakdown",
                    "rows": [{"seconds": row.seconds, "parts": row.parts} for row in rows],
                    "observed": observed.to_json(),
                    **self._state(),
                }
            )
            return True

        return boundary

    def _work(self, command: Command) -> Callable[[], bool]:
        from flatout.script.step_work import follow_step

        self.applied.set(self._start_choices)
        finish = follow_step()

        def boundary() -> bool:
            self._write({"event": "work", "work": asdict(finish())})
            return True

        return boundary

    def _operators(self, command: Command) -> Callable[[], bool]:
        """Of the second step under these levers; the first may make what they need."""
        from flatout.profiling.following import OperatorFollower
        from flatout.profiling.step_operators import as_one, marked

        assert self._device is not None
        device, batches = self._device, BatchCount(self.watch.subject)
        self.applied.set(self._choices(command))
        self.watch.at_batch.append(batches.batch)
        follower = OperatorFollower(prefer=self._child.target.folder)
        following = contextlib.ExitStack()
        steps = itertools.count()

        def boundary() -> bool:
            batches.step_ended()
            if next(steps) == 0:
                following.enter_context(follower)
                following.enter_context(marked(follower))
                return False
            following.close()
            self.watch.at_batch.remove(batches.batch)
            self._write(
                {
                    "event": "operators",
                    "operators": [asdict(one) for one in as_one(follower.operators)],
                    "fault": follower.incomplete,
                    "samples": batches.samples_per_step,
                    "device": device.name,
                    "tf32": allows_tf32(),
                    **self._state(),
                }
            )
            return True

        return boundary

    def _peak(self, command: Command) -> Callable[[], bool]:
        """Skips the first step under these levers, which may still hold memory of the step before."""
        assert self._device is not None
        device, subject = self._device, self.watch.subject
        self.applied.set(self._choices(command))
        finish: Callable[[int], MemorySample | None] | None = None
        peaks: list[int | None] = []

        def boundary() -> bool:
            nonlocal finish
            if finish is None:
                device.reset_peak()
            else:
                sample = finish(self.watch.steps)
                peaks.append(sample.peak_bytes if sample is not None else None)
            if len(peaks) < command["steps"]:
                finish = follow_memory(subject, device_name(subject))
                return False
            peak = most_of(peaks) if device.kind == "cpu" else device.memory_peak_bytes()
            self._write({"event": "peak", "peak_bytes": peak, "incidents": subject.incidents, **self._state()})
            return True

        return boundary

    def _numerics(self, command: Command) -> Callable[[], bool]:
        self.applied.set(self._choices(command))
        request = NumericsRequest.from_json(command["request"])
        recorder = NumericsRecorder(self.watch, request)

        def boundary() -> bool:
            recorder.step_ended()
            if recorder.steps < request.steps:
                return False
            self._write({"event": "numerics", "ended": False, **recorder.finish(), **self._state()})
            self._recorder = None
            return True

        self._recorder = recorder
        return boundary

    # of a process from which trials are forked

    def _of_forks(self, command: Command) -> None:
        point, do, pid = self._point, command["do"], command.get("pid", 0)
        assert point is not None
        if do == "forkable":
            self._write({"event": do, "obstacle": point.obstacle()})
        elif do == "poll":
            self._write({"event": do, "pid": pid, "code": point.poll(pid)})
        else:
            point.kill(pid)
            self._write({"event": do, "pid": pid})

    def _fork(self, command: Command) -> None:
        """In the new process: go on with choices and commands of its own."""
        assert self._point is not None
        read = self._point.fork()
        if read is not None:
            self._read = read
            self.watch.enable()
            self._start_choices = self._choices_of(command)
            self.applied.set(self._start_choices)
            self._write_ready()

    def _state(self) -> dict[str, object]:
        return {
            "wrote": "" if self._point is None else self._point.wrote,
            "resident_bytes": resident_bytes(),
            "peak_resident_bytes": peak_resident_bytes(),
            "unseeded": self._unseeded,
            "rolled_back": [[*entry.choice.to_json(), entry.reason] for entry in self.applied.rolled_back],
        }


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def load_levers(source: str) -> Sequence[Lever]:
    """'package.module:NAME' or 'path/to/file.py:NAME'."""
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("flatout_levers_from_file", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    levers: Sequence[Lever] = getattr(module, name)
    return levers
