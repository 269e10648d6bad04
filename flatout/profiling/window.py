"""The windows of a profile, and how they become one: plain steps that are timed, one step that is followed, a few
steps under torch's profiler. Importing this imports torch.

A callable goes through them in `profile_callable`; an unmodified script in `script.profile_watch`.
"""

from __future__ import annotations

import contextlib
import linecache
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent

from flatout import environment
from flatout.profiling.attribution import Attributed, attribute, lines_of, modules_of, replays_graphs
from flatout.profiling.collectives import communication
from flatout.profiling.following import MOST_OPERATORS, OperatorFollower
from flatout.profiling.parts import idle_causes, parts_by_operators, parts_on_cpu, parts_on_gpu
from flatout.profiling.profile import Communication, OperatorRow, Profile, StepParts, evaluation_in_step
from flatout.profiling.recorded_events import DISTURBED, STEP, Links, Recording, links_of, recorded
from flatout.replaced import replaced
from flatout.torch_private.attributes import PROFILER_STARTS
from flatout.torch_private.dispatch import profiler_is_on
from flatout.tracebacks import within

MOST_OPERATORS_PROFILED = 20_000
"""In one window: the profiler keeps several events for each, of about a kilobyte, and reads them slowly."""
MOST_STEPS_UNCOUNTED = 20
"""Where no step could be followed, so that nobody knows how many operators one has."""
COMPILED = "unknown, because compiled code does not show its operators to Python"
GRAPHED = "unknown, because a CUDA graph does not show its operators to Python"
NO_KERNELS = (
    "unknown, because torch's profiler recorded no kernel: CUPTI is missing, or may not be used here (as in a "
    "container, or where the driver restricts profiling to administrators)"
)
NO_TIME = "unknown, because the script ended before a step could be timed without the profiler"
NO_OPERATORS = "unknown, because no operator of torch ran"
NOT_FOLLOWED = "unknown, because the script ended before a step could be followed"
NO_FILE = "unknown, because the code that runs is in no file of yours: it was typed in, or is a library's"
OTHERS_PROFILER = "unknown, because the script runs a profiler of its own"
MUCH_APPROXIMATE = 0.05


class ProfilerWindow:
    """torch's profiler, on from `start` to `stop`. Where another one is on, it stays off, and where another one starts
    meanwhile, it ends without a recording: there can be only one. `obstacle` says so."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.obstacle = ""
        self._on_gpu = on_gpu
        self._profiler: torch.autograd.profiler.profile | None = None
        self._listening = contextlib.ExitStack()

    def start(self) -> None:
        if profiler_is_on():
            self.obstacle = OTHERS_PROFILER
            return
        # torch.profiler.profile would first import the whole compiler into the script's process.
        self._profiler = torch.autograd.profiler.profile(
            use_device="cuda" if self._on_gpu else None, record_shapes=True, use_kineto=True
        )
        with _silent():
            self._profiler.__enter__()
        for name in PROFILER_STARTS:
            self._listening.enter_context(replaced(torch.autograd.profiler, name, self._giving_way))

    def _giving_way(self, original: Callable[..., object]) -> Callable[..., object]:
        def start(*args: object, **kwargs: object) -> object:
            self._give_way()
            return original(*args, **kwargs)

        return start

    def _give_way(self) -> None:
        if self._profiler is not None:
            with _silent():
                self._profiler.__exit__(None, None, None)
            self._profiler, self.obstacle = None, OTHERS_PROFILER

    def stop(self, *, steps: int | None = None) -> Recording | None:
        """What was recorded; None where nothing was. steps: of those that are labelled, so many are kept; None:
        all, with or without a label."""
        self._listening.close()
        if self._profiler is None:
            return None
        with _silent():
            self._profiler.__exit__(None, None, None)
            events = self._profiler.function_events or ()
            return recorded(events, steps=steps, links=self._links(events))

    def _links(self, events: Sequence[FunctionEvent]) -> Links | None:
        assert self._profiler is not None
        results = self._profiler.kineto_results
        if not self._on_gpu or not events or results is None or hasattr(events[0], "linked_correlation_id"):
            return None
        return links_of(results.events())

    def export(self, path: Path) -> None:
        """The Chrome trace of the window."""
        if self._profiler is not None:
            self._profiler.export_chrome_trace(str(path))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler warns about its own state, and logs that it starts and stops: nothing that the script did."""
    with environment.quiet_profiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def step_label(number: int) -> Iterator[None]:
    """Around a profiled step: torch's label, by which TensorBoard and Perfetto show steps, and ours inside of it."""
    with torch.profiler.record_function(f"ProfilerStep#{number}"), torch.profiler.record_function(STEP):
        yield


