"""The kernel as a part of torch: its gradient, torch.compile, autocast, and how its operator is registered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch
from torch import Tensor

from flatout.errors import describe_error
from flatout.kernels.custom.cases import Case
from flatout.kernels.custom.definition import Definition
from flatout.kernels.custom.drawn_inputs import copies, draw, nudged, nudged_copies
from flatout.kernels.custom.kernel_calls import (
    Expected,
    NothingToCompare,
    Problem,
    ReferenceFails,
    expected_of,
    outputs_of,
    raised_text,
    synchronize,
    values_problem,
)
from flatout.torch_private.dispatch import ListeningMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

_NOT_REGISTERED = "autograd formula"
"""In the message of torch's error for an operator without one; the error has no type of its own."""


class NotSupported(NothingToCompare):
    """The kernel does not do this at all, which is no mistake unless the user asked for it."""


# the gradient


def gradient_problem(definition: Definition, case: Case, device: str) -> Problem | None:
    """The kernel's gradients against autograd's of the reference. NotSupported: it has none; ReferenceFails: nor has
    the reference."""
    drawn = draw(definition, case, device)
    expected = Expected(
        truth=_reference_gradients(definition, case, copies(drawn.values, torch.float64)),
        own=_reference_gradients(definition, case, copies(drawn.values)),
        nudged=_reference_gradients(definition, case, nudged_copies(drawn.values), nudges=getattr(torch, case.dtype)),
    )
    try:
        found = _kernel_gradients(definition, case, drawn.arguments)
    except NotSupported:
        raise
    except Exception as error:  # the user's own code
        if _NOT_REGISTERED in str(error):
            raise NotSupported("its operator has no autograd formula") from error
        return Problem(kind="raises", text=f"backward {raised_text(error)}")
    synchronize(device)
    for memory in drawn.guarded:
        if memory is not None and (text := memory.written_outside()):
            return Problem(kind="writes outside", text=f"backward {text}")
    labels = [label for label, one in zip(definition.labels, drawn.values, strict=True) if _differentiable(one)]
    for label, got, truth, own, off in zip(labels, found, expected.truth, expected.own, expected.nudged, strict=True):
        wanted = Expected(truth=(truth,), own=(own,), nudged=(off,))
        if problem := values_problem(definition, case, (got,), wanted, what=f"gradient of {label}"):
            return problem
    return None


