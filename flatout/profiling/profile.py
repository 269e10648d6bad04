"""The result of a profile: plain values, per step, in seconds, bytes and FLOPs.

    profile.parts.data, profile.step_seconds
    profile.operators_by("name")[0]            # the slowest operator
    Profile.from_json(json.loads(text)["profile"])

A figure that is unknown is None, and the field beside it (`..._reason`, or `reasons` by field name) says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from flatout.decoding import decode

Phase = Literal["data", "copies", "forward", "backward", "optimizer", "communication", "evaluation", "other"]
GroupBy = Literal["name", "shape", "line", "module", "phase", "dtype", "class"]
SortBy = Literal["time", "calls", "flops", "bytes"]
OperatorClass = Literal[
    "matmul", "convolution", "attention", "recurrent", "embedding", "normalisation", "softmax", "reduction",
    "pointwise", "optimizer", "copy", "communication", "other",
]  # fmt: skip
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator, per step. Seconds are self times, so rows add up.

    An operator whose FLOPs are known (a product, a convolution, attention) includes the operators that it runs inside.
    """

    name: str
    """As torch dispatches it: 'aten::addmm'."""
    operator_class: OperatorClass
    shapes: str = ""
    """Of its tensor arguments: '[64, 128] [128, 10]'; '' where rows are not grouped by shape."""
    dtype: str = ""
    """Of its first floating point argument: 'float32'; '' where it has none, or rows differ."""
    calls: float
    seconds: float
    """Time on `device`: of a GPU, that of the kernels that it launched."""
    host_seconds: float
    """Time on the host; on a CPU the same as `seconds`."""
    phase: Phase | Literal[""] = ""
    module: str = ""
    """Path of the innermost module; for backward operators, that of the forward operator. '': none, or unknown."""
    line: str = ""
    """'train.py:41': the innermost line of the script's own code; '' where it is unknown."""
    device: str
    """'cpu' or 'cuda'."""
    flops: float | None = None
    """None: no formula for this operator, which then has none or few."""
    bytes: float | None = None
    """Of its arguments and results, each once. None: not followed."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module of the tree, with everything inside it, per step."""

    path: str
    """'model.layers.0.attn'; that of an outermost module is its class."""
    kind: str
    depth: int
    """0 for an outermost module."""
    calls: float
    forward_seconds: float
    backward_seconds: float | None
    backward_reason: str = ""
    """Why backward_seconds is None."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + (self.backward_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class LineRow:
    """One line of the script's own code, per step: operators that it calls, and their backward operators."""

    file: str
    line: int
    seconds: float
    share: float
    """Of the time of all operators."""
    text: str = ""
    function: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where the time of a step went, in seconds; the parts add up to the step.

    On a CPU these are times of the main thread, measured without the profiler. On a GPU, `copies` to `communication`
    are times at which it was busy (measured by the profiler), `data` is the time it waited for the loader, `idle` all
    other time without work.
    """

    data: float
    copies: float
    forward: float
    backward: float
    optimizer: float
    communication: float
    evaluation: float = 0.0
    """Modules without gradients, where the median step has some, on a CPU; else `Profile.evaluation_seconds`."""
    idle: float
    other: float

    @property
    def total(self) -> float:
        return sum(self.to_json().values())

    def to_json(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def sizes_in(shapes: str) -> list[list[int]]:
    """Of a row's `shapes`: [[64, 128], [128, 10]]."""
    return [[int(size) for size in one.split(",")] for one in re.findall(r"\[([\d, ]+)\]", shapes)]


def evaluation_in_step(parts: Mapping[str, float], step_seconds: float) -> bool:
    """Is evaluation one of the parts that add up to the step, or does it come on top of them? Seconds by kind."""
    return math.isclose(sum(parts.values()), step_seconds, rel_tol=_ROUNDING)


