"""Export a module to files that run without its source, each verified before it is put in place.

A file that loads is not yet correct: a trace keeps one outcome of every Python branch, and one value of every Python
number. So each file is compared with the module on the example and on fresh inputs of several sizes, and only a file
that gives the same outputs is moved into place.

>>> import tempfile, torch
>>> folder = tempfile.TemporaryDirectory()
>>> report = export(torch.nn.Linear(4, 2), torch.zeros(3, 4), f"{folder.name}/linear.pt2")
>>> report.ok, report.files[0].dynamic, report.files[0].largest_difference
(True, ('batch',), 0.0)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from flatout.arguments import as_model, as_path
from flatout.errors import UsageError
from flatout.infer.exporting.check import (
    TOLERANCES,
    Beyond,
    Sample,
    beyond_of,
    check_same_twice,
    checked,
    copied,
    first_sample,
    further_samples,
    run_module,
    samples_of,
    split_by,
    verify_past,
)
from flatout.infer.exporting.formats import EXPORTERS, Exporter, Job
from flatout.infer.exporting.fresh_inputs import Example, embedding_limits, example_from
from flatout.infer.exporting.plain_outputs import with_plain_outputs
from flatout.infer.exporting.report import (
    Dynamic,
    ExportCheck,
    ExportedFile,
    ExportFailure,
    ExportReport,
    Format,
    NotExported,
    SizeRange,
)
from flatout.infer.exporting.trace import BY_DATA, ONE_OUTCOME, Traced, failure_of, quiet, ranges_of, trace
from flatout.infer.left_unchanged import left_unchanged, weight_sizes
from flatout.whole_files import usual_mode

FEWER: dict[Dynamic, tuple[Dynamic, ...]] = {"length": ("batch", "none"), "batch": ("none",), "none": ()}
"""What is tried in order where fixed sizes are allowed."""


def export(
    model: nn.Module,
    example_inputs: object,
    path: str | os.PathLike[str],
    *,
    format: Format | Sequence[Format] = "pt2",
    dynamic: Dynamic = "batch",
    allow_fixed: bool = False,
    tolerance: float | None = None,
) -> ExportReport:
    """Export a module, in eval mode, to one format or several; every file is verified against the module itself.

    example_inputs: a tensor, a tuple of positional inputs, or a dict of named ones, on the model's device.
    Integers define a range: fresh inputs stay between the example's minimum and maximum.
    path: the file, or its name without a suffix, to which each format adds its own (.pt2, .aoti.pt2, .onnx, .pte,
    .torchscript.pt). The folder must exist. An existing file (of a link: that which it leads to) is replaced once the
    new one is verified.
    format: 'pt2' (torch.export), 'aoti' (AOTInductor: machine code, needs a C++ compiler), 'onnx' (needs onnx,
    onnxscript and onnxruntime), 'executorch' (needs that package; fixed sizes only), 'torchscript' (legacy). They
    share one trace.
    dynamic: sizes that may differ from the example's: 'batch' = dimension 0, 'length' = that and dimension 1 of
    sequences, 'none'.
    allow_fixed: export a module that cannot vary its sizes with the example's; the report says so.
    tolerance: largest difference as a fraction of the largest output (at least of 1); None = by dtype, 1e-4 in fp32.

    The file's outputs are tensors in tuples, lists and dicts: named tuples, dataclasses and transformers' outputs
    become dicts, and a dict's keys texts. An autocast around the call does not apply. The model is not changed. A
    format that fails leaves no file, and is in the report with its reason: see `report.ok`. UsageError: a bad argument,
    or a module that fails on its own example.
    """
    began = time.perf_counter()
    targets = _targets(as_path(path, "path"), _formats(format))
    _check_choices(model, dynamic, tolerance)
    example = example_from(model, example_inputs, dynamic)
    notes: list[str] = []
    plain = with_plain_outputs(model, notes)
    # A trace would keep the casts of an autocast around the call.
    kinds = {tensor.device.type for tensor in (*model.parameters(), *example.tensors.values())} | {"cpu"}
    with left_unchanged(plain) as restore, torch.no_grad(), contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        run = _Run(plain, example, dynamic, allow_fixed, tolerance, restore, notes)
        run.look()
        files = tuple(run.file(name, target) for name, target in targets.items())
    parameters, weight_bytes = weight_sizes(model)
    return ExportReport(
        model=type(model).__name__,
        parameters=parameters,
        weight_bytes=weight_bytes,
        torch_version=torch.__version__,
        files=files,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _formats(given: Format | Sequence[Format]) -> tuple[Format, ...]:
    limit = f"formats are {', '.join(EXPORTERS)}"
    if not isinstance(given, str | Sequence):
        raise UsageError(f"format is {given!r}", limit=limit, remedy="name one, or several in a list")
    names = (given,) if isinstance(given, str) else tuple(given)
    wrong = [name for name in names if not isinstance(name, str) or name not in EXPORTERS]
    if wrong or not names:
        raise UsageError(f"format is {wrong[0]!r}" if wrong else "no format is given", limit=limit)
    return tuple(dict.fromkeys(names))


def _targets(path: Path, formats: tuple[Format, ...]) -> dict[Format, Path]:
    """Where each format's file goes. Checked first, as an export may take minutes."""
    if not path.parent.is_dir():
        raise UsageError(f"no such folder: {path.parent}", limit="a file is put into a folder", remedy="make it first")
    if path.is_dir() or not path.name:
        raise UsageError(f"{path} is a folder", limit="an export is a file", remedy=f"name one: {path}/model")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # torch's writers, in C++, would end the process
        raise UsageError(f"the path is {str(path)!r}", limit="torch writes to paths that are UTF-8 text") from error
    suffix = EXPORTERS[formats[0]].suffix
    last = f".{suffix.rpartition('.')[2]}"
    if len(formats) == 1 and path.suffix in (".pt2", ".onnx", ".pte", ".pt"):
        if path.suffix != last:
            what = f"{path.name} does not end in {last}"
            raise UsageError(what, limit=f"a {formats[0]} file does", remedy=f"name it {path.stem}{suffix}")
        return {formats[0]: path}
    targets = {name: path.with_name(path.name + EXPORTERS[name].suffix) for name in formats}
    folder = next((one for one in targets.values() if one.is_dir()), None)
    if folder is not None:
        raise UsageError(f"{folder} is a folder", limit="an export is a file", remedy="choose another name")
    return targets


