"""The step that formats share: torch.export with varying sizes, and readable reasons where it fails.

Each varying size is first unbounded from 1 on. Where the module needs narrower bounds (a table of positions), torch
suggests them, and a second attempt uses those; where it needs one value, the size cannot vary.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from flatout.data.nested import map_tensors
from flatout.errors import FlatoutError
from flatout.infer.exporting.fresh_inputs import Example, with_sizes
from flatout.infer.exporting.report import Dynamic, ExportFailure, NotExported, SizeRange
from flatout.infer.user_lines import causes, is_users, place, user_line
from flatout.torch_private.attributes import EXPORT_GUARDS
from flatout.torch_private.compiler import export_refusal

BY_DATA = "the module branches on the values of its data"
ONE_OUTCOME = "traced with one outcome of a Python branch"
FURTHEST = 1 << 16
"""Largest size of which a trace is asked whether it holds."""
WORDS = 300
"""Characters of an exporter's own message that are passed on."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What torch.export made: the program and the call that it was traced with."""

    program: ExportedProgram
    example: Example


def trace(model: nn.Module, example: Example, dynamic: Dynamic, notes: list[str]) -> Traced:
    """One program for every size; raises NotExported. `notes` gets what torch warns of."""
    _check_named(model, example, dynamic)
    used = traceable_example(example, dynamic)
    shapes = {} if dynamic == "none" else dynamic_shapes(model, used, dynamic, lambda name: Dim(name, min=1))
    with quiet(notes):
        try:
            program = _exported(model, used, shapes)
        except Exception as error:  # torch raises of many kinds, and the user's forward whatever it likes
            refined = _refined(error, shapes)
            if refined is None:
                raise NotExported(failure_of(error)) from error
            if held := _held_sizes(shapes, refined):
                raise NotExported(_held(model, held, error)) from error
            try:
                program = _exported(model, used, refined)
            except Exception as second:
                raise NotExported(failure_of(second)) from second
    return Traced(program=program, example=used)


def _check_named(model: nn.Module, example: Example, dynamic: Dynamic) -> None:
    """NotExported for inputs that only a `**keywords` of forward takes: torch.export gives these no varying sizes."""
    signature = inspect.signature(model.forward)
    for name in signature.bind(*example.args, **example.kwargs).arguments if dynamic != "none" else ():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            what = f"forward takes {', '.join(example.kwargs)} as **{name}"
            limit = "torch.export lets sizes vary only in inputs that have a name in forward"
            remedy = f"name them: def forward(self, {', '.join(example.kwargs)}); or pass dynamic='none'"
            raise NotExported(ExportFailure(what=what, limit=limit, remedy=remedy))


def traceable_example(example: Example, dynamic: Dynamic) -> Example:
    """The example, with a size of 1 that is to vary grown: torch takes a 1 for a size that stays.

    Each tensor is a copy of its own: one that is given twice would be traced as one input.
    """
    sizes = {}
    if dynamic != "none" and example.batch == 1:
        sizes["batch"] = 2
    if dynamic == "length" and example.length == 1:
        sizes["length"] = 3
    return with_sizes(example, sizes, dynamic if sizes else "none", "resampled", seed=0)


def dynamic_shapes(
    model: nn.Module, example: Example, dynamic: Dynamic, make: Callable[[str], object]
) -> dict[str, object]:
    """Argument of `forward` -> the same nest with, for each tensor, dimension -> what `make` gives for its name."""
    named: dict[str, object] = {}

    def dimensions(tensor: Tensor) -> dict[int, object] | None:
        sizes = example.sizes_named(tensor, dynamic)
        return {number: named.setdefault(name, make(name)) for number, name in sizes.items()} or None

    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
    return {name: _nothing_but(map_tensors(dimensions, value)) for name, value in bound.items()}


def _nothing_but(shapes: object) -> object:
    """None for everything that is no tensor's dimensions: numbers and texts are constants of the file."""
    if isinstance(shapes, dict):
        return {key: value if isinstance(key, int) else _nothing_but(value) for key, value in shapes.items()}
    if isinstance(shapes, tuple | list):
        return type(shapes)(_nothing_but(one) for one in shapes)
    return None


def _exported(model: nn.Module, example: Example, shapes: dict[str, object]) -> ExportedProgram:
    with contextlib.redirect_stderr(io.StringIO()):  # there torch prints its graph where it fails
        return torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes or None)