@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """One class of operators against what this machine was measured to reach."""

    operator_class: OperatorClass
    dtype: str = ""
    """Of the products, where the class consists of products."""
    seconds: float
    share: float
    """Of the time of all operators."""
    flops: float | None
    bytes: float | None
    attained_flops_per_second: float | None
    attained_bytes_per_second: float | None
    bound: Literal["compute", "memory"] | None
    """Which ceiling the ratio of FLOPs to bytes puts it under."""
    ceiling_name: str = ""
    """'fp32 products', 'memory copy'."""
    ceiling: float | None = None
    """FLOP/s where bound by compute, B/s where bound by memory."""
    share_of_ceiling: float | None
    reason: str = ""
    """Why share_of_ceiling is None, or what it should be read with."""
    calls: float = 0.0


@dataclass(frozen=True, kw_only=True)
class IdleCause:
    """Time at which the device had no work, per step."""

    cause: Literal["loader", "copies", "sync", "host late", "unknown"]
    seconds: float
    evidence: str


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One GPU kernel or copy, per step."""

    name: str
    kind: Literal["kernel", "copy", "set", "communication"]
    calls: float
    seconds: float
    operator: str = ""
    """The operator that launched it."""
    bytes: float | None = None
    """Copied."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One kind of exchange with other ranks, per step: 'gloo:all_reduce', a kernel of NCCL."""

    name: str
    calls: float
    seconds: float
    """From the start of each to its end, the wait for ranks that come later included."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Exchanges with other ranks, in seconds of a profiled step."""

    total_seconds: float
    """While at least one was under way; the wait for ranks that come later included."""
    exposed_seconds: float | None
    """While the rank did nothing else; None: that was not timed."""
    overlapped_seconds: float | None
    """The rest of `total_seconds`."""
    collectives: tuple[CollectiveRow, ...] = ()
    """Longest first."""


