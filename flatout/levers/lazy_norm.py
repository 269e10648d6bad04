"""Lazy normalised activations: what a batch norm in training would return, computed together with what follows it.

A `LazyNorm` is a torch.Tensor with a shape, a dtype, a node in the graph and no memory. The statistics of its batch
norm are known; the addition of another tensor only notes that tensor, and a ReLU computes all of it in one pass. Every
other operation computes the activations, once, as the batch norm would have done, and continues with plain tensors; so
do these two where a fused gradient would be another one than torch's (`_fuses`).

    y = lazy_norm(x, weight, bias, statistics)     # mean and variance computed, nothing written
    y += shortcut                                  # noted
    torch.relu_(y)                                 # one pass over x and shortcut

For code below Python (an autograd.Function of the script, an extension) it is a tensor like any other: it has a node of
its own in the autograd graph, through which gradients reach the batch norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar  # Any: a tensor subclass made by torch

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ScriptError
from flatout.kernels.batch_norm import batch_norm, norm_gradients
from flatout.levers.lazy_scores import ABOUT, NodeContext, is_plain
from flatout.torch_private.dispatch import beside_autograd, tree_map_only, without_subclass_torch_function
from flatout.torch_private.tensors import grad_slot, wrapper_without_memory

T = TypeVar("T")

Arguments = tuple[object, ...]
Keywords = dict[str, object]


class Source:
    """One call of a batch norm in training, and what was added to its result."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, addend: Tensor | None = None
    ) -> None:
        self.x, self.weight, self.bias, self.statistics, self.addend = x, weight, bias, statistics, addend
        self.formed: Tensor | None = None
        """The activations, once they had to be computed or an operation changed them in place."""
        self.formed_version = 0
        self.changed = False
        """By an operation in place."""
        self.base: Source | None = None
        """Where something was added: without it."""
        self.watched = False
        """Something waits for its gradient, which has to pass through the LazyNorm's own node."""
        self.fused = False
        """Part of its gradient does not pass through that node: it goes from ReLU to the batch norm's input."""
        self._versions, self._histories = self._read(), self._read_histories()

    def add(self, addend: Tensor) -> Source:
        """The same with another tensor added to it."""
        self.check()
        made = Source(self.x, self.weight, self.bias, self.statistics, addend)
        made.base, made._histories[:3] = self, self._histories[:3]
        return made

    def fuses(self, *, inplace: bool = False) -> bool:
        """Would a fused operation have the result and the gradients of torch's? In place, also those who hold the
        activations would have to see it."""
        if self.watched or (self.base is not None and self.base.watched):
            return False
        if self.formed is not None and (inplace or self.changed or self.formed._version != self.formed_version):
            return False
        return self._read_histories() == self._histories

    def mark_fused(self) -> None:
        self.fused = True
        if self.base is not None:
            self.base.mark_fused()

    def form(self, formed: Tensor, *, changed: bool = False) -> None:
        """These are the activations."""
        self.formed, self.formed_version, self.changed = formed, formed._version, self.changed or changed

    def computed(self, *, relu: bool) -> Tensor:
        """The activations, part of autograd's graph without the LazyNorm's own node."""
        self.check()
        return batch_norm(self.x, self.statistics, self.addend, self.weight, self.bias, relu)

    def values(self) -> Tensor:
        """The activations, detached. ScriptError where they have another history than their node says."""
        if self.formed is not None:
            if self.formed._version != self.formed_version:
                raise ScriptError(
                    "a view of a batch norm's result was changed in place before an operation below Python",
                    limit="the fused batch norm does not see such a change",
                    remedy='remove `normalization = "fused"` from the plan',
                )
            return self.formed.detach()
        with torch.no_grad():
            return self.computed(relu=False)

    def check(self) -> None:
        """Raises ScriptError if an input has changed: the activations would be different ones."""
        if self._read() != self._versions:
            raise ScriptError(
                "the input of a batch norm, or what was added to its result, was changed in place before that was used",
                limit="the fused batch norm computes its result together with the operations after it",
                remedy='use the result before, or remove `normalization = "fused"` from the plan',
            )

    def _read(self) -> tuple[int, int]:
        return self.x._version, 0 if self.addend is None else self.addend._version

    def _read_histories(self) -> list[object]:
        """Which of them have a gradient, and from where. (Graph nodes are compared by identity, and kept alive.)"""
        return [
            one is not None and (one.grad_fn or one.requires_grad)
            for one in (self.x, self.weight, self.bias, self.addend)
        ]


