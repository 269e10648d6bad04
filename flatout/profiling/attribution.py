"""Bring the profiler's times and the followed operators together: rows by operator, module and line.

Both see the same calls in the same order, as long as steps are alike: the i-th call of an operator with certain shapes
in one window belongs to the i-th in the other. Where shapes differ from step to step, names alone are compared, and
FLOPs are then counted from the profiler's own shapes where that is possible. Under vmap the profiler sees each call
twice, with the shapes of one example and inside that with those of the batch; only these are followed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flatout.profiling.operator_classes import operator_class
from flatout.profiling.profile import KernelRow, LineRow, ModuleRow, OperatorRow, Phase, WaitRow, grouped, known_sum
from flatout.profiling.recorded_events import Event, Kernel, Recording
from flatout.profiling.waits import Wait, cost_of, waits_in
from flatout.tracebacks import within

if TYPE_CHECKING:
    from flatout.profiling.following import FollowedModule, FollowedOperator, Origin

MOST_ROWS = 1500
MOST_KERNELS = 200
MOST_LINES = 200
OTHERS = "(others)"
AUTOGRAD = "(autograd engine)"
COMPILED = "(compiled code)"
_AUTOGRAD_NAMES = ("autograd::", "torch::autograd::")
_COMPILED_NAMES = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction", "TorchDynamo Cache Lookup")
_PHASE_LABELS: tuple[tuple[str, Phase], ...] = (
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)
"""Labels that torch itself puts around these calls."""


@dataclass(kw_only=True)
class _Sums:
    calls: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    flops: float | None = None
    size_bytes: float | None = None

    def add(self, host: float, device: float | None, flops: float | None, size_bytes: float | None) -> None:
        self.calls += 1
        self.host_seconds += host
        self.seconds += host if device is None else device
        if flops is not None:
            self.flops = (self.flops or 0.0) + flops
        if size_bytes is not None:
            self.size_bytes = (self.size_bytes or 0.0) + size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Where:
    """What is known of one event."""

    phase: Phase
    origin: Origin | None = None
    dtype: str = ""
    flops: float | None = None
    size_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Attributed:
    """Rows per step."""

    operators: tuple[OperatorRow, ...]
    calls: float
    by_name_share: float
    """Of the time of operators, the share that was matched by name, as the shapes differ."""
    unknown_share: float
    """The share without a line and a module."""
    kernels: tuple[KernelRow, ...] = ()
    busy_seconds: float = 0.0
    """Of a GPU, at which anything ran."""
    busy_by_phase: Mapping[str, float] = field(default_factory=dict)
    launches: float = 0.0
    waits: tuple[WaitRow, ...] = ()
    """Without those of copies to the GPU."""
    waiting_cost_seconds: float = 0.0
    """Of these waits."""
    copying_cost_seconds: float = 0.0
    """Of the waits of copies to the GPU."""


def attribute(
    recording: Recording, followed: Sequence[FollowedOperator], *, steps: int, on_gpu: bool, folder: str = ""
) -> Attributed:
    """steps: in the recording. on_gpu: times are those of kernels. folder: what lines are named relative to."""
    return _Attribution(recording, followed, steps=steps, on_gpu=on_gpu, folder=folder).result()


class _Attribution:
    def __init__(
        self, recording: Recording, followed: Sequence[FollowedOperator], *, steps: int, on_gpu: bool, folder: str
    ) -> None:
        self._recording = recording
        self._events, self._kernels = recording.events, recording.kernels
        self._steps, self._on_gpu, self._folder = max(1, steps), on_gpu, folder
        self._exact = _turns(followed, lambda one: (one.phase == "backward", one.name, one.shapes))
        self._by_name = _turns(followed, lambda one: (one.phase == "backward", one.name))
        self._where: list[_Where | None] = [None] * len(self._events)
        self._matched_by_name = [False] * len(self._events)
        self._top: list[int | None] = [None] * len(self._events)
        """The followed operator that an event is, or is part of."""
        self._device = [event.device_seconds for event in self._events]
        self._inside = [0.0] * len(self._events)
        """Seconds of an event's direct children."""

    def result(self) -> Attributed:
        self._match()
        self._fill()
        rows, calls, by_name = self._rows()
        total = sum(row.seconds for row in rows) or 1.0
        busy, by_phase = self._busy()
        waits, copies = self._waits()
        return Attributed(
            operators=_bounded(rows),
            calls=calls / self._steps,
            by_name_share=by_name / self._steps / total,
            unknown_share=sum(row.seconds for row in rows if not row.line and not row.module) / total,
            kernels=self._kernel_rows(),
            busy_seconds=busy / self._steps,
            busy_by_phase={phase: seconds / self._steps for phase, seconds in by_phase.items()},
            launches=len(self._kernels) / self._steps,
            waits=self._wait_rows(waits),
            waiting_cost_seconds=cost_of(waits) / self._steps,
            copying_cost_seconds=cost_of(copies) / self._steps,
        )

    def _match(self) -> None:
        backward = [False] * len(self._events)
        for number, event in enumerate(self._events):
            backward[number] = event.backward or (event.parent is not None and backward[event.parent])
        batched = self._batched(backward)
        for number, event in enumerate(self._events):
            parent = event.parent
            if parent is not None:
                self._inside[parent] += event.seconds
                self._top[number] = self._top[parent]
            if self._top[number] is not None or event.annotation:
                continue
            found = next(self._exact.get((backward[number], event.name, event.shapes), _NO_TURN), None)
            exact = found is not None
            if found is None and number not in batched:
                found = next(self._by_name.get((backward[number], event.name), _NO_TURN), None)
            if found is not None:
                self._top[number], self._matched_by_name[number] = number, not exact
                self._where[number] = _Where(
                    phase=found.phase,
                    origin=found.origin,
                    dtype=found.dtype,
                    flops=found.flops if exact else flops_by_shapes(event.name, event.shapes),
                    size_bytes=found.size_bytes if exact else None,
                )
        for number, event in enumerate(self._events):
            if self._where[number] is None and backward[number]:
                self._where[number] = _Where(phase="backward")
            elif self._where[number] is None and (phase := _labelled_phase(event)) is not None:
                self._where[number] = _Where(phase=phase)
            elif self._where[number] is None and event.parent is not None and self._top[number] is None:
                above = self._where[event.parent]
                self._where[number] = _Where(phase=above.phase) if above is not None else None

    def _batched(self, backward: Sequence[bool]) -> set[int]:
        """Calls under vmap: each has the shapes of one example, and inside it an operator of its class (for `mm`, maybe
        `bmm`) takes the whole batch, as it was followed."""
        found = set()
        for number, event in enumerate(self._events):
            if event.parent is None or (backward[number], event.name, event.shapes) not in self._exact:
                continue
            kind = operator_class(event.name)
            above: int | None = event.parent
            while above is not None:
                if operator_class(self._events[above].name) == kind:
                    found.add(above)
                above = self._events[above].parent
        return found

    def _fill(self) -> None:
        """An operator that only calls others belongs where the first of them does; device time goes to the top."""
        for number in range(len(self._events) - 1, -1, -1):
            parent, top = self._events[number].parent, self._top[number]
            if top is not None and top != number:
                self._device[top] += self._device[number]
                continue
            where = self._where[number]
            if parent is None or where is None or where.origin is None or self._top[parent] is not None:
                continue
            above = self._where[parent]
            if not self._events[parent].annotation and not _is_engine(self._events[parent].name):
                phase = above.phase if above is not None and above.phase == "backward" else where.phase
                self._where[parent] = _Where(phase=phase, origin=where.origin, dtype=where.dtype)
            elif _is_engine(self._events[parent].name):
                self._where[parent] = _Where(phase="backward", origin=where.origin)

    def _rows(self) -> tuple[list[OperatorRow], int, float]:
        sums: dict[tuple[str, str, str, Phase, str, str, bool], _Sums] = {}
        calls, by_name = 0, 0.0
        for number, event in enumerate(self._events):
            top = self._top[number]
            name = _row_name(event)
            if not name or (top is not None and top != number):
                continue
            where = self._where[number] or _Where(phase="other")
            host = event.seconds if top == number else max(0.0, event.seconds - self._inside[number])
            device = self._device[number] if self._on_gpu else None
            if name.partition("::")[0] == "c10d" or operator_class(name) == "communication":
                where = _Where(phase="communication", origin=where.origin, dtype=where.dtype)
            place, module = "", ""
            if where.origin is not None:
                place, module = within(where.origin.line, self._folder), where.origin.module
            shapes = " ".join(str(list(shape)) for shape in event.shapes) if name == event.name else ""
            key = name, shapes[:200], where.dtype, where.phase, module, place, bool(self._device[number])
            sums.setdefault(key, _Sums()).add(host, device, where.flops, where.size_bytes)
            calls += 1
            if self._matched_by_name[number]:
                by_name += host if device is None else device
        return [self._row(key, one) for key, one in sums.items()], calls, by_name

    def _row(self, key: tuple[str, str, str, Phase, str, str, bool], one: _Sums) -> OperatorRow:
        name, shapes, dtype, phase, module, line, has_kernels = key
        steps = self._steps
        return OperatorRow(
            name=name,
            operator_class=operator_class(name),
            shapes=shapes,
            dtype=dtype,
            calls=one.calls / steps,
            seconds=one.seconds / steps,
            host_seconds=one.host_seconds / steps,
            phase=phase,
            module=module,
            line=line,
            device="cuda" if has_kernels else "cpu",
            flops=None if one.flops is None else one.flops / steps,
            bytes=None if one.size_bytes is None else one.size_bytes / steps,
        )

    def _phase_of(self, kernel: Kernel) -> str:
        if kernel.kind == "communication":
            return "communication"
        if kernel.kind == "copy":
            return "copies"
        number = kernel.operator
        while number is not None:
            top = self._top[number]
            where = self._where[number if top is None else top]
            if where is not None:
                return where.phase
            number = self._events[number].parent
        return "other"

    def _busy(self) -> tuple[float, dict[str, float]]:
        """Time at which anything ran; where two kernels overlap, it belongs to the one that began first."""
        total, until, by_phase = 0.0, -math.inf, dict[str, float]()
        for kernel in sorted(self._kernels, key=lambda one: one.begin):
            alone = kernel.end - max(kernel.begin, until)
            if alone > 0:
                phase = self._phase_of(kernel)
                by_phase[phase] = by_phase.get(phase, 0.0) + alone
                total, until = total + alone, kernel.end
        return total, by_phase

    def _waits(self) -> tuple[list[Wait], list[Wait]]:
        """(of reads and of what the script waits for by itself, of copies to the GPU). Without those of convolutions,
        for which cuDNN times its algorithms: the script has no part in them."""
        found = [one for one in waits_in(self._recording) if self._on_gpu and not self._is_in_convolution(one)]
        return [one for one in found if not one.copies_to_device], [one for one in found if one.copies_to_device]

    def _operator_around(self, wait: Wait) -> int | None:
        """The followed operator that waits, or else the innermost one."""
        number = self._events[wait.event].parent
        top = self._top[number] if number is not None else None
        return number if top is None else top

    def _is_in_convolution(self, wait: Wait) -> bool:
        number = self._operator_around(wait)
        return number is not None and operator_class(self._events[number].name) == "convolution"

    def _wait_rows(self, waits: Sequence[Wait]) -> tuple[WaitRow, ...]:
        sums: dict[tuple[str, str], list[float]] = {}
        for one in waits:
            number = self._operator_around(one)
            where = self._where[number] if number is not None else None
            line = within(where.origin.line, self._folder) if where is not None and where.origin else ""
            operator = self._events[number].name if number is not None else ""
            sums.setdefault((operator, line), []).append(one.seconds)
        rows = [
            WaitRow(operator=operator, line=line, calls=len(seconds) / self._steps, seconds=sum(seconds) / self._steps)
            for (operator, line), seconds in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.seconds)[:MOST_LINES])

    def _kernel_rows(self) -> tuple[KernelRow, ...]:
        alike: dict[tuple[str, str, str], list[Kernel]] = {}
        for one in self._kernels:
            number = one.operator
            top = self._top[number] if number is not None else None
            operator = self._events[top if top is not None else number].name if number is not None else ""
            alike.setdefault((one.name[:300], one.kind, operator), []).append(one)
        rows = []
        for (name, _, operator), kernels in alike.items():
            copied = known_sum(*(one.size_bytes for one in kernels))
            row = KernelRow(
                name=name,
                kind=kernels[0].kind,
                operator=operator,
                calls=len(kernels) / self._steps,
                seconds=sum(one.seconds for one in kernels) / self._steps,
                bytes=None if copied is None else copied / self._steps,
            )
            rows.append(row)
        return tuple(sorted(rows, key=lambda row: -row.seconds)[:MOST_KERNELS])


