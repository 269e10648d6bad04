"""Scores that are not there yet: what a last linear layer would return, computed only if somebody looks at it.

A `LazyScores` is a torch.Tensor with a shape, a type, a place in the graph and no memory. Operations that only move
positions about (`view`, `transpose`, `scores[:, :-1]`, `float`) give another one, and so does a log-softmax over the
classes; cross-entropy (or `nll_loss` behind that) takes the layer's input and weights from it and never forms the
scores; any other operation has them computed then, once, as the layer would
have done, and goes on with plain tensors.

    scores = lazy_linear(hidden, weight, bias, watch)     # [..., classes], nothing computed
    functional.cross_entropy(scores.view(-1, classes), targets)        # in chunks
    scores.argmax(-1)                                     # computes them

To code below Python (an autograd.Function of the script's, an extension) it is a tensor like any other: it has a node
of its own in autograd's graph, through which gradients by the scores reach the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ScriptError, UsageError
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
from flatout.levers.score_moves import MOVING, DoesMore, log_softmax, shape_alone
from flatout.memory.fake_run import is_fake
from flatout.torch_private.dispatch import tree_leaves, tree_map_only, without_subclass_torch_function
from flatout.torch_private.tensors import grad_slot, is_view, storage_identity, unsafe_view, wrapper_without_memory

LINEAR = functional.linear
"""torch's own, whatever stands in its place later."""


class Watcher(Protocol):
    """Is told what became of a layer's scores."""

    busy: bool
    """True while scores are computed: the linear layers that are called then are not to be put off."""

    def fused(self, source: Source) -> None:
        """Cross-entropy took them without forming them."""

    def formed(self, source: Source, by: str) -> None:
        """They had to be computed, for the operation `by`."""


class Source:
    """One call of a linear layer that was put off: its arguments, and its result once it had to be formed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, key: Any, watcher: Watcher) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.key, self.watcher = key, watcher
        kind = hidden.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.in_training = torch.is_grad_enabled()
        self.is_formed = self.is_fused = self.is_kept = False
        self.by_scores = False
        """Does somebody ask for the loss's gradient by the scores? Then they are formed in the backward pass."""
        self._state = self._fingerprint()

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.hidden.dtype

    def keep(self) -> None:
        """The weights are about to change: from now on a copy of them is used."""
        if self.is_formed or self.is_kept:
            return
        self.check()
        self.is_kept = True
        self.weight = self.weight.detach().clone()
        self.bias = None if self.bias is None else self.bias.detach().clone()
        self._state = self._fingerprint()

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as it was when the layer was called, and linear layers that compute."""
        before, self.watcher.busy = self.watcher.busy, True
        try:
            with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            self.watcher.busy = before

    def form(self, by: str) -> Tensor:
        """What the layer would have returned then, for the operation `by`; without a graph."""
        self.check()
        if not self.is_formed:
            self.is_formed = True
            self.watcher.formed(self, by)
        with torch.no_grad(), self.precision():
            rows = LINEAR(self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias)
            # Not a view to autograd: of a Function's result that is one, nothing could be changed in place.
            shaped: Tensor = unsafe_view(rows, (*self.hidden.shape[:-1], self.classes))
        return shaped

    def check(self) -> None:
        """Raises ScriptError where the layer's arguments are not what they were: the scores would be other ones."""
        if self._fingerprint() != self._state:
            raise ScriptError(
                "a layer's scores were asked for after its weights had been changed in place",
                limit="the chunked loss computes them only then",
                remedy='use them before, or take `loss = "chunked"` out of the plan',
            )

    def _fingerprint(self) -> tuple[Any, ...]:
        tensors = [one for one in (self.hidden, self.weight, self.bias) if one is not None]
        return tuple((one._version, storage_identity(one.untyped_storage())) for one in tensors)


def is_plain(tensor: Any) -> bool:
    """Is it a tensor as torch makes them, with memory or without (in a forecast)?"""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_fake(tensor)