class LazyNorm(torch.Tensor):
    """See the module."""

    source: Source

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],  # one of torch's functions, whatever it returns
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _GRADIENTS:
            return _by_nodes(func, args, kwargs)
        if func in ABOUT:
            with without_subclass_torch_function():
                return func(*args, **kwargs)
        if func in _FUSED and _fuses():
            found = _FUSED[func](*args, **kwargs)
            if found is not None:
                return found
        result = func(*formed_in(args), **formed_in(kwargs))
        if args and isinstance(args[0], LazyNorm) and _changes(func, args[0].source):
            _becomes(args[0], form(args[0]))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """An operation from below Python, after autograd, or one of this module, for the sake of its node alone."""
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], LazyNorm) and isinstance(args[1], Tensor):
            lazy = args[0]
            if lazy.source.addend is None and lazy.source.fuses(inplace=True) and not kwargs:
                lazy.source = lazy.source.add(args[1])
                return lazy
        if func is torch.ops.aten.add.Tensor and isinstance(args[0], LazyNorm) and isinstance(args[1], Tensor):
            source = args[0].source
            if source.addend is None and source.fuses() and not kwargs:
                return _without_memory(source.add(args[1]))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], LazyNorm):
            return args[0]  # `_becomes`
        values = tree_map_only(LazyNorm, lambda one: one.source.values(), (args, kwargs or {}))
        return func(*values[0], **values[1])


def form(lazy: LazyNorm) -> Tensor:
    """The activations as a plain tensor in autograd's graph, the same one each time."""
    source = lazy.source
    if source.formed is None:
        with torch.inference_mode(False), torch.enable_grad():  # whatever asks first: others may need its gradient
            source.form(_form(lazy))
    assert source.formed is not None
    return source.formed


def formed_in(values: T) -> T:
    """With LazyNorms in nested containers formed."""
    formed: T = tree_map_only(LazyNorm, form, values)
    return formed


def _becomes(lazy: LazyNorm, formed: Tensor) -> None:
    """An operation in place gave the activations other values and another history: those of `formed`."""
    lazy.source.form(formed, changed=True)
    with torch.inference_mode(False), torch.enable_grad(), without_subclass_torch_function():
        lazy.copy_(formed)  # copies nothing: it is for the history


def _changes(func: Callable[..., object], source: Source) -> bool:
    """Has this call changed the activations, or may it let others do so unseen?"""
    if func in _DATA:
        return True
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or (source.formed is not None and source.formed._version != source.formed_version)


