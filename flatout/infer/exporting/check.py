"""Verifies a file against the module: both run on the same inputs, the example and fresh ones of several sizes.

The allowed difference is a fraction of the largest output (at least of 1), by the dtype of each output: a different
order of summation costs a few units in the last place, a dropped term far more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.exporting.fresh_inputs import Example, with_sizes
from flatout.infer.exporting.plain_outputs import named_tensors
from flatout.infer.exporting.report import Dynamic, ExportCheck, ExportFailure, NotExported
from flatout.infer.exporting.trace import Ranges, failure_of, first_words
from flatout.infer.user_lines import user_line
from flatout.tensor_bytes import bytes_view

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By dtype of an output; complex outputs by their parts; integers and bool must be equal."""

FAR = 8
"""Multiple of the example's size that is tried where no bound is known."""
MOST_ELEMENTS, MOST_SECONDS = 1 << 25, 5.0
"""Of a call that is only made to test a size."""

Kind = Literal["example", "fresh", "resampled"]
Runner = Callable[[tuple[object, ...], dict[str, object]], object]
"""The loaded file: called with the module's inputs, returns its plain outputs."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A call and what the module itself returns."""

    kind: Kind
    example: Example
    outputs: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """A call outside the bounds of the trace."""

    name: str
    size: int
    why: str
    """The guard that it breaks."""
    sample: Sample | None
    """None: the module itself fails there."""
    call: Example


def run_module(model: nn.Module, example: Example) -> tuple[tuple[str, Tensor], ...]:
    """The module's own outputs, cloned: it may return buffers that it overwrites in the next call."""
    output = model(*example.args, **example.kwargs)
    outputs = tuple((name, tensor.detach().clone()) for name, tensor in named_tensors(output))
    for name, tensor in outputs:
        if tensor.layout is not torch.strided or tensor.is_nested:
            what = f"{name} is a {'nested' if tensor.is_nested else 'sparse'} tensor"
            limit = "a file's outputs are compared value by value"
            remedy = "return it written out, as with .to_dense()"
            raise NotExported(ExportFailure(what=what, limit=limit, remedy=remedy))
    return outputs


def copied(example: Example) -> Example:
    """The same call on copies of its tensors: a module may write to its inputs."""
    return with_sizes(example, {}, "none", "resampled", seed=0)


def first_sample(model: nn.Module, example: Example) -> Sample:
    """The example and what the module returns for it. UsageError: it fails."""
    try:
        return Sample(kind="example", example=example, outputs=run_module(model, copied(example)))
    except (UsageError, NotExported):
        raise
    except Exception as error:
        line = user_line(error)
        what = f"the module fails on the example inputs{f' at {line}' if line else ''}: {type(error).__name__}"
        remedy = "pass inputs that forward takes"
        if len(example.args) == 1 and isinstance(given := example.args[0], Mapping):
            named = f"forward{inspect.signature(model.forward)}"
            remedy = f"name inputs as forward does: the keys are {', '.join(map(repr, given))}, and it is {named}"
        raise UsageError(what, limit=first_words(error), remedy=remedy) from error


def samples_of(model: nn.Module, example: Example, dynamic: Dynamic, notes: list[str]) -> list[Sample]:
    """The example and fresh calls, in order: of batch 1, of the example's and of larger ones; lengths likewise.

    A size at which the module itself fails is left out, and noted. UsageError: it fails on the example, or on all else.
    """
    samples = [first_sample(model, example)]
    failed: dict[str, str] = {}
    for seed, sizes in enumerate(_sizes(example, dynamic)):
        sample, said = _sample(model, example, sizes, dynamic, seed)
        if sample is not None:
            samples.append(sample)
        else:
            failed[", ".join(f"{name} {size}" for name, size in sizes.items()) or "fresh values"] = said
    if failed:
        said = next(iter(failed.values()))
        notes.append(f"not verified at {'; '.join(failed)}: there the module itself fails ({said})")
    _check_samples(samples, dynamic, notes)
    return samples


def further_samples(
    model: nn.Module, example: Example, dynamic: Dynamic, ranges: Ranges, seconds: float
) -> tuple[list[Sample], list[Beyond]]:
    """Calls at the bounds (or far from the example, where there are none), and calls past them.

    seconds: of the module on the example; what would take too long, or too much memory, is left out.
    """
    inside: list[Sample] = []
    past: list[Beyond] = []
    for found in ranges.found:
        usual = example.sizes[found.name]
        far = FAR * usual + 3
        for size in dict.fromkeys((found.smallest or 1, far if found.largest is None else found.largest)):
            if size != usual and _affordable(example, found.name, size / usual, seconds):
                sample, _ = _sample(model, example, {found.name: size}, dynamic, size)
                inside += [sample] if sample is not None and not ranges.why_not({found.name: size}) else []
        for size in ((found.smallest or 1) - 1, (found.largest or -1) + 1):
            if size >= 1 and _affordable(example, found.name, size / usual, seconds):
                past.append(_beyond(model, example, found.name, size, dynamic, ranges))
    return inside, past