def _turns(
    followed: Sequence[FollowedOperator], key: Callable[[FollowedOperator], object]
) -> dict[object, Iterator[FollowedOperator]]:
    """The followed operators by key, each key's handed out in turn, step after step."""
    found: dict[object, list[FollowedOperator]] = {}
    for one in followed:
        found.setdefault(key(one), []).append(one)
    return {name: itertools.cycle(operators) for name, operators in found.items()}


_NO_TURN: Iterator[FollowedOperator] = iter(())


def flops_by_shapes(name: str, shapes: Sequence[Sequence[int]]) -> float | None:
    """Of a product whose arguments have these shapes; None for other operators.

    >>> flops_by_shapes("aten::addmm", [[10], [64, 128], [128, 10]])
    163840.0
    """
    matrices = [shape for shape in shapes if len(shape) >= 2]
    plain = name.partition("::")[2]
    if plain in ("mm", "addmm", "_addmm_activation") and len(matrices) >= 2:
        a, b = matrices[-2:]
        return 2.0 * a[0] * a[1] * b[1]
    if plain in ("bmm", "baddbmm") and len(matrices) >= 2:
        a, b = matrices[-2:]
        return 2.0 * a[0] * a[1] * a[2] * b[2] if len(a) == len(b) == 3 else None
    return None