def _reference_gradients(
    definition: Definition, case: Case, arguments: list[object], *, nudges: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """nudges: the incoming gradients are one rounding of this dtype off."""
    leaves = _leaves(arguments)
    try:
        outputs = _float_outputs(outputs_of(definition, definition.reference(*arguments), arguments))
        return _gradients(outputs, leaves, _incoming(outputs, case, nudges))
    except Exception as error:  # the user's own code
        raise ReferenceFails(raised_text(error)) from error


def _kernel_gradients(definition: Definition, case: Case, arguments: list[object]) -> tuple[Tensor, ...]:
    leaves = _leaves(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an operator without a formula: it is reported
        outputs = _float_outputs(outputs_of(definition, definition.kernel(*arguments), arguments))
        if not any(one.requires_grad for one in outputs):
            raise NotSupported("its result does not require a gradient: training would silently do without one")
        incoming = _incoming(outputs, case, None)
        pairs = [(one, weight) for one, weight in zip(outputs, incoming, strict=True) if one.requires_grad]
        used, weights = zip(*pairs, strict=True)
        raw = torch.autograd.grad(used, leaves, weights, allow_unused=True)
    if all(one is None for one in raw) and any(one.numel() for one in leaves):
        raise NotSupported("its operator has no autograd formula")
    return _filled(raw, leaves)


def _leaves(arguments: list[object]) -> list[Tensor]:
    for place, one in enumerate(arguments):
        if _differentiable(one):
            arguments[place] = one.detach().requires_grad_()
    return [one for one in arguments if _differentiable(one)]


def _differentiable(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def _float_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [one for one in outputs if one.is_floating_point()]


def _incoming(outputs: Sequence[Tensor], case: Case, nudges: torch.dtype | None) -> list[Tensor]:
    """The gradients that come in, the same for the kernel and its reference. In every other case each is one number,
    expanded, as the gradient of a sum is."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for one in outputs:
        expands = case.seed % 2 and one.dim()
        drawn = torch.randn((1,) * one.dim() if expands else one.shape, generator=generator)
        rounded = drawn.to(getattr(torch, case.dtype)).to(one.device, one.dtype).expand(one.shape)
        found.append(rounded if nudges is None else nudged(rounded.to(nudges)))
    return found


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], incoming: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Zeros for what the outputs do not depend on."""
    pairs = [(one, weight) for one, weight in zip(outputs, incoming, strict=True) if one.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    used, weights = zip(*pairs, strict=True)
    return _filled(torch.autograd.grad(used, leaves, weights, allow_unused=True), leaves)


def _filled(raw: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(leaf) if one is None else one for one, leaf in zip(raw, leaves, strict=True))


# torch.compile


def compiled_problem(definition: Definition, cases: Sequence[Case], device: str, backend: str) -> Problem | None:
    """The kernel in a graph of torch.compile, on several sizes. NotSupported: it cannot be in one, and why."""
    torch.compiler.reset()

    def call(*arguments: object) -> object:
        return definition.kernel(*arguments)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for case in cases:
        drawn = draw(definition, case, device)
        expected = expected_of(definition, drawn.values)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = outputs_of(definition, compiled(*drawn.arguments), drawn.arguments)
            except Exception as error:  # of torch.compile, or the user's own code
                raise NotSupported(_why_no_graph(error)) from error
        synchronize(device)
        if problem := values_problem(definition, case, found, expected):
            return Problem(kind=problem.kind, text=f"compiled, {problem.text}")
    return None


def _why_no_graph(error: Exception) -> str:
    """The error's first line, and torch.compile's explanation where it has one."""
    lines = [line.strip() for line in str(error).splitlines()]
    explained = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    return ": ".join([describe_error(error), *explained[:1]])[:300]


# autocast


def autocast_problem(definition: Definition, case: Case, device: str) -> Problem | None:
    """Under bf16 autocast with fp32 inputs: as right as bf16 can be. ReferenceFails: it fails there too."""
    drawn = draw(definition, case, device)
    expected = expected_of(definition, drawn.values)
    narrow = copies(drawn.values, torch.bfloat16)
    with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
        try:
            rounded = outputs_of(definition, definition.reference(*narrow), narrow)
        except Exception as error:  # the user's own code
            raise ReferenceFails(raised_text(error)) from error
        try:
            found = outputs_of(definition, definition.kernel(*drawn.arguments), drawn.arguments)
        except Exception as error:  # the user's own code
            return Problem(kind="raises", text=f"under autocast it {raised_text(error)}")
    synchronize(device)
    # In whichever of the two dtypes it comes; as near as the reference is with inputs in bf16.
    as_found = [one.to(torch.bfloat16) if one.is_floating_point() else one for one in found]
    own = tuple(one.to(torch.bfloat16) if one.is_floating_point() else one for one in rounded)
    one = values_problem(definition, case, as_found, Expected(truth=expected.truth, own=own, nudged=expected.nudged))
    return None if one is None else Problem(kind=one.kind, text=f"under autocast, {one.text}")


# the operator


_Calls: TypeAlias = "dict[OpOverload[..., object], tuple[tuple[object, ...], dict[str, object]]]"


class _Operators(ListeningMode):
    """Remembers the operators that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: _Calls = {}

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if getattr(func, "namespace", "aten") not in ("aten", "prims", "prim"):
            self.calls.setdefault(func, (args, kwargs))
        return func(*args, **kwargs)


def _calls(definition: Definition, case: Case, device: str) -> _Calls:
    """The custom operators that the kernel calls on this case, with their arguments."""
    listening = _Operators()
    arguments = draw(definition, case, device).arguments
    with torch.no_grad(), listening:
        definition.kernel(*arguments)
    return listening.calls


OPERATOR_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OF_GRADIENTS, OF_COMPILING = OPERATOR_TESTS[1:2], OPERATOR_TESTS[2:]


def operator_failures(definition: Definition, case: Case, device: str, tests: Sequence[str]) -> dict[str, str]:
    """(operator, test) as text -> what torch.library.opcheck says. NotSupported: the kernel calls no operator."""
    calls = _calls(definition, case, device)
    if not calls:
        raise NotSupported("it is not an operator of torch's (torch.library.custom_op or TORCH_LIBRARY)")
    failures: dict[str, str] = {}
    for operator, (args, kwargs) in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.library.opcheck(operator, args, kwargs, test_utils=tuple(tests), raise_exception=False)
        for test, said in found.items():
            if isinstance(said, BaseException):
                failures[f"{operator} {test}"] = describe_error(said)
    return failures