def _beyond(model: nn.Module, example: Example, name: str, size: int, dynamic: Dynamic, ranges: Ranges) -> Beyond:
    sample, _ = _sample(model, example, {name: size}, dynamic, size)
    call = with_sizes(example, {name: size}, dynamic, "fresh", seed=size) if sample is None else sample.example
    return Beyond(name=name, size=size, why=ranges.why_not({name: size}), sample=sample, call=call)


def beyond_of(sample: Sample, example: Example, ranges: Ranges) -> Beyond:
    """A sample for which the trace does not hold."""
    sizes = sample.example.sizes
    name = next((name for name, size in sizes.items() if size != example.sizes[name]), "batch")
    return Beyond(name=name, size=sizes[name], why=ranges.why_not(sizes), sample=sample, call=sample.example)


def _affordable(example: Example, name: str, times: float, seconds: float) -> bool:
    elements = sum(tensor.numel() for tensor in example.tensors.values()) * times
    longer = times if name == "batch" else times**2
    return elements <= MOST_ELEMENTS and seconds * longer <= MOST_SECONDS


def split_by(samples: list[Sample], ranges: Ranges) -> tuple[list[Sample], list[Sample]]:
    """Those for which the trace holds, and the others."""

    def holds(sample: Sample) -> bool:
        return not ranges.why_not(sample.example.sizes)

    return [one for one in samples if holds(one)], [one for one in samples if not holds(one)]


def verify_past(run: Runner, beyond: Beyond, tolerance: float | None, notes: list[str]) -> bool:
    """Does the file refuse what lies past the bounds of its trace? NotExported where it gives other results than the
    module there; where the module itself fails, and the file does not, a note."""
    call = copied(beyond.call)
    try:
        outputs = tuple(named_tensors(run(call.args, call.kwargs)))
    except Exception:  # the runtime's own kinds
        return True
    at = f"{beyond.name} {beyond.size}"
    if beyond.sample is None:
        notes.append(f"at {at} the module fails and the file does not: keep to its range")
        return False
    if len(outputs) == len(beyond.sample.outputs):
        pairs = list(zip(beyond.sample.outputs, outputs, strict=True))
        if all(x.shape == y.shape and x.dtype == y.dtype for (_, x), (_, y) in pairs) and all(
            _close(x, y.to(x.device), tolerance)[0] for (_, x), (_, y) in pairs
        ):
            return False
    where = beyond.why or f"{beyond.name} is not {beyond.size}"
    failure = ExportFailure(
        what=f"at {at} the file gives other results than the module, without an error",
        limit=f"forward branches on sizes, its trace holds where {where}, and files of this format do not check sizes",
        remedy="use pt2, which does, or move the branch out of forward",
    )
    raise NotExported(failure)


def _sizes(example: Example, dynamic: Dynamic) -> list[dict[str, int]]:
    batch, length = example.batch, example.length
    if dynamic == "none" or batch is None:
        return [{}, {}, {}]
    batches = sorted({1, 2, batch, batch + 1, min(2 * batch + 1, batch + 64)})
    if dynamic == "batch" or length is None:
        return [{"batch": one} for one in batches]
    lengths = sorted({1, max(1, length - 1), length + 1, 2 * length + 1} - {length})
    varied = [{"batch": batch, "length": one} for one in lengths]
    return [{"batch": one, "length": length} for one in batches] + varied + [{"batch": batch + 2, "length": lengths[0]}]


def _sample(
    model: nn.Module, example: Example, sizes: dict[str, int], dynamic: Dynamic, seed: int
) -> tuple[Sample | None, str]:
    """Fresh values; where the module fails on those (they may have to fit one another), rows of the example."""
    said = ""
    kinds: tuple[Kind, ...] = ("fresh", "resampled")
    for kind in kinds:
        drawn = with_sizes(example, sizes, dynamic, kind, seed=seed + 1)
        try:
            return Sample(kind=kind, example=drawn, outputs=run_module(model, copied(drawn))), ""
        except Exception as error:  # the user's own code
            said = said or f"{type(error).__name__}: {first_words(error)}"
    return None, said