def _refined(error: Exception, shapes: dict[str, object]) -> dict[str, object] | None:
    """The shapes with the bounds that torch suggests; None where it suggests none."""
    refusal = export_refusal(error)
    if refusal is None:
        return None
    try:
        refined = refine_dynamic_shapes_from_suggested_fixes(refusal, shapes)
    except Exception:  # a message without suggestions, or one that its own parser does not take
        return None
    assert isinstance(refined, dict)
    return None if repr(refined) == repr(shapes) else refined


def _held_sizes(before: object, after: object) -> dict[str, int]:
    """Names of the sizes that are one number after refinement."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(one, after[key]) for key, one in before.items()]
    elif isinstance(before, tuple | list) and isinstance(after, tuple | list):
        pairs = list(zip(before, after, strict=True))
    else:
        name = getattr(before, "__name__", "")
        return {name: after} if name and isinstance(after, int) else {}
    return {name: size for one, other in pairs for name, size in _held_sizes(one, other).items()}


def _held(model: nn.Module, held: dict[str, int], error: Exception) -> ExportFailure:
    if "length" in held and any(isinstance(one, nn.RNNBase) for one in model.modules()):
        return ExportFailure(
            what=f"the module works for length {held['length']} alone",
            limit="torch.export writes a recurrent layer out step by step, as many as the example has",
            remedy="pass dynamic='batch' with sequences of one length, or allow a fixed size (allow_fixed)",
        )
    sizes = ", ".join(f"{name} {size}" for name, size in held.items())
    return ExportFailure(
        what=f"the module works for {sizes} alone",
        limit="its code takes the size of the example as a constant (a reshape, a loop over samples, a parameter)",
        remedy="use sizes of the input, as in x.shape[0] or -1; or allow a fixed size (allow_fixed)",
        line=user_line(error),
    )


def failure_of(error: BaseException) -> ExportFailure:
    """The error of an exporter or a runtime, in our words where they are clearer, with the user's line."""
    if isinstance(error, NotExported):
        return error.failure
    line = user_line(error)
    if isinstance(error, FlatoutError):
        return ExportFailure(what=error.what, limit=error.limit, remedy=error.remedy, line=line)
    if any(isinstance(one, GuardOnDataDependentSymNode) for one in causes(error)):
        return ExportFailure(
            what=BY_DATA,
            limit="a trace holds one path for all inputs",
            remedy="use torch.where or torch.cond, or move the branch out of the module",
            line=line,
        )
    if ".numpy()" in first_words(error):  # torch raises a plain RuntimeError for it
        return ExportFailure(
            what="the module converts tensors to numpy",
            limit="a trace holds torch operations only",
            remedy="use torch's own operation, or register the code with torch.library.custom_op",
            line=line,
        )
    if isinstance(error, OSError) and error.strerror:
        at = f": {error.filename}" if error.filename else ""  # a write to an open file names none
        return ExportFailure(what=f"{error.strerror}{at}", remedy="free space or name another place")
    what = f"{type(error).__name__}: {first_words(error)}".rstrip(": ")
    remedy = "try another format; TORCH_LOGS=+export shows torch's own steps"
    return ExportFailure(what=what, remedy=remedy, line=line)


def first_words(error: BaseException | str) -> str:
    """The first paragraph of a message, on one line."""
    paragraph = re.split(r"\n\s*\n", str(error).strip(), maxsplit=1)[0]
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", paragraph).split())
    return words if len(words) <= WORDS else words[: WORDS - 1] + "…"


_ASSIGNED = r"The tensor attributes? (?P<names>.*) (was|were) assigned during export"
_HARMLESS = (
    # a size that two inputs share has one name: that is meant
    (UserWarning, r"# The axis name: .* will not be used, since it shares the same shape constraints"),
)


@contextmanager
def quiet(notes: list[str]) -> Iterator[None]:
    """Torch's exporters log a lot: what the user should know goes to `notes`, and its own log is silenced.

    Warnings go to the notes too: under warnings-as-errors they must not fail a good export.
    """
    loggers = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    handlers = {handler for logger in (logging.root, *loggers) for handler in logger.handlers}
    handlers |= {logging.lastResort} if logging.lastResort else set()
    for handler in handlers:
        handler.addFilter(_no_record)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_no_record)
    for one in caught:
        _sort(one, notes)


def _no_record(record: logging.LogRecord) -> bool:
    talkative = record.name.partition(".")[0] in ("torch", "onnxscript", "onnx_ir")
    return not talkative or record.levelno > logging.ERROR


