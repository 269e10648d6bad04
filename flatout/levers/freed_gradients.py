"""Gradients that are not there while a script takes them to be zeros: who holds one, and how it comes back.

Imported when the lever is on, after the script has imported torch. It runs for each gradient of each step: it asks as
few questions as will do.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flatout.errors import MachineError
from flatout.replaced import overlaid
from flatout.torch_private.attributes import IS_REPLICA
from flatout.torch_private.dispatch import without_torch_function
from flatout.torch_private.tensors import storage_identity, storage_users, tensor_users

_SLOT: Any = torch.Tensor.grad
"""torch's own attribute."""
_get, _put, _drop = _SLOT.__get__, _SLOT.__set__, _SLOT.__delete__
_strided, _Tensor, _Parameter = torch.strided, torch.Tensor, torch.nn.Parameter
_count_references = sys.getrefcount

Owners = tuple[int, int, int, int]
"""How many hold a gradient and its memory, each in Python and in torch, who asks included."""

HOLDING: tuple[Callable[[Any], Any], ...] = (
    lambda gradient: gradient,
    lambda gradient: gradient[:1],
    lambda gradient: gradient.detach(),
    lambda gradient: gradient.data,
    lambda gradient: gradient.untyped_storage(),
)
"""Ways to hold a gradient or its memory, which torch has to tell from nobody holding it."""


class FreedGradients:
    """Those that were freed and not asked for since. `tell` is called with what keeps gradients from being freed."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._waiting: dict[int, weakref.ref[Any]] = {}
        """By identity, the parameters whose gradient was freed."""
        self._alone = _owners_where_nobody_else()

    # what the script calls

    def of_optimizer(self, original: Any) -> Any:
        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            if set_to_none or not _is_plain():
                original(optimizer, set_to_none)
            else:
                self._free(parameter for group in optimizer.param_groups for parameter in group["params"])

        return zero_grad

    def of_module(self, original: Any) -> Any:
        def zero_grad(module: Any, set_to_none: bool = True) -> None:
            if set_to_none or not _is_plain() or getattr(module, IS_REPLICA, False):
                original(module, set_to_none)
            else:
                self._free(module.parameters())

        return zero_grad

    def after_backward(self, original: Any) -> Any:
        """Of every pass, in whichever thread: what one leaves in shared memory, the next may overwrite."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._look_at_new_ones()

        return backward

    @contextlib.contextmanager
    def read_as_zeros(self) -> Iterator[None]:
        """`.grad` of a parameter whose gradient was freed gives zeros, which are its gradient from then on."""
        waiting = self._waiting

        def read(parameter: Any) -> Any:
            if id(parameter) in waiting:
                self._settle(parameter)
            return _get(parameter)

        def write(parameter: Any, gradient: Any) -> None:
            _put(parameter, gradient)
            waiting.pop(id(parameter), None)

        def delete(parameter: Any) -> None:
            _drop(parameter)
            waiting.pop(id(parameter), None)

        ours = property(read, write, delete)
        with overlaid(torch.nn.Parameter, "grad", ours):
            try:
                yield
            finally:
                for parameter in self._those_waiting():
                    self._settle(parameter)

    # what becomes of gradients

    def _free(self, parameters: Iterable[Any]) -> None:
        waiting, alone, freed, kept = self._waiting, self._alone, 0, 0
        for parameter in parameters:
            if _owners(parameter) in alone:
                _put(parameter, None)
                waiting[id(parameter)] = weakref.ref(parameter)
                freed += 1
            elif (gradient := _get(parameter)) is not None:
                _fill_with_zeros(gradient)
                kept += 1
        if kept and not freed:
            self._tell("gradients are held elsewhere too, or are no plain tensors: they are set to zero")

    def _look_at_new_ones(self) -> None:
        """What got a gradient has one of its own; what got none reads as zeros still."""
        for parameter in self._those_waiting():
            if _owners(parameter) in self._alone:
                self._waiting.pop(id(parameter), None)
            elif _get(parameter) is not None:
                self._settle(parameter)

    def _settle(self, parameter: Any) -> None:
        """The gradient is what it would be, had it been filled with zeros."""
        reference = self._waiting.pop(id(parameter), None)
        if reference is None or reference() is not parameter:
            return
        if _owners(parameter) in self._alone:
            return
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            gradient = _get(parameter)
            if gradient is None:
                _put(parameter, _zeros(parameter))
            elif gradient.layout is not _strided:
                _put(parameter, _zeros(parameter).add_(gradient))
            elif not gradient.requires_grad:
                _put(parameter, gradient.clone())

    def _those_waiting(self) -> list[Any]:
        alive = []
        for key, reference in list(self._waiting.items()):
            parameter = reference()
            if parameter is None:
                self._waiting.pop(key, None)
            else:
                alive.append(parameter)
        return alive


def _owners(parameter: Any) -> Owners | None:
    """Of its gradient; None where it has none that backward would make anew: a plain tensor that lies as it does."""
    gradient = _get(parameter)
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
    """Of gradients that nobody else holds: fresh from a backward pass, and once Python has seen them.

    Raises MachineError where one that is held too cannot be told from them.
    """
    alone: set[Owners | None] = set()
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        parameter = torch.nn.Parameter(torch.zeros(2))
        accumulation: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        accumulation(torch.ones(2))
        alone |= {_owners(parameter), _owners(parameter)}
        for hold in HOLDING:
            held = hold(_get(parameter))
            if None in alone or _owners(parameter) in alone:
                told = f"it counts {_owners(parameter)} and {alone}"
                raise MachineError("torch does not tell who holds a gradient", limit=told)
            del held
    return alone


def _is_plain() -> bool:
    """Not traced by torch.compile, not recorded for a CUDA graph, not in a stream of its own: each has its memory."""
    if torch.compiler.is_compiling():
        return False
    cuda = torch.cuda
    return not cuda.is_initialized() or (
        not cuda.is_current_stream_capturing() and cuda.current_stream() == cuda.default_stream()
    )


def _fill_with_zeros(gradient: Any) -> None:
    """As torch does."""
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
    gradient.zero_()


def _zeros(parameter: Any) -> Any:
    """As if made when the script asked for them: on a GPU its main stream makes them, and the current one waits."""
    if not parameter.is_cuda:
        return torch.zeros_like(parameter, requires_grad=False)
    main, current = torch.cuda.default_stream(parameter.device), torch.cuda.current_stream(parameter.device)
    with torch.cuda.stream(main):
        made = torch.zeros_like(parameter, requires_grad=False)
    current.wait_stream(main)
    return made