def _by_nodes(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """Something asks for the gradient of LazyNorms, now or later: of their own nodes, through which all of it passes.

    ScriptError where some of it does not.
    """

    def asked(lazy: LazyNorm) -> Tensor:
        if lazy.source.fused and func != _NODE:  # which may just be looked at
            raise ScriptError(
                "the gradient of a batch norm's result was asked for after its ReLU was computed",
                limit="the fused batch norm computes both in one operation, which has no such gradient",
                remedy='ask before (retain_grad, register_hook), or remove `normalization = "fused"` from the plan',
            )
        lazy.source.watched = True
        return lazy.source.formed if lazy.source.changed and lazy.source.formed is not None else lazy

    place = func is torch.autograd.grad  # of (outputs, inputs)
    values = [formed_in(args[:place]), tree_map_only(LazyNorm, asked, args[place : place + 1])]
    others = formed_in((args[place + 1 :], kwargs))
    with without_subclass_torch_function():
        result = func(*values[0], *values[1], *others[0], **others[1])
    return result


# what is fused


def _fuses() -> bool:
    """Is this the plain autograd of a training step?"""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not beside_autograd()


def _relu(input: object, inplace: bool = False) -> Tensor | None:
    if not isinstance(input, LazyNorm) or not input.source.fuses(inplace=inplace):
        return None
    made = input.source.computed(relu=True)
    input.source.mark_fused()
    if inplace:
        _becomes(input, made)
    return made


def _add(input: object, other: object, *more: object, inplace: bool = False, **options: object) -> Tensor | None:
    """None where the sum is not of two activations that are alike."""
    if not isinstance(input, LazyNorm):
        input, other = other, input
    if not isinstance(input, LazyNorm) or more or options.pop("alpha", 1) != 1 or options:
        return None
    if isinstance(other, LazyNorm):
        other = form(other)
    if not is_plain(other) or other.layout != torch.strided or other.is_inference() or not other.requires_grad:
        return None  # what has no gradient is a buffer, which may get other numbers before the sum is computed
    x = input.source.x
    if (other.dtype, other.device, other.shape, other.stride()) != (x.dtype, x.device, x.shape, x.stride()):
        return None
    if input.source.addend is not None or not input.source.fuses(inplace=inplace):
        return None
    with without_subclass_torch_function():
        made: Tensor = input.add_(other) if inplace else input + other
    return made


def _add_(input: object, other: object, *more: object, **options: object) -> Tensor | None:
    return _add(input, other, *more, inplace=True, **options) if isinstance(input, LazyNorm) else None


_T = torch.Tensor
_FUSED: dict[object, Callable[..., Tensor | None]] = {
    functional.relu: _relu,
    **dict.fromkeys((torch.relu, _T.relu), _relu),
    **dict.fromkeys((torch.relu_, _T.relu_), functools.partial(_relu, inplace=True)),
    **dict.fromkeys((torch.add, _T.add, _T.__add__, _T.__radd__), _add),
    **dict.fromkeys((_T.add_, _T.__iadd__), _add_),
}
_NODE: object = getattr(_T, "grad_fn").__get__  # noqa: B009  (mypy takes it for a node, not for the descriptor)
_GRADIENTS = {_T.register_hook, _T.retain_grad, _NODE, grad_slot.__get__, torch.autograd.grad}
_DATA = {_T.data.__get__, _T.data.__set__}  # type: ignore[attr-defined]


# nodes


class _Context(NodeContext, Protocol):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor]


class _Deferred(torch.autograd.Function):
    """The batch norm's node: gradients of what does not fuse go through it."""

    @staticmethod
    def forward(
        context: _Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor
    ) -> LazyNorm:
        context.set_materialize_grads(False)
        context.save_for_backward(x, statistics)
        return _without_memory(Source(x, weight, bias, statistics))

    @staticmethod
    def backward(context: _Context, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        x, statistics = context.saved_tensors
        of_x, of_weight, of_bias, _ = context.needs_input_grad
        weight, bias, *others = norm_gradients(gradient, x, statistics, None, False, of_x, False)
        return others[0] if of_x else None, weight if of_weight else None, bias if of_bias else None, None


lazy_norm: Callable[[Tensor, Tensor | None, Tensor | None, Tensor], LazyNorm] = _Deferred.apply
"""x: fp32 or bf16 [batch, channels, ...]; weight and bias: fp32 [channels] or None; statistics: those of all three. The
result is like x."""


class _Form(torch.autograd.Function):
    """From a LazyNorm to the activations themselves."""

    @staticmethod
    def forward(context: object, lazy: LazyNorm) -> Tensor:
        return lazy.source.values()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient


_form: Callable[[LazyNorm], Tensor] = _Form.apply


def _without_memory(source: Source) -> LazyNorm:
    x = source.x
    made: Any = wrapper_without_memory(
        LazyNorm, x.shape, strides=x.stride(), storage_offset=0, dtype=x.dtype, device=x.device
    )
    made.source = source
    lazy: LazyNorm = made
    return lazy