def _sort(one: warnings.WarningMessage, notes: list[str]) -> None:
    text = str(one.message)
    assigned = re.match(_ASSIGNED, text)
    if assigned:
        # nn.LSTM refreshes its own list of weights on every access; it is the same list after the trace.
        names = [name for name in assigned["names"].split(", ") if "._flat_weights[" not in name]
        note = f"forward assigns {', '.join(names)}: the file does not keep it" if names else ""
    elif issubclass(one.category, torch.jit.TracerWarning):  # type: ignore[attr-defined]
        at = place(one.filename, one.lineno)
        note = f"{ONE_OUTCOME}: {at}" if is_users(one.filename) else ""
    elif any(issubclass(one.category, kind) and re.match(pattern, text) for kind, pattern in _HARMLESS):
        note = ""
    elif issubclass(one.category, DeprecationWarning | FutureWarning | PendingDeprecationWarning):
        note = ""  # of a library's future, not of this file
    else:
        note = f"{one.category.__name__}: {first_words(text)}"
    if note and note not in notes:
        notes.append(note)


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """For which sizes a trace holds: a branch on the batch or on a length leaves a guard in the program, which the file
    of most formats does not check. `why_not` says of sizes by name why the trace does not hold, '' if it does.
    """

    found: tuple[SizeRange, ...]
    why_not: Callable[[Mapping[str, int]], str]


def ranges_of(traced: Traced | None, example: Example, dynamic: Dynamic) -> Ranges:
    """The bounds of each size that may vary, the others as in the example. Without a trace none is known."""
    why_not = (lambda sizes: "") if traced is None else _asks(traced, dynamic)
    found = []
    for name, size in example.sizes.items():
        if dynamic == "none" or (name == "length" and dynamic == "batch"):
            continue

        def allows(other: int, name: str = name) -> bool:
            return not why_not({name: other})

        if traced is None or not allows(max(size, 2)):
            found.append(SizeRange(name=name))
            continue
        smallest, largest = _smallest(allows, max(size, 2)), _largest(allows, max(size, 2))
        below = why_not({name: smallest - 1}) if smallest > 1 else ""
        above = why_not({name: largest + 1}) if largest is not None else ""
        reason = "; ".join(dict.fromkeys(one for one in (below, above) if one))
        found.append(SizeRange(name=name, smallest=smallest, largest=largest, reason=reason))
    return Ranges(found=tuple(found), why_not=why_not)


class _Held(Exception):
    """Raised behind the guards: the sizes are allowed, and nothing more is to be run."""


def _asks(traced: Traced, dynamic: Dynamic) -> Callable[[Mapping[str, int]], str]:
    """Asks the guards, without running the model: they read sizes of expanded views, which hold one row of memory."""
    module = traced.program.module()
    guards: nn.Module | None = getattr(module, EXPORT_GUARDS, None)

    def stop(*_: object) -> None:
        raise _Held

    if guards is not None:
        guards.register_forward_hook(stop)

    def why_not(sizes: Mapping[str, int]) -> str:
        if guards is None:
            return ""
        args, kwargs = _views(traced.example, sizes, dynamic)
        try:
            module(*args, **kwargs)
        except _Held:
            return ""
        except (AssertionError, RuntimeError, ValueError) as error:
            return first_words(error).removeprefix("Guard failed: ")
        return ""

    return why_not


def _views(
    example: Example, sizes: Mapping[str, int], dynamic: Dynamic
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The call with these sizes, each tensor a view of its first row."""

    def viewed(tensor: Tensor) -> Tensor:
        named = example.sizes_named(tensor, dynamic)
        for dimension, name in named.items():
            if name in sizes:
                tensor = tensor.narrow(dimension, 0, 1)
        shape = [sizes.get(named.get(number, ""), size) for number, size in enumerate(tensor.shape)]
        return tensor.expand(shape)

    args, kwargs = map_tensors(viewed, (example.args, example.kwargs))
    return args, kwargs


def _largest(allows: Callable[[int], bool], known: int) -> int | None:
    """The largest allowed size from `known` on; None where no bound was found."""
    good = known
    while allows(2 * good):
        good *= 2
        if good >= FURTHEST:
            return None
    return good + bisect_left(range(good + 1, 2 * good), True, key=lambda size: not allows(size))


def _smallest(allows: Callable[[int], bool], known: int) -> int:
    return 1 if allows(1) else 1 + bisect_left(range(1, known), True, key=allows)
