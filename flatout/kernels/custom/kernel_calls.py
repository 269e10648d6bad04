"""The kernel and its reference, called on one case; what is wrong with the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.errors import describe_error
from flatout.kernels.custom.cases import Case
from flatout.kernels.custom.definition import Definition, line_of
from flatout.kernels.custom.drawn_inputs import Drawn, copies, draw, nudged_copies
from flatout.kernels.custom.footprint import shape_of
from flatout.kernels.custom.guards import Guarded, guarded_allocations
from flatout.kernels.custom.judging import Rule, difference
from flatout.tensor_bytes import bytes_view

Kind = Literal["raises", "writes outside", "reads outside", "modifies an input", "shares memory", "shape", "values"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong on one case."""

    kind: Kind
    text: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one case."""

    problem: Problem | None
    repeatable: bool = True
    """Was the result the same, bit for bit, the second time?"""


class NothingToCompare(Exception):
    """A case says nothing of the kernel."""


class ReferenceFails(NothingToCompare):
    """The reference itself cannot do this case."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the reference makes of one case."""

    truth: tuple[Tensor, ...]
    """In float64, where that is what it computes in."""
    own: tuple[Tensor, ...]
    """In the dtype of the call."""
    nudged: tuple[Tensor, ...]
    """In float64, with inputs that are one rounding off."""
    sharing: frozenset[int] = frozenset()
    """The outputs, by position, that lie in the memory of an input."""


def forward_outcome(definition: Definition, case: Case, device: str) -> Outcome:
    """The kernel between guard zones, twice. ReferenceFails: the case says nothing."""
    drawn = draw(definition, case, device)
    expected = expected_of(definition, drawn.values)
    with torch.no_grad():
        with guarded_allocations() as made:
            try:
                returned = definition.kernel(*drawn.arguments)
            except Exception as error:  # the user's own code
                return Outcome(problem=Problem(kind="raises", text=raised_text(error)))
        synchronize(device)
        found = outputs_of(definition, returned, drawn.arguments)
        problem = (
            _memory_problem(definition, drawn, made)
            or values_problem(definition, case, found, expected)
            or _sharing_problem(definition, found, drawn.arguments, expected)
        )
        if problem is not None:
            return Outcome(problem=_closer_look(definition, case, device, problem, found, made))
        again = draw(definition, case, device).arguments
        try:
            second = outputs_of(definition, definition.kernel(*again), again)
        except Exception as error:  # the user's own code
            return Outcome(problem=Problem(kind="raises", text=f"called again, it {raised_text(error)}"))
    same = all(torch.equal(bytes_view(one), bytes_view(two)) for one, two in zip(found, second, strict=True))
    return Outcome(problem=None, repeatable=same)


def forward_problem(definition: Definition, case: Case, device: str) -> Problem | None:
    return forward_outcome(definition, case, device).problem


def expected_of(definition: Definition, values: Sequence[object]) -> Expected:
    """The reference on copies of these values. ReferenceFails: it raises."""
    with torch.no_grad():
        plain = copies(values)
        own = _of_reference(definition, plain)
        return Expected(
            truth=_of_reference(definition, copies(values, torch.float64)),
            own=own,
            nudged=_of_reference(definition, nudged_copies(values)),
            sharing=frozenset(_sharing(definition, own, plain)),
        )


def _of_reference(definition: Definition, arguments: list[object]) -> tuple[Tensor, ...]:
    try:
        return outputs_of(definition, definition.reference(*arguments), arguments)
    except Exception as error:  # the user's own code
        raise ReferenceFails(raised_text(error)) from error


def outputs_of(definition: Definition, returned: object, arguments: Sequence[object]) -> tuple[Tensor, ...]:
    """What it returned, and the inputs that it writes to."""
    return (*_tensors(returned), *(one for place in definition.mutates for one in _tensors(arguments[place])))


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, bool | int | float):
        return [torch.tensor(value)]
    return [one for part in value for one in _tensors(part)] if isinstance(value, tuple | list) else []


def raised_text(error: BaseException) -> str:
    line = line_of(error)
    return f"raises {describe_error(error)}" + (f" at {line}" if line else "")