class LazyScores(torch.Tensor):
    """See the module. `place` says how it comes from its layer's call."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with without_subclass_torch_function():
                return func(*args, **kwargs)
        if func in _LOSSES:
            loss = _LOSSES[func](*args, **kwargs)
            if loss is not None:
                return loss
        elif (func in _GRADIENTS or func is torch.autograd.grad) and (fused := _fused_in(args, kwargs)):
            return _by_scores(fused, func, args, kwargs)
        elif func in MOVING and isinstance(args[0], LazyScores):
            moved = args[0].place.moved(args[0], func, args[1:], kwargs)
            if moved is not None:
                return moved
        name = getattr(func, "__name__", str(func))
        return func(*_formed_in(args, name), **_formed_in(kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operation from below Python; autograd has done its part."""
        values = tree_map_only(LazyScores, lambda one: one.place.plain(str(func)), (args, kwargs or {}))
        return func(*values[0], **values[1])


class Place:
    """How a LazyScores comes from its source: the operations in between, and the layer's input put through the same."""

    def __init__(
        self, source: Source, features: Tensor, axis: int, like: Tensor, base: LazyScores | None, steps: tuple[Any, ...]
    ) -> None:
        self.source, self.features, self.axis, self.like = source, features, axis, like
        """features: as the scores, with the layer's input where the classes are, along `axis`."""
        self.base, self.steps = base, steps
        self.weight, self.bias = source.weight, source.bias
        self.classes = source.classes
        self.formed: Tensor | None = None
        self.node: Any = None
        self.is_normalised = False
        """Are they the log-softmax over the classes?"""

    def tensor(self, before: LazyScores | None = None) -> LazyScores:
        """The stand-in; `before` is the one that the last step was taken from."""
        made: LazyScores
        if before is None:
            made = _Stand.apply(self.features, self.weight, self.bias, self.like)
        else:
            made = _Moved.apply(before, self)
        made.place = self
        self.node = made.grad_fn
        return made

    def moved(self, own: LazyScores, func: Any, args: Any, kwargs: Any) -> LazyScores | None:
        """The scores after an operation that only moves positions; None where it does more than that."""
        if self.source.is_formed or own.grad_fn is not self.node:
            return None
        try:
            like, features, axis = MOVING[func](self, func, args, kwargs)
        except (DoesMore, RuntimeError, IndexError, TypeError, NotImplementedError):
            return None  # if it is a mistake, it shows on the scores themselves
        step = (func, args, kwargs, torch.is_grad_enabled())
        base = own if self.base is None else self.base
        found = Place(self.source, features, axis, like, base, (*self.steps, step))
        if func is torch.Tensor.detach:
            found.weight, found.bias = _detached(self.weight), _detached(self.bias)
        else:
            found.weight, found.bias = self.weight, self.bias
        found.classes = self.classes
        if like.shape[axis] < self.classes:  # the first of them
            found.classes = like.shape[axis]
            found.weight = found.weight[: found.classes]
            found.bias = None if found.bias is None else found.bias[: found.classes]
        found.is_normalised = self.is_normalised or MOVING[func] is log_softmax
        return found.tensor(own)

    def form(self, own: LazyScores, by: str) -> Tensor:
        """The scores as a plain tensor in autograd's graph, the same one each time."""
        if self.formed is None and (self.base is None or own.grad_fn is not self.node):
            with torch.enable_grad():  # another history than its own was put on it by somebody: that one counts
                self.formed = _Form.apply(own, self, by)
        elif self.formed is None:
            assert self.base is not None
            self.formed = self._replay(self.base.place.form(self.base, by))
        assert self.formed is not None
        return self.formed

    def plain(self, by: str) -> Tensor:
        """The scores without a graph."""
        with torch.no_grad():
            return self._replay(self.source.form(by), graph=False) if self.formed is None else self.formed.detach()

    def _replay(self, scores: Tensor, *, graph: bool = True) -> Tensor:
        for func, args, kwargs, with_graph in self.steps:
            with torch.set_grad_enabled(graph and with_graph):
                scores = func(scores, *args, **kwargs)
        return scores


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, key: Any, watcher: Watcher) -> LazyScores:
    """hidden: [..., features], weight: [classes, features], bias: [classes] or None -> [..., classes]."""
    source = Source(hidden, weight, bias, key, watcher)
    like = shape_alone((*hidden.shape[:-1], source.classes), source.dtype)
    return Place(source, hidden, hidden.dim() - 1, like, None, ()).tensor()