def _check_choices(model: nn.Module, dynamic: Dynamic, tolerance: float | None) -> None:
    as_model(model)
    if isinstance(model, torch.jit.ScriptModule):
        remedy = "export the module that it was made from"
        raise UsageError("the model is TorchScript already", limit="an nn.Module in Python is exported", remedy=remedy)
    if dynamic not in get_args(Dynamic):
        raise UsageError(f"dynamic is {dynamic!r}", limit=f"it is one of {', '.join(get_args(Dynamic))}")
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and tolerance >= 0):
        raise UsageError(f"tolerance is {tolerance!r}", limit="it is a number of at least 0")
    if any(torch.nn.parameter.is_lazy(one) for one in model.parameters()):
        remedy = "run the module once before"
        raise UsageError("the model has lazy layers without weights", limit="a file holds values", remedy=remedy)
    if any(one.is_meta for one in model.parameters()):
        raise UsageError("the model's weights are on the meta device", limit="a file holds values", remedy="load them")


@dataclass(kw_only=True)
class _Shared:
    """What the formats share for one choice of varying sizes."""

    samples: list[Sample] = field(default_factory=list)
    """For which the trace holds; the example first."""
    beyond: list[Beyond] = field(default_factory=list)
    ranges: tuple[SizeRange, ...] = ()
    notes: list[str] = field(default_factory=list)
    traced: Traced | None = None
    failure: ExportFailure | None = None
    """Of the module, for every format."""
    trace_failure: ExportFailure | None = None