def lines_of(
    operators: Sequence[OperatorRow], texts: Callable[[str, int], str], functions: Mapping[str, str]
) -> tuple[LineRow, ...]:
    """texts: the text of a line of a file; functions: the name of the function by place."""
    total = sum(row.seconds for row in operators) or 1.0
    seconds: dict[str, float] = {}
    for row in operators:
        if row.line:
            seconds[row.line] = seconds.get(row.line, 0.0) + row.seconds
    rows = []
    for place, spent in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_LINES]:
        file, _, line = place.rpartition(":")
        rows.append(
            LineRow(
                file=file,
                line=int(line),
                seconds=spent,
                share=spent / total,
                text=texts(file, int(line))[:200],
                function=functions.get(place, ""),
            )
        )
    return tuple(rows)


def modules_of(operators: Sequence[OperatorRow], modules: Mapping[str, FollowedModule]) -> tuple[ModuleRow, ...]:
    """The tree, depth first; a module's time includes that of the modules inside it."""
    spent: dict[str, list[float]] = {path: [0.0, 0.0] for path in modules}
    for row in operators:
        if row.phase not in ("forward", "evaluation", "backward", "copies"):
            continue
        path = row.module
        while path:
            if path in spent:
                spent[path][row.phase == "backward"] += row.seconds
            path = path.rpartition(".")[0]
    order = {path: number for number, path in enumerate(modules)}

    def place(path: str) -> tuple[int, ...]:
        parts = path.split(".")
        above = (".".join(parts[: n + 1]) for n in range(len(parts)))
        return tuple(order[one] for one in above if one in order)

    return tuple(
        ModuleRow(
            path=path,
            kind=modules[path].kind,
            depth=modules[path].depth,
            calls=modules[path].calls,
            forward_seconds=spent[path][0],
            backward_seconds=spent[path][1],
        )
        for path in sorted(modules, key=place)
    )