class _Stand(torch.autograd.Function):
    """The scores' node: who gets at them below Python sends gradients through here, to the layer."""

    @staticmethod
    def forward(context: Any, features: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
        context.set_materialize_grads(False)
        context.save_for_backward(features, weight)
        context.dtype, context.biased = like.dtype, bias is not None
        return _without_memory(like, features.device)

    @staticmethod
    def backward(context: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None, None
        features, weight = context.saved_tensors
        by_score = gradient.to(context.dtype)
        of_features = (by_score @ weight.to(context.dtype)).to(features.dtype)
        rows = by_score.reshape(-1, by_score.shape[-1])
        inputs = features.reshape(-1, features.shape[-1])
        of_weight = (rows.t() @ inputs.to(context.dtype)).to(weight.dtype)
        return of_features, of_weight, rows.sum(0).to(weight.dtype) if context.biased else None, None


class _Moved(torch.autograd.Function):
    """From one stand-in to the next: the last step of `place`, which only its gradient has to be put through."""

    @staticmethod
    def forward(context: Any, before: LazyScores, place: Place) -> Tensor:
        context.set_materialize_grads(False)
        context.before, context.step = before.place, place.steps[-1]
        return _without_memory(place.like, place.features.device)

    @staticmethod
    def backward(context: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None
        func, args, kwargs, _ = context.step
        before: Place = context.before
        if MOVING[func] is log_softmax:
            values = before.plain(func.__name__)
        else:  # only positions count
            values = torch.empty((), dtype=before.like.dtype, device=gradient.device).expand(before.like.shape)
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            moved = func(values, *args, **kwargs)
        (found,) = torch.autograd.grad(moved, values, gradient, create_graph=torch.is_grad_enabled())
        return found, None


def _without_memory(like: Tensor, device: torch.device) -> Tensor:
    made: Tensor = wrapper_without_memory(LazyScores, like.shape, dtype=like.dtype, device=device)
    return made


class _Form(torch.autograd.Function):
    """From the stand-in to the scores themselves."""

    @staticmethod
    def forward(context: Any, stand: Tensor, place: Place, by: str) -> Tensor:
        scores = place.plain(by)
        return scores.clone() if is_view(scores) else scores

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class _Twice(torch.autograd.Function):
    """Behind the chunked loss: what the gradients that were computed with it do not cover.

    A gradient that is to be differentiated itself goes the plain way, with all scores; so does the gradient by the
    scores, where it was asked for, and reaches the layer through them.
    """

    @staticmethod
    def forward(context: Any, loss: Tensor, scores: LazyScores, targets: Tensor, how: Any, *layer: Any) -> Tensor:
        context.save_for_backward(scores, targets, *layer)
        context.how = how
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        scores, targets, *layer = context.saved_tensors
        twice = torch.is_grad_enabled()
        if scores.place.source.by_scores:
            return None, _by_score(scores, targets, context.how, gradient, twice), None, None, *[None] * len(layer)
        if not twice:
            return gradient, *[None] * (3 + len(layer))
        with scores.place.source.precision():
            plain = LINEAR(*layer)
        loss = functional.cross_entropy(plain, targets.reshape(-1), **context.how)
        wanted = [one for one in layer if one is not None and one.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, gradient.to(loss.dtype), create_graph=True))
        parts = [next(found) if one is not None and one.requires_grad else None for one in layer]
        return None, None, None, None, *parts


def _by_score(scores: LazyScores, targets: Tensor, how: dict[str, Any], gradient: Tensor, twice: bool) -> Tensor:
    """The gradient of their cross-entropy by the scores themselves, as they went into it."""
    with torch.enable_grad():
        values = scores.place.form(scores, "a gradient") if twice else scores.place.plain("a gradient")
        values = values if twice else values.requires_grad_()
        if scores.place.is_normalised:
            only = {name: value for name, value in how.items() if name != "label_smoothing"}
            loss = functional.nll_loss(values, targets, **only)
        else:
            loss = functional.cross_entropy(values, targets, **how)
    (found,) = torch.autograd.grad(loss, values, gradient.to(loss.dtype), create_graph=twice)
    return found


def _fused_in(args: Any, kwargs: Any) -> list[Source]:
    """The sources of those scores among the arguments that a loss took without forming them."""
    leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, LazyScores)]
    fused = [one.place.source for one in leaves if one.place.source.is_fused and one.grad_fn is one.place.node]
    return fused if len(fused) == len(leaves) else []