@dataclass(frozen=True, kw_only=True)
class WaitRow:
    """Waits of the host for the GPU at one line, per step: reads of values, and operators that need one."""

    operator: str
    """Such as aten::_local_scalar_dense, which .item() calls; '' where the script synchronizes by itself."""
    line: str
    """'' where it is not known."""
    calls: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MatrixUnits:
    """How much of the time of products ran on matrix units: Tensor Cores, AMX, VNNI or AVX-512 BF16."""

    unit: str
    """'AMX', 'Tensor Cores'; '' where this device has none."""
    product_seconds: float
    seconds_on_units: float | None = None
    share: float | None = None
    reason: str = ""
    """Why the share is None."""
    rest: tuple[tuple[str, float], ...] = ()
    """(why not, seconds) of the other products, longest first."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A few steady steps of a script or calls of a function. All figures are per step."""

    name: str
    device: str
    """'cpu', 'cuda:0': where the weights are."""
    step_kind: str | None
    """What ends a step; None: there are no steps, and figures are those of the whole window."""
    steps: int
    """Profiled ones."""
    timed_steps: int
    """Timed without the profiler."""
    warm_up_steps: int
    step_seconds: float | None
    """Median of the steps that were timed without the profiler."""
    samples_seconds: tuple[float, ...] = ()
    """Each of them."""
    profiled_step_seconds: float | None
    """Median while the profiler recorded."""
    parts: StepParts | None
    evaluation_seconds: float | None = None
    """Modules without gradients, on average over all steps; None where they are part of a typical step."""
    operators: tuple[OperatorRow, ...] = ()
    """By name, shapes, dtype, phase, module and line; longest first. What is left out of a long list is in a last row
    named '(others)', so that they still add up."""
    modules: tuple[ModuleRow, ...] = ()
    """Depth first."""
    lines: tuple[LineRow, ...] = ()
    """Longest first."""
    roofline: tuple[RooflineRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    """Of a GPU, longest first."""
    waits: tuple[WaitRow, ...] = ()
    """Longest first, without copies to the GPU."""
    communication: Communication | None = None
    """None: nothing was exchanged, or nothing was recorded."""
    matrix_units: MatrixUnits | None = None
    idle_causes: tuple[IdleCause, ...] = ()
    operator_calls: float | None = None
    launches: float | None = None
    """GPU kernels, copies and sets."""
    flops: float | None = None
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    peak_resident_bytes: int | None = None
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it is None or empty."""

    @property
    def overhead(self) -> float | None:
        """How much longer a profiled step took, as a share of a plain one. It can be negative by noise."""
        if not self.step_seconds or self.profiled_step_seconds is None:
            return None
        return self.profiled_step_seconds / self.step_seconds - 1

    @property
    def best_step_seconds(self) -> float | None:
        """The plain step where one was timed, else the profiled one."""
        return self.step_seconds if self.step_seconds is not None else self.profiled_step_seconds

    @property
    def samples_per_second(self) -> float | None:
        return _per_second(self.samples_per_step, self.step_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        return _per_second(self.tokens_per_step, self.step_seconds)

    @property
    def operator_seconds(self) -> float:
        return sum(row.seconds for row in self.operators)

    def at_plain_speed(self) -> Profile:
        """With times of operators, modules and lines that can be compared with the plain step: shorter in proportion
        where operators together took longer than that, as when the machine was busier while they were profiled."""
        step, total = self.best_step_seconds, self.operator_seconds
        if not step or total <= step:
            return self
        scale = step / total

        def shorter(seconds: float | None) -> float | None:
            return None if seconds is None else scale * seconds

        return replace(
            self,
            operators=tuple(
                replace(one, seconds=scale * one.seconds, host_seconds=scale * one.host_seconds)
                for one in self.operators
            ),
            modules=tuple(
                replace(
                    one, forward_seconds=scale * one.forward_seconds, backward_seconds=shorter(one.backward_seconds)
                )
                for one in self.modules
            ),
            lines=tuple(replace(one, seconds=scale * one.seconds) for one in self.lines),
        )

    def operators_by(self, by: GroupBy = "name", sort: SortBy = "time") -> tuple[OperatorRow, ...]:
        """Rows added up by name, by name and shapes, by line, module, phase, dtype or class; the largest first."""
        return sorted_operators(grouped(self.operators, by), sort)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Profile:
        return decode(cls, data)


_KEYS: Mapping[GroupBy, tuple[str, ...]] = {
    "name": ("name", "device"),
    "shape": ("name", "device", "shapes", "dtype"),
    "line": ("line",),
    "module": ("module",),
    "phase": ("phase",),
    "dtype": ("dtype",),
    "class": ("operator_class",),
}


def grouped(rows: Iterable[OperatorRow], by: GroupBy) -> list[OperatorRow]:
    """Rows with the same key added up; a text in which they differ becomes ''.

    FLOPs are the sum of those that are known, None where none is; bytes likewise.
    """
    found: dict[tuple[object, ...], OperatorRow] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in _KEYS[by])
        before = found.get(key)
        found[key] = row if before is None else _added(before, row)
    return list(found.values())


def sorted_operators(rows: Sequence[OperatorRow], sort: SortBy) -> tuple[OperatorRow, ...]:
    """The largest first; what is unknown last."""
    by = "seconds" if sort == "time" else sort
    return tuple(sorted(rows, key=lambda row: getattr(row, by) or 0.0, reverse=True))


def _added(one: OperatorRow, other: OperatorRow) -> OperatorRow:
    return replace(
        one,
        name=_same(one.name, other.name),
        shapes=_same(one.shapes, other.shapes),
        dtype=_same(one.dtype, other.dtype),
        phase=one.phase if one.phase == other.phase else "",
        module=_same(one.module, other.module),
        line=_same(one.line, other.line),
        device=_same(one.device, other.device),
        operator_class=one.operator_class if one.operator_class == other.operator_class else "other",
        calls=one.calls + other.calls,
        seconds=one.seconds + other.seconds,
        host_seconds=one.host_seconds + other.host_seconds,
        flops=known_sum(one.flops, other.flops),
        bytes=known_sum(one.bytes, other.bytes),
    )


def _same(one: str, other: str) -> str:
    return one if one == other else ""


def known_sum(*values: float | None) -> float | None:
    """None where none of them is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _per_second(count: float | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and seconds else None