def _memory_problem(definition: Definition, drawn: Drawn, made: Sequence[Guarded]) -> Problem | None:
    for place, one in enumerate(drawn.guarded):
        if one is None:
            continue
        if (text := one.written_outside()) is not None:
            return Problem(kind="writes outside", text=text)
        if place not in definition.mutates and one.modified():
            changed = f"changes its input {one.label}; if it is meant to, say so: mutates = ({place},)"
            return Problem(kind="modifies an input", text=changed)
    for own in made:
        if (where := own.written_outside()) is not None:
            kind = _kind_of(own.tensor)
            return Problem(kind="writes outside", text=where.replace(own.label, f"the {kind} that it allocates"))
    return None


def _sharing_problem(
    definition: Definition, found: Sequence[Tensor], arguments: Sequence[object], expected: Expected
) -> Problem | None:
    """An output in the memory of an input, where the reference makes a new one: a later write changes both."""
    for number, place in _sharing(definition, found, arguments).items():
        if number not in expected.sharing:
            name = "output" if len(found) == 1 else f"output {number}"
            label = definition.labels[place]
            text = (
                f"{name} shares memory with its input {label}, the reference's is new; return a copy: {label}.clone()"
            )
            return Problem(kind="shares memory", text=text)
    return None


def _sharing(definition: Definition, outputs: Sequence[Tensor], arguments: Sequence[object]) -> dict[int, int]:
    """Returned output -> the input whose memory it lies in; those that share none are left out."""
    memory = {
        one.untyped_storage().data_ptr(): place
        for place, one in enumerate(arguments)
        if isinstance(one, Tensor) and one.numel()
    }
    returned = outputs[: len(outputs) - len(definition.mutates)]
    places = {
        number: memory.get(one.untyped_storage().data_ptr()) for number, one in enumerate(returned) if one.numel()
    }
    return {number: place for number, place in places.items() if place is not None}


def values_problem(
    definition: Definition, case: Case, found: Sequence[Tensor], expected: Expected, *, what: str = "output"
) -> Problem | None:
    """What is wrong with these outputs; of several, of the first that is wrong."""
    if len(found) != len(expected.own):
        text = f"gives {len(found)} tensors, the reference {len(expected.own)}"
        return Problem(kind="shape", text=text)
    longest = max(size for one in definition.tensors for size in (1, *shape_of(one, case.sizes)))
    rule = Rule(tolerance=definition.tolerance, longest=longest)
    sides = zip(found, expected.truth, expected.own, expected.nudged, strict=True)
    for number, (one, truth, own, nudged) in enumerate(sides):
        name = what if len(found) == 1 else f"{what} {number}"
        if one.shape != own.shape or one.dtype != own.dtype or one.device != own.device:
            text = f"{name} is {_kind_of(one)}, the reference's is {_kind_of(own)}"
            return Problem(kind="shape", text=text)
        wrong = difference(one.detach(), truth.detach(), own.detach(), nudged.detach(), rule)
        if wrong is not None:
            return Problem(kind="values", text=f"{name}: {wrong}")
    return None


def _closer_look(
    definition: Definition, case: Case, device: str, problem: Problem, found: Sequence[Tensor], made: Sequence[Guarded]
) -> Problem:
    """Wrong values that come from memory: elements that were never written, or that are not the input's."""
    if problem.kind != "values":
        return problem
    for one in made:
        if any(one.tensor.data_ptr() == output.data_ptr() for output in found):
            count = int(one.never_written().sum())
            if count:
                total = one.tensor.numel()
                return Problem(kind="values", text=f"{problem.text}; {count} of {total} elements were never written")
    zeroed = draw(definition, case, device, "zero").arguments
    try:
        with guarded_allocations():
            other = outputs_of(definition, definition.kernel(*zeroed), zeroed)
    except Exception:  # the user's own code: the first problem stands
        return problem
    pairs = zip(found, other, strict=False)
    if any(one.shape == two.shape and bool((one.isnan() & ~two.isnan()).any()) for one, two in pairs):
        text = f"reads outside of its inputs: the result depends on memory beyond them ({problem.text})"
        return Problem(kind="reads outside", text=text)
    return problem


def _kind_of(tensor: Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"


def synchronize(device: str) -> None:
    """Errors of a GPU's kernel show up when it is waited for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