def _bounded(rows: list[OperatorRow]) -> tuple[OperatorRow, ...]:
    rows.sort(key=lambda row: -row.seconds)
    if len(rows) <= MOST_ROWS:
        return tuple(rows)
    kept, rest = rows[:MOST_ROWS], rows[MOST_ROWS:]
    others = (row for group in _by_phase(rest).values() for row in grouped(group, "class"))
    return (*kept, *(replace(one, name=OTHERS, shapes="", dtype="", module="", line="") for one in others))


def _by_phase(rows: Sequence[OperatorRow]) -> dict[str, list[OperatorRow]]:
    found: dict[str, list[OperatorRow]] = {}
    for row in rows:
        found.setdefault(row.phase, []).append(row)
    return found


def runs_compiled_code(recording: Recording) -> bool:
    return any(event.name.startswith(_COMPILED_NAMES) for event in recording.events)


def replays_graphs(recording: Recording) -> bool:
    """CUDA graphs."""
    return any(event.name.startswith("cudaGraphLaunch") for event in recording.events)


def _labelled_phase(event: Event) -> Phase | None:
    return next((phase for start, phase in _PHASE_LABELS if event.name.startswith(start)), None)


def _is_engine(name: str) -> bool:
    return name.startswith(_AUTOGRAD_NAMES) or name.endswith(("Backward", "Backward0", "Backward1", "Backward2"))


def _row_name(event: Event) -> str:
    """'' for labels and calls of the driver, which are no operators."""
    if event.name.startswith(_COMPILED_NAMES):
        return COMPILED
    if _is_engine(event.name):
        return AUTOGRAD
    return event.name if "::" in event.name and not event.annotation else ""