def steps_to_profile(asked: int, operators_per_step: int | None) -> int:
    """Fewer than asked where steps have very many operators; 0 where even one step has too many."""
    if not operators_per_step:
        return min(asked, MOST_STEPS_UNCOUNTED)
    if operators_per_step >= MOST_OPERATORS:
        return 0
    return max(1, min(asked, MOST_OPERATORS_PROFILED // operators_per_step))


@dataclass(kw_only=True)
class Windows:
    """What the windows found."""

    name: str
    device: str
    step_kind: str | None
    asked: int
    warm_up_steps: int = 0
    timed_seconds: Sequence[float] = ()
    spans: Mapping[str, float] | None = None
    """Seconds of each kind in a typical timed step, evaluation in it or on top; None: nothing timed the parts."""
    waited_seconds: float | None = None
    """Of a profiled step, in which the process waited for other ranks; None: not timed."""
    follower: OperatorFollower | None = None
    compiled: bool = False
    recording: Recording | None = None
    profiled_seconds: Sequence[float] = ()
    obstacle: str = ""
    """Why there is no recording."""
    folder: str = ""
    """What lines are named relative to."""
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    peak_resident_bytes: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def profile(self) -> Profile:
        """Without ceilings, which another process may have to measure."""
        step = statistics.median(self.timed_seconds) if self.timed_seconds else None
        profiled = statistics.median(self.profiled_seconds) if self.profiled_seconds else None
        if step is None:
            self.reasons.setdefault("step_seconds", NO_TIME)
        found = Profile(
            name=self.name,
            device=self.device,
            step_kind=self.step_kind,
            steps=len(self.profiled_seconds),
            timed_steps=len(self.timed_seconds),
            warm_up_steps=self.warm_up_steps,
            step_seconds=step,
            samples_seconds=tuple(self.timed_seconds),
            profiled_step_seconds=profiled,
            parts=None,
            evaluation_seconds=self._evaluation_on_top(step),
            samples_per_step=self.samples_per_step,
            tokens_per_step=self.tokens_per_step,
            peak_resident_bytes=self.peak_resident_bytes,
        )
        found = self._with_operators(found)
        if len(self.profiled_seconds) < self.asked and not self.obstacle:
            self.notes.append(f"{len(self.profiled_seconds)} of the {self.asked} steps asked for were profiled")
        return replace(found, notes=tuple(self.notes), reasons=dict(self.reasons))

    def _evaluation_on_top(self, step: float | None) -> float | None:
        if self.spans is None or step is None or evaluation_in_step(self.spans, step):
            return None
        return self.spans.get("evaluation") or None

    def _with_operators(self, found: Profile) -> Profile:
        missing = self.on_gpu and self.recording is not None and not self.recording.kernels
        if self.recording is None or missing:
            self.reasons.setdefault("operators", NO_KERNELS if missing else self.obstacle or NOT_FOLLOWED)
            return replace(found, parts=self._parts(found, None), flops=self._flops())
        followed = self.follower.operators if self.follower is not None else []
        attributed = attribute(
            self.recording,
            followed,
            steps=self.recording.steps or len(self.profiled_seconds),
            on_gpu=self.on_gpu,
            folder=self.folder,
        )
        self._say_what_is_unsure(attributed)
        if self.recording.left_out:
            count = self.recording.left_out
            self.notes.append(
                f"{count} of the {len(self.profiled_seconds)} profiled steps took over {DISTURBED:g} times the median "
                f"and {'is' if count == 1 else 'are'} left out"
            )
        parts = self._parts(found, attributed)
        causes = () if parts is None or not self.on_gpu else idle_causes(parts, attributed)
        return replace(
            found,
            parts=parts,
            operators=attributed.operators,
            modules=modules_of(attributed.operators, self.follower.modules) if self.follower is not None else (),
            lines=lines_of(attributed.operators, self._text, self._functions()),
            kernels=attributed.kernels,
            waits=attributed.waits if self.on_gpu else (),
            communication=self._communication(self.recording),
            idle_causes=causes,
            operator_calls=attributed.calls,
            launches=attributed.launches if self.on_gpu else None,
            flops=self._flops(),
        )

    def _communication(self, recording: Recording) -> Communication | None:
        steps = recording.steps or len(self.profiled_seconds)
        return communication(recording, steps=steps, exposed_seconds=self.waited_seconds)

    def _parts(self, found: Profile, attributed: Attributed | None) -> StepParts | None:
        step = found.best_step_seconds
        operators: Sequence[OperatorRow] = attributed.operators if attributed is not None else ()
        if step is None:
            self.reasons.setdefault("parts", NO_TIME)
            return None
        if self.on_gpu and attributed is None:
            self.reasons.setdefault("parts", self.reasons.get("operators", NO_KERNELS))
            return None
        if self.on_gpu and attributed is not None:
            return parts_on_gpu(self.spans or {}, attributed.busy_by_phase, step)
        if self.spans is not None and found.step_seconds is not None:
            talk = sum(row.seconds for row in operators if row.phase == "communication")
            inside = {kind: seconds for kind, seconds in self.spans.items() if kind != "evaluation"}
            return parts_on_cpu(self.spans if found.evaluation_seconds is None else inside, talk)
        if operators:
            self.reasons.setdefault("parts", "parts are times of operators; 'other' is Python and what it waits for")
            return parts_by_operators(operators, step)
        timed = found.step_seconds is not None and self.recording is not None
        self.reasons.setdefault("parts", self.obstacle or (NO_OPERATORS if timed else NO_TIME))
        return None

    def _flops(self) -> float | None:
        follower = self.follower
        if follower is None:
            self.reasons.setdefault("flops", COMPILED if self.compiled else NOT_FOLLOWED)
        elif self.recording is not None and replays_graphs(self.recording):
            self.reasons.setdefault("flops", GRAPHED)
        elif follower.incomplete:
            self.reasons.setdefault("flops", f"unknown, because {follower.incomplete}")
        else:
            return sum(one.flops for one in follower.operators if one.flops is not None)
        return None

    def _say_what_is_unsure(self, attributed: Attributed) -> None:
        follower = self.follower
        if follower is None:
            why = COMPILED if self.compiled else NOT_FOLLOWED
            for name in ("lines", "modules", "bytes"):
                self.reasons.setdefault(name, why)
            return
        if self.recording is not None and replays_graphs(self.recording):
            for name in ("lines", "modules", "bytes"):
                self.reasons.setdefault(name, GRAPHED)
        if follower.fault:
            self.reasons.setdefault("lines", f"unknown, because {follower.incomplete}")
        elif follower.operators and not any(one.origin.line for one in follower.operators):
            self.reasons.setdefault("lines", NO_FILE)
        if attributed.by_name_share > MUCH_APPROXIMATE:
            self.notes.append(
                "the profiler saw other shapes than were followed (they change from step to step, or vmap hides the "
                f"batch): modules and lines of {attributed.by_name_share:.0%} of the time of operators are by the "
                "order of calls alone"
            )
        elif attributed.unknown_share > 2 * MUCH_APPROXIMATE:
            self.notes.append(
                f"module and line are unknown for {attributed.unknown_share:.0%} of the time of operators: "
                "steps differ from one another"
            )

    def _text(self, file: str, line: int) -> str:
        path = file if Path(file).is_absolute() or not self.folder else str(Path(self.folder, file))
        return linecache.getline(path, line).strip()

    def _functions(self) -> dict[str, str]:
        operators = self.follower.operators if self.follower is not None else []
        return {within(one.origin.line, self.folder): one.origin.function for one in operators if one.origin.line}
