"""Gradients that were freed while a script assumes they are zeros: what else holds one, and how it is restored.

Imported when the lever is on, after the script has imported torch. It runs for each gradient of each step, so it checks
no more than it must.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout.errors import MachineError
from flatout.levers.grad_attribute import delete_grad, get_grad, grad_replaced, held_by, set_grad
from flatout.torch_private.attributes import IS_REPLICA
from flatout.torch_private.dispatch import without_torch_function
from flatout.torch_private.tensors import storage_identity, storage_users, tensor_users

T = TypeVar("T")
_strided, _Tensor, _Parameter = torch.strided, torch.Tensor, torch.nn.Parameter
_count_references = sys.getrefcount

Owners = tuple[int, int, int, int]
"""Reference counts of a gradient and its memory, each in Python and in torch, including those of the caller."""

HOLDING: tuple[Callable[[Tensor], object], ...] = (
    lambda gradient: gradient,
    lambda gradient: gradient[:1],
    lambda gradient: gradient.detach(),
    lambda gradient: gradient.data,
    lambda gradient: gradient.untyped_storage(),
)
"""Ways to hold a gradient or its memory, each of which has to show in torch's counts."""


class FreedGradients:
    """Gradients that were freed and not read since. `report` is called with what keeps gradients from being freed."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._waiting: dict[int, weakref.ref[Tensor]] = {}
        """By identity, the parameters whose gradient was freed."""
        self._alone = _owners_where_nobody_else()

    # what the script calls

    def zero_grad(self, original: Callable[[T, bool], None]) -> Callable[[T, bool], None]:
        """Of optimizers and of modules."""

        def zero_grad(owner: T, set_to_none: bool = True) -> None:
            if set_to_none or not _is_plain() or getattr(owner, IS_REPLICA, False):
                original(owner, set_to_none)
            else:
                self._free(held_by(owner))

        return zero_grad

    def after_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """After every pass, in any thread: a gradient left in shared memory may be overwritten by the next pass."""

        def backward(*args: object, **kwargs: object) -> None:
            try:
                return original(*args, **kwargs)
            finally:
                self._look_at_new_ones()

        return backward

    @contextlib.contextmanager
    def read_as_zeros(self) -> Iterator[None]:
        """Reading `.grad` of a parameter whose gradient was freed gives zeros, which are its gradient from then on."""
        waiting = self._waiting

        def read(parameter: Tensor) -> Tensor | None:
            if id(parameter) in waiting:
                self._settle(parameter)
            return get_grad(parameter)

        def write(parameter: Tensor, gradient: Tensor | None) -> None:
            set_grad(parameter, gradient)
            waiting.pop(id(parameter), None)

        def delete(parameter: Tensor) -> None:
            delete_grad(parameter)
            waiting.pop(id(parameter), None)

        with grad_replaced(read, write, delete):
            try:
                yield
            finally:
                for parameter in self._those_waiting():
                    self._settle(parameter)

    def _free(self, parameters: Iterable[Tensor]) -> None:
        waiting, alone, freed, kept = self._waiting, self._alone, 0, 0
        for parameter in parameters:
            if _owners(parameter) in alone:
                set_grad(parameter, None)
                waiting[id(parameter)] = weakref.ref(parameter)
                freed += 1
            elif (gradient := get_grad(parameter)) is not None:
                _fill_with_zeros(gradient)
                kept += 1
        if kept and not freed:
            self._report("gradients are held elsewhere too, or are not plain tensors: they are set to zero")

    def _look_at_new_ones(self) -> None:
        """Parameters that got a gradient own it; those that got none still read as zeros."""
        for parameter in self._those_waiting():
            if _owners(parameter) in self._alone:
                self._waiting.pop(id(parameter), None)
            elif get_grad(parameter) is not None:
                self._settle(parameter)

    def _settle(self, parameter: Tensor) -> None:
        """Make the gradient what it would be if it had been filled with zeros."""
        reference = self._waiting.pop(id(parameter), None)
        if reference is None or reference() is not parameter:
            return
        if _owners(parameter) in self._alone:
            return
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            gradient = get_grad(parameter)
            if gradient is None:
                set_grad(parameter, _zeros(parameter))
            elif gradient.layout is not _strided:
                set_grad(parameter, _zeros(parameter).add_(gradient))
            elif not gradient.requires_grad:
                set_grad(parameter, gradient.clone())

    def _those_waiting(self) -> list[Tensor]:
        alive = []
        for key, reference in list(self._waiting.items()):
            parameter = reference()
            if parameter is None:
                self._waiting.pop(key, None)
            else:
                alive.append(parameter)
        return alive


def _owners(parameter: Tensor) -> Owners | None:
    """Of its gradient; None unless that is what backward would create: a plain tensor with the parameter's strides."""
    gradient = get_grad(parameter)
    if (
        type(gradient) is not _Tensor
        or type(parameter) is not _Parameter
        or gradient.layout is not _strided
        or gradient.requires_grad
        or gradient.dtype is not parameter.dtype
        or gradient.stride() != parameter.stride()
        or not (parameter.is_cpu or (parameter.is_cuda and parameter.get_device() == torch.cuda.current_device()))
        or not (parameter.is_leaf and parameter.is_floating_point())
    ):
        return None
    memory = gradient.untyped_storage()
    in_torch = tensor_users(gradient), storage_users(storage_identity(memory))
    return _count_references(gradient), _count_references(memory), *in_torch


def _owners_where_nobody_else() -> set[Owners | None]:
    """Of gradients that nothing else holds: right after a backward pass, and once Python has seen them.

    Raises MachineError where the counts of a gradient that is held elsewhere are the same.
    """
    alone: set[Owners | None] = set()
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        parameter = torch.nn.Parameter(torch.zeros(2))
        accumulation: Any = torch.autograd.graph.get_gradient_edge(parameter).node  # callable, though not typed so
        accumulation(torch.ones(2))
        alone |= {_owners(parameter), _owners(parameter)}
        for hold in HOLDING:
            held = hold(_gradient(parameter))
            if None in alone or _owners(parameter) in alone:
                counts = f"it counts {_owners(parameter)} and {alone}"
                raise MachineError("torch does not show what holds a gradient", limit=counts)
            del held
    return alone


def _gradient(parameter: Tensor) -> Tensor:
    gradient = get_grad(parameter)
    assert gradient is not None
    return gradient


def _is_plain() -> bool:
    """Not traced by torch.compile, not captured in a CUDA graph and not in another stream: those own their memory."""
    if torch.compiler.is_compiling():
        return False
    cuda = torch.cuda
    return not cuda.is_initialized() or (
        not cuda.is_current_stream_capturing() and cuda.current_stream() == cuda.default_stream()
    )


def _fill_with_zeros(gradient: Tensor) -> None:
    """As torch does."""
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
    gradient.zero_()


def _zeros(parameter: Tensor) -> Tensor:
    """As if made by the script's zero_grad: on a GPU the main stream makes them, and the current one waits."""
    if not parameter.is_cuda:
        return torch.zeros_like(parameter, requires_grad=False)
    main, current = torch.cuda.default_stream(parameter.device), torch.cuda.current_stream(parameter.device)
    with torch.cuda.stream(main):
        made = torch.zeros_like(parameter, requires_grad=False)
    current.wait_stream(main)
    return made
