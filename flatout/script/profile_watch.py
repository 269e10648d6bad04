"""Time a few steps of a running script, follow one operator by operator, profile a few, then end with the answer.

Windows come one after the other, so that none disturbs another: after the warm-up, plain steps are timed with the spans
of `Watch`; one step runs under a dispatch mode that sees shapes, FLOPs, modules and lines; then torch's profiler
records the last ones. Its memory is bounded by the number of operators that the followed step had.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.environment import thread_variables
from flatout.machine.device import Device, Mark
from flatout.machine.process_memory import peak_resident_bytes
from flatout.script.batch_count import BatchCount
from flatout.script.communication_calls import ranks_together
from flatout.script.describe import NOT_AS_NOW, allows_tf32, breakdown, observe
from flatout.script.device_calls import device_of
from flatout.script.process_record import Place, record_of_steps
from flatout.script.rank_answers import RankAnswer, RankAnswers
from flatout.script.spans import StepRow
from flatout.script.trial.isolated_child import ObservedProcess
from flatout.script.trial.messages import Command, ProfileAnswer
from flatout.script.watch import Watch
from flatout.timing import LoadWatch
from flatout.torch_private.compiler import compile_was_asked_for

if TYPE_CHECKING:
    from flatout.profiling.following import OperatorFollower
    from flatout.profiling.recorded_events import Recording
    from flatout.profiling.window import ProfilerWindow, Windows
    from flatout.script.behaviour import BehaviourWatch

HELD_STEPS = 8
MOST_TIMED_STEPS = 50
TIMED_STEPS_OF_RANKS = 15
"""At least, where ranks train together: what each waits for the others differs from step to step."""
OTHER_MODE = "unknown, because the script has a dispatch mode of its own"
TOO_MANY = "unknown, because one step has more than {most:,} operators: a profile of it would not fit in memory"


class ProfileWatch:
    """Gives its answer once the steps have been profiled.

    Of ranks that train together each goes through the same windows in the same steps, by their number alone: a window
    that one begins earlier would be a wait for all others. Only the first is followed further, by its behaviour.
    """

    def __init__(self, child: ObservedProcess, command: Command, *, answers: RankAnswers) -> None:
        """answers: where ranks that train together leave theirs."""
        self.watch = Watch()
        self._answers, self._together = answers, ranks_together()
        self._started_at = time.time()
        self._child = child
        self._asked, self._warm_up = command["steps"], command["warm_up"]
        self._timed, self._timed_seconds = command["timed"], command["timed_seconds"]
        self._follow, self._settle, self._trace = command["follow"], command["settle"], command["trace"]
        self._follows_behaviour = command.get("behaviour", True)
        self._batches = BatchCount(self.watch.subject)
        self._stage: Callable[[], None] = self._warming_up
        self._has_torch = False
        self._boundaries = 0
        self._device: Device | None = None
        self._threads_at_start: int | None = None
        self._thread_variables = thread_variables()
        self._timed_from = 0.0
        self._rows: list[StepRow] = []
        self._follower: OperatorFollower | None = None
        self._obstacle = self._not_followed = ""
        self._window: ProfilerWindow | None = None
        self._to_profile = self._asked
        self._marks: list[Mark] = []
        self._waited_seconds: float | None = None
        self._load: LoadWatch | None = None
        self._busy_share: float | None = None
        """Of all cores, in the steps that were timed."""
        self._label = contextlib.ExitStack()
        self._recording: Recording | None = None
        self._has_trace = False
        self._behaviour: BehaviourWatch | None = None
        self._held: list[object] = []
        """Models, optimizers and loaders, so that they can be described after a script that ended."""
        self._peak_bytes: int | None = None
        self._found: ProfileAnswer = {"event": "profile", "ended": False, "steps": 0}
        self.watch.at_boundary.append(child.guarded(self._boundary))
        self.watch.at_batch.append(self._batches.batch)

    def install(self) -> None:
        self._child.on_torch([self._torch_imported])

    def _torch_imported(self, torch: ModuleType) -> None:
        import flatout.profiling.window  # noqa: F401  # now, while no module of the script can be in its way
        from flatout.script.behaviour import BehaviourWatch

        self._has_torch = True
        self._behaviour = BehaviourWatch(self._child.target.folder)
        by_variable = thread_variables() != self._thread_variables
        self._threads_at_start = NOT_AS_NOW if by_variable else torch.get_num_threads()
        self.watch.install(torch)

    def ended(self) -> ProfileAnswer:
        """The script ended before all steps: what is known by then."""
        if not self._has_torch:
            self._found = {"event": "profile", "ended": True, "steps": 0}
            return self._found
        if self._stage == self._timing:
            self._rows = self.watch.close_window()
        elif self._stage == self._following and self._follower is not None:
            self._follower.__exit__(None, None, None)
            self._follower = None  # it holds part of a step
        elif self._stage == self._profiling:
            self._stop_profiler()
        self._found = self._answer(ended=True)
        return self._found

    def stop(self) -> None:
        """Leave the script alone."""
        self.watch.uninstall()

    # one stage after the other; each is called at the end of a step

    def _boundary(self) -> None:
        if self.watch.finder.kind is None:
            return
        self._boundaries += 1
        if self._boundaries == 1:
            self._answers.begin()
        if self._boundaries <= HELD_STEPS:
            subject = self.watch.subject
            self._held = [*subject.modules, *subject.optimizers, *subject.loaders]
        self._batches.step_ended()
        self._stage()

    def _warming_up(self) -> None:
        if self._boundaries < self._warm_up:
            return
        self._see_ranks()
        self._device = device_of(self.watch.subject)
        if self._timed:
            self._device.synchronize()
            self._stage, self._timed_from = self._timing, time.perf_counter()
            self.watch.open_window()
        else:
            self._begin_following()

    def _see_ranks(self) -> None:
        self._together = ranks_together()
        if self._together is None:
            return
        self._load = LoadWatch()
        if self._timed_seconds:
            self._timed, self._timed_seconds = max(self._timed, TIMED_STEPS_OF_RANKS), 0.0
        if self._together[0]:
            self._trace = ""

    def _timing(self) -> None:
        timed = len(self.watch.rows or ())
        enough = timed >= MOST_TIMED_STEPS or time.perf_counter() - self._timed_from >= self._timed_seconds
        if timed < self._timed or not enough:
            return
        self._rows = self.watch.close_window()
        self._busy_share = None if self._load is None else self._load.busy_share()
        self._begin_following()

    def _begin_following(self) -> None:
        from flatout.profiling.following import OperatorFollower
        from flatout.profiling.window import COMPILED, NOT_FOLLOWED
        from flatout.torch_private.dispatch import current_dispatch_mode

        if compile_was_asked_for():
            self._not_followed = COMPILED
        elif current_dispatch_mode() is not None:
            self._not_followed = OTHER_MODE
        elif not self._follow:
            self._not_followed = NOT_FOLLOWED
        if self._not_followed:
            self._begin_profiling()
            return
        self._stage = self._following
        self._follower = OperatorFollower(prefer=self._child.target.folder)
        self._follower.__enter__()

    def _following(self) -> None:
        assert self._follower is not None
        self._follower.__exit__(None, None, None)
        self._begin_profiling()

    def _begin_profiling(self) -> None:
        from flatout.profiling.following import MOST_OPERATORS
        from flatout.profiling.window import ProfilerWindow, steps_to_profile

        assert self._device is not None
        self._to_profile = steps_to_profile(self._asked, self._follower.count if self._follower is not None else None)
        if not self._to_profile:
            self._obstacle = TOO_MANY.format(most=MOST_OPERATORS)
            self._begin_behaving()
            return
        self._stage, self._window = self._profiling, ProfilerWindow(on_gpu=self._device.kind == "cuda")
        self._device.synchronize()
        self._window.start()
        self._obstacle = self._window.obstacle
        if self._obstacle:
            self._begin_behaving()
        elif not self._settle:
            self._begin_step()

    def _begin_step(self) -> None:
        from flatout.profiling.window import step_label

        assert self._device is not None
        if not self._marks and self._together is not None and self._device.kind == "cpu":
            self.watch.open_window()  # how long it waits for other ranks in these very steps
        self._marks.append(self._device.mark())
        self._label.enter_context(step_label(len(self._marks) - 1))  # it says what belongs to whole steps

    def _profiling(self) -> None:
        assert self._device is not None
        self._label.close()
        if self._settle > 0 or not self._marks:
            self._settle -= 1
            if self._settle <= 0:
                self._begin_step()
            return
        if len(self._marks) < self._to_profile:
            self._begin_step()
            return
        self._marks.append(self._device.mark())
        self._stop_profiler()
        self._begin_behaving()

    def _stop_profiler(self) -> None:
        from flatout.profiling.recorded_events import DISTURBED

        if self._window is None:
            return
        self._label.close()
        rows = self.watch.close_window()
        if rows and not self.watch.communication_unknown_because:
            kept = [row for row in rows if row.seconds <= DISTURBED * statistics.median(one.seconds for one in rows)]
            self._waited_seconds = statistics.fmean(row.parts.get("communication", 0.0) for row in kept)
        if self._device is not None:
            self._device.synchronize()
        self._recording = self._window.stop(steps=max(0, len(self._marks) - 1))
        self._obstacle = self._window.obstacle
        if self._recording is None:  # the script started a profiler of its own meanwhile
            self._marks.clear()
        if self._trace and len(self._marks) > 1:
            self._window.export(Path(self._trace))
            self._has_trace = True

    def _begin_behaving(self) -> None:
        """The last window, in which the script itself is followed: its calls have more to tell than its times."""
        assert self._behaviour is not None
        self._peak_bytes = peak_resident_bytes()
        if not self._follows_behaviour or (self._together is not None and self._together[0]):
            self._finish()
            return
        self._stage = self._behaving
        self._behaviour.start(self.watch.subject)

    def _behaving(self) -> None:
        assert self._behaviour is not None
        self._behaviour.step_ended()
        if self._behaviour.done:
            self._finish()

    # the answer

    def _finish(self) -> None:
        self._found = self._answer(ended=False)
        self._stage = lambda: None
        self._child.finish(self._found)

    def rank_answer(self, fault: str = "") -> RankAnswer:
        """The same, of a process among others that train."""
        place = Place() if self._together is None else Place(rank=self._together[0], ranks=self._together[1])
        device = self._device
        record = record_of_steps(
            self.watch,
            self._rows,
            place=place,
            started_at=self._started_at,
            busy_share=self._busy_share,
            peak_device_bytes=device.memory_peak_bytes() if device is not None and device.kind == "cuda" else None,
        )
        return {
            "name": self._answers.name,
            "rank": place.rank,
            "ranks": place.ranks,
            "ended": self._found["ended"],
            "profile": self._found,
            "record": record.to_json(),
            "fault": fault,
        }

    def _answer(self, *, ended: bool) -> ProfileAnswer:
        observed = behaviour = None
        windows = None
        if self._stage == self._behaving and self._behaviour is not None:
            self._behaviour.stop()
            behaviour = self._behaviour.result().to_json()
        if self._boundaries:
            found = observe(self.watch, threads_at_start=self._threads_at_start, rows=self._rows)
            counted = self._follower
            if counted is not None:
                found = replace(found, flops_per_step=self._flops(counted), operations_per_step=counted.count)
            observed = found.to_json()
            windows = self._windows() if self._rows or len(self._marks) > 1 else None
        return {
            "event": "profile",
            "ended": ended,
            "steps": self._boundaries,
            "step_kind": self.watch.finder.kind,
            "profile": windows.profile().to_json() if windows is not None else None,
            "observed": observed,
            "behaviour": behaviour,
            "tf32": allows_tf32(),
            "has_trace": self._has_trace,
        }

    def _flops(self, follower: OperatorFollower) -> float | None:
        if follower.incomplete:
            return None
        return sum(one.flops for one in follower.operators if one.flops is not None) or None

    def _windows(self) -> Windows:
        from flatout.profiling.window import Windows

        assert self._device is not None
        device = self._device
        reasons = dict(self._batches.reasons())
        if self._not_followed:
            reasons |= dict.fromkeys(("lines", "modules", "flops", "bytes"), self._not_followed)
        return Windows(
            name=self._child.target.name,
            device=device.name,
            step_kind=self.watch.finder.kind,
            asked=self._asked,
            warm_up_steps=min(self._warm_up, self._boundaries),
            timed_seconds=[row.seconds for row in self._rows],
            spans=breakdown(self._rows) if self._rows else None,
            waited_seconds=self._waited_seconds,
            follower=self._follower,
            compiled=compile_was_asked_for(),
            recording=self._recording if len(self._marks) > 1 else None,
            profiled_seconds=[device.elapsed_seconds(a, b) for a, b in itertools.pairwise(self._marks)],
            obstacle=self._obstacle,
            folder=self._child.target.folder,
            samples_per_step=self._batches.samples_per_step,
            tokens_per_step=self._batches.tokens_per_step,
            peak_resident_bytes=self._peak_bytes or peak_resident_bytes(),
            reasons=reasons,
        )