@dataclass
class _Run:
    """One export. The model always runs from the state it was passed in: `restore` resets it."""

    model: nn.Module
    example: Example
    dynamic: Dynamic
    allow_fixed: bool
    tolerance: float | None
    restore: Callable[[], None]
    notes: list[str]
    shared: dict[Dynamic, _Shared] = field(default_factory=dict)

    def look(self) -> None:
        """Run the module itself, on the example and on fresh inputs. UsageError: it fails on its own example."""
        self._start()
        try:
            first = first_sample(self.model, self.example)
            self._start()
            check_same_twice(self.model, first)
            self._start()
            scratch = copied(self.example)
            with embedding_limits(self.model, scratch) as limits:
                run_module(self.model, scratch)
            self.example = replace(self.example, limits=limits())
        except UsageError:
            raise
        except Exception as error:  # the module may fail in its second call, or give what cannot be compared
            failure = failure_of(error)
            for dynamic in (self.dynamic, *FEWER[self.dynamic]):
                self.shared[dynamic] = _Shared(failure=failure)

    def _start(self) -> None:
        self.restore()
        self.model.eval()

    def file(self, name: Format, target: Path) -> ExportedFile:
        """This format's verified file in its place, or the reason why there is none."""
        began = time.perf_counter()
        file = self._attempt(name, target, self.dynamic)
        failure = file.failure
        for fewer in FEWER[self.dynamic] if failure is not None and self.allow_fixed else ():
            fixed = self._attempt(name, target, fewer)
            if failure is not None and fixed.failure is None:
                at = f", at {failure.line}" if failure.line else ""
                sizes = "length is" if fewer == "batch" else "all sizes are"
                file = replace(fixed, notes=(f"{sizes} fixed to the example's: {failure.what}{at}", *fixed.notes))
                break
        return replace(file, seconds=time.perf_counter() - began)

    def _attempt(self, name: Format, target: Path, dynamic: Dynamic) -> ExportedFile:
        exporter = EXPORTERS[name]
        notes = list(exporter.notes)
        try:
            exporter.needs()
            shared = self._shared(dynamic, needs_trace=exporter.shares_trace)
            notes += shared.notes if exporter.shares_trace else []
            job = self._job(shared, dynamic)
            self._start()
            with quiet(notes):
                checks, refused, size = _put_verified(job, exporter, target, shared, self.tolerance, notes)
        except Exception as error:  # exporters and runtimes raise of many kinds
            failure = failure_of(error)
            return ExportedFile(format=name, path=None, bytes=None, failure=failure, notes=tuple(notes))
        usual = max(TOLERANCES.get(tensor.dtype, 0.0) for _, tensor in shared.samples[0].outputs)
        return ExportedFile(
            format=name,
            path=str(target),
            bytes=size,
            dynamic=job.varying,
            ranges=tuple(_tested(one, checks, refused) for one in shared.ranges if one.name in job.varying),
            checks=checks,
            tolerance=usual if self.tolerance is None else self.tolerance,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _job(self, shared: _Shared, dynamic: Dynamic) -> Job:
        return Job(
            model=self.model,
            example=self.example,
            dynamic=dynamic,
            traced=shared.traced,
            outputs=shared.samples[0].outputs,
            weight_bytes=weight_sizes(self.model)[1],
        )

    def _shared(self, dynamic: Dynamic, *, needs_trace: bool) -> _Shared:
        """Samples and the trace, each made once. Raises NotExported on every call.

        A format that needs no trace is refused by one where the module decides by its data: fresh inputs may all
        take the path that the example took.
        """
        shared = self.shared.setdefault(dynamic, _Shared())
        if not shared.samples and shared.failure is None:
            self._start()
            try:
                shared.samples = samples_of(self.model, self.example, dynamic, self.notes)
            except NotExported as error:
                shared.failure = error.failure
        if shared.failure is None and shared.traced is None and shared.trace_failure is None:
            self._start()
            try:
                shared.traced = trace(self.model, self.example, dynamic, shared.notes)
            except NotExported as error:
                shared.trace_failure = error.failure
            self._find_ranges(shared, dynamic)
        failure = shared.failure or shared.trace_failure
        if failure is not None and (needs_trace or failure is shared.failure or failure.what == BY_DATA):
            raise NotExported(failure)
        return shared

    def _find_ranges(self, shared: _Shared, dynamic: Dynamic) -> None:
        """Once there is a trace, or none can be made: its bounds, and samples at and past them."""
        self._start()
        ranges = ranges_of(shared.traced, self.example, dynamic)
        began = time.perf_counter()
        run_module(self.model, copied(self.example))
        seconds = time.perf_counter() - began
        held, outside = split_by(shared.samples, ranges)
        inside, shared.beyond = further_samples(self.model, self.example, dynamic, ranges, seconds)
        if not held or held[0].kind != "example":
            held, outside = shared.samples, []  # the guards cannot be asked: the file is run at all sizes
        known = {(one.example.batch, one.example.length) for one in held}
        held += [one for one in inside if (one.example.batch, one.example.length) not in known]
        shared.beyond += [beyond_of(one, self.example, ranges) for one in outside]
        shared.ranges = ranges.found
        self._start()  # a buffer may count calls: the file is run in this order too
        shared.samples = [replace(one, outputs=run_module(self.model, copied(one.example))) for one in held]


def _check_no_decision(dynamic: Dynamic, notes: list[str]) -> None:
    """A TorchScript trace has no guards: without those of torch.export, the range of a branch is unknown."""
    if dynamic != "none" and (decided := next((note for note in notes if note.startswith(ONE_OUTCOME)), "")):
        limit = "torch.export, which would say for which sizes it holds, cannot trace the module"
        remedy = "move the branch out of forward; or export at the example's sizes (dynamic='none')"
        raise NotExported(ExportFailure(what=decided, limit=limit, remedy=remedy))


def _tested(found: SizeRange, checks: tuple[ExportCheck, ...], refused: list[Beyond]) -> SizeRange:
    sizes = [check.batch if found.name == "batch" else check.length for check in checks]
    past = sorted({one.size for one in refused if one.name == found.name})
    return replace(found, tested=tuple(sorted({size for size in sizes if size is not None})), refused=tuple(past))


def _put_verified(
    job: Job, exporter: Exporter, target: Path, shared: _Shared, tolerance: float | None, notes: list[str]
) -> tuple[tuple[ExportCheck, ...], list[Beyond], int]:
    """Write beside the target, load, compare, and only then rename into place.

    Where the target is a link, the file that it leads to is replaced. Returns the checks, the calls past the bounds
    that the file refuses, and the bytes.
    """
    real = Path(os.path.realpath(target))
    folder = Path(tempfile.mkdtemp(dir=real.parent, prefix=".flatout-export-"))
    try:
        written = folder / target.name
        exporter.write(job, written)
        run = exporter.load(job, written)
        checks = tuple(checked(run, sample, tolerance) for sample in shared.samples)
        past = [one for one in shared.beyond if exporter.safe_past or one.sample is not None]
        left = [one for one in shared.beyond if not exporter.safe_past and one.sample is None]
        notes += [f"sizes are not checked by the file: {one.why}" for one in left]
        refused = [one for one in past if verify_past(run, one, tolerance, notes)]
        if shared.traced is None:
            _check_no_decision(job.dynamic, notes)
        # What a file refers to (large ONNX weights) is in place before it.
        parts = sorted(folder.iterdir(), key=lambda part: part.name == target.name)
        size = sum(part.stat().st_size for part in parts)
        for part in parts:
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            place = real if part.name == target.name else real.parent / part.name
            part.chmod(place.stat().st_mode & 0o777 if place.exists() else usual_mode())
            part.replace(place)
        return checks, refused, size
    finally:
        shutil.rmtree(folder, ignore_errors=True)