def _by_scores(sources: list[Source], func: Any, args: Any, kwargs: Any) -> Any:
    """A question about gradients by the scores, of the stand-ins: their nodes are those in the loss's graph."""
    lasting = func is not torch.autograd.grad
    before = [source.by_scores for source in sources]
    for source in sources:
        source.by_scores = True
    try:
        with without_subclass_torch_function():
            return func(*args, **kwargs)
    finally:
        for source, was in zip(sources, before, strict=True):
            source.by_scores = was or lasting


def _negative_log_likelihood(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    """torch's `nll_loss`, where what it gets is a log-softmax; None where it must see it."""
    if not isinstance(input, LazyScores) or not input.place.is_normalised:
        return None
    return _loss(input, target, weight, size_average, ignore_index, reduce, reduction)


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor | None:
    input = args[0] if args else kwargs.get("input")
    return None if isinstance(input, LazyScores) and input.place.is_normalised else _loss(*args, **kwargs)


def _loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Cross-entropy by chunks; None where it must see the scores. Names and defaults are those of torch's."""
    if not isinstance(input, LazyScores) or not is_plain(target):
        return None
    place = input.place
    source = place.source
    features = place.features.movedim(place.axis, -1) if place.axis else place.features
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    indices = target.dtype == torch.int64 and target.shape == features.shape[:-1] and features.numel() > 0
    at_home = target.device == features.device and input.grad_fn is place.node
    ready = input.dtype in (source.dtype, torch.float32) and input.dtype != torch.float16
    unseen = not source.is_formed and not source.is_kept
    if not (plain and indices and at_home and ready and unseen and place.axis == min(1, features.dim() - 1)):
        return None
    source.check()
    how: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    kind = features.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(kind) and input.dtype != torch.float64 else input.dtype
    weights, bias = place.weight, place.bias
    if not torch.is_grad_enabled():  # the kernel looks at what its arguments require, not at the mode
        features, weights, bias = features.detach(), weights.detach(), _detached(bias)
    try:
        with source.precision():
            loss = linear_cross_entropy(features, weights, target, bias, **how)
    except (UsageError, IndexError, RuntimeError):
        return None  # a mistake of the script's is explained by torch, on the scores
    source.watcher.fused(source)
    if loss.requires_grad:
        source.is_fused = True
        rows = features.reshape(-1, features.shape[-1])
        loss = _Twice.apply(loss, input, target, how, rows, place.weight, place.bias)
    return loss.to(dtype)


def _detached(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach()


_T = torch.Tensor
_GRADIENTS = {_T.retain_grad, _T.register_hook, grad_slot.__get__}
"""Questions about the gradient by the scores, which the script may ask once the loss has been formed. So is
torch.autograd.grad, which names itself by what stands in its place at that moment: the watch, or the script."""
_LOSSES = {functional.cross_entropy: _cross_entropy, functional.nll_loss: _negative_log_likelihood}
_ABOUT = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")),
    *(getattr(_T, name).__get__ for name in ("is_leaf", "grad_fn", "is_sparse", "is_meta", "itemsize", "nbytes")),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__, _T.element_size),
    *(_T.is_floating_point, _T.is_complex, _T.get_device, torch.is_floating_point, torch.is_complex),
    *(torch.numel,),
}
"""Questions that the stand-in answers by itself."""


def _formed_in(values: Any, by: str) -> Any:
    return tree_map_only(LazyScores, lambda one: one.place.form(one, by), values)