def _check_samples(samples: list[Sample], dynamic: Dynamic, notes: list[str]) -> None:
    """NotExported where what should vary could not be seen to; a note where outputs do not depend on the inputs."""
    limit = "a file is only put in place when it was run on fresh inputs of several sizes"
    if len(samples) == 1:
        failure = ExportFailure(what=notes[-1], limit=limit, remedy="pass an example that may be varied")
        raise NotExported(failure)
    batch = samples[0].example.batch
    if dynamic != "none" and not any((one.example.batch or 0) > (batch or 0) for one in samples):
        what = f"the module itself runs at no batch larger than {batch}"
        remedy = "take the batch from the input, as x.shape[0] or -1; or allow a fixed size (allow_fixed)"
        raise NotExported(ExportFailure(what=what, limit=limit, remedy=remedy))
    length = samples[0].example.length
    if dynamic == "length" and all(one.example.length == length for one in samples):
        what, remedy = f"the module itself runs at length {length} alone", "pass dynamic='batch'"
        raise NotExported(ExportFailure(what=what, limit=limit, remedy=remedy))
    first = samples[0].outputs
    alike = [one.outputs for one in samples[1:] if [x.shape for _, x in one.outputs] == [x.shape for _, x in first]]
    if alike and all(torch.equal(x, y) for one in alike for (_, x), (_, y) in zip(first, one, strict=True)):
        notes.append("the outputs are the same for all inputs of one size: the checks prove little")


def check_same_twice(model: nn.Module, sample: Sample) -> None:
    """NotExported for a module that draws random numbers: no file can be compared with it."""
    again = run_module(model, copied(sample.example))
    differing = [name for (name, x), (_, y) in zip(sample.outputs, again, strict=False) if not _close(x, y, None)[0]]
    if len(again) != len(sample.outputs):
        differing = [f"{len(sample.outputs)} tensors, then {len(again)}"]
    if differing:
        what = f"the module gives two results for one input ({', '.join(differing[:3])})"
        remedy = "draw random numbers outside, and pass them in"
        limit = "a file can only be verified against one result"
        raise NotExported(ExportFailure(what=what, limit=limit, remedy=remedy))


def checked(run: Runner, sample: Sample, tolerance: float | None) -> ExportCheck:
    """The file against the module on one sample. Raises NotExported where they differ by too much."""
    call = copied(sample.example)
    try:
        outputs = tuple(named_tensors(run(call.args, call.kwargs)))
    except Exception as error:  # the runtime's own kinds
        failure = failure_of(error)
        limit = "the file does not run where the module does"
        what = f"{_size_of(sample)}, the file fails: {failure.what}"
        raise NotExported(ExportFailure(what=what, limit=limit, remedy=failure.remedy)) from error
    if len(outputs) != len(sample.outputs):
        raise _differs(sample, f"the file returns {len(outputs)} tensors, the module {len(sample.outputs)}")
    largest_difference, largest_output, same = 0.0, 0.0, True
    for (name, expected), (_, got) in zip(sample.outputs, outputs, strict=True):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            kinds = f"{got.dtype} {list(got.shape)} for {expected.dtype} {list(expected.shape)}"
            raise _differs(sample, f"{name} is {kinds}")
        got = got.to(expected.device)
        close, difference, largest, allowed = _close(expected, got, tolerance)
        if not close:
            what = f"{name} differs by {difference:.3g} where at most {allowed:.3g} is allowed"
            raise _differs(sample, what)
        same = same and torch.equal(bytes_view(expected), bytes_view(got))
        largest_difference, largest_output = max(largest_difference, difference), max(largest_output, largest)
    return ExportCheck(
        inputs=sample.kind,
        batch=sample.example.batch,
        length=sample.example.length,
        bit_identical=same,
        largest_difference=largest_difference,
        largest_output=largest_output,
    )


def _close(expected: Tensor, got: Tensor, tolerance: float | None) -> tuple[bool, float, float, float]:
    """Whether it is close, the largest difference, the largest finite expected value, and the allowed difference."""
    if expected.is_complex():
        expected, got = torch.view_as_real(expected), torch.view_as_real(got)
    inexact = expected.is_floating_point()
    share = (TOLERANCES.get(expected.dtype, 0.0) if tolerance is None else tolerance) if inexact else 0.0
    a, b = expected.double(), got.double()
    finite = a.isfinite()
    largest = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    allowed = share * max(1.0, largest)
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return False, math.inf, largest, allowed
    difference = float((a[finite] - b[finite]).abs().max()) if bool(finite.any()) else 0.0
    return difference <= allowed and (inexact or torch.equal(expected, got)), difference, largest, allowed


def _size_of(sample: Sample) -> str:
    sizes = [f"{name} {size}" for name, size in sample.example.sizes.items()]
    return f"on {'the example' if sample.kind == 'example' else 'fresh inputs'} of {', '.join(sizes) or 'one size'}"


def _differs(sample: Sample, what: str) -> NotExported:
    limit = "a file is only put in place when it gives what the module gives"
    remedy = "see whether forward keeps state in Python, or branches on sizes or values; or allow more (tolerance)"
    return NotExported(ExportFailure(what=f"{_size_of(sample)}, {what}", limit=limit, remedy=remedy))
