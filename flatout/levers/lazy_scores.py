"""Lazy scores: what a last linear layer would return, computed only if it is used.

A `LazyScores` is a torch.Tensor with a shape, a dtype, a node in the graph and no memory. Operations that only
rearrange (`view`, `transpose`, `scores[:, :-1]`, `float`) return another one, and so does a log-softmax over the
classes; cross-entropy (or `nll_loss` after log-softmax) uses the layer's input and weights and never forms the scores.
Every other operation computes them, once, as the layer would have done, and continues with plain tensors.

    scores = lazy_linear(hidden, weight, bias, key, watcher)           # [..., classes], nothing computed
    functional.cross_entropy(scores.view(-1, classes), targets)        # in chunks
    scores.argmax(-1)                                                  # computes them

For code below Python (an autograd.Function of the script, an extension) it is a tensor like any other: it has a node of
its own in the autograd graph, through which gradients with respect to the scores reach the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from flatout.buffers import version_of
from flatout.errors import ScriptError, UsageError
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
from flatout.levers.score_moves import MOVING, Arguments, DoesMore, Keywords, Operation, log_softmax, shape_alone
from flatout.memory.fake_run import is_fake
from flatout.torch_private.dispatch import (
    keeps_graph,
    tree_leaves,
    tree_map_only,
    without_subclass_torch_function,
)
from flatout.torch_private.tensors import grad_slot, is_view, storage_identity, unsafe_view, wrapper_without_memory

if TYPE_CHECKING:
    from flatout.levers.chunked_loss import Layers, WideLayer

LINEAR = functional.linear
"""torch's own, even if it is replaced later."""

Step = tuple[Operation, Arguments, Keywords, bool]
"""(an operation, its other arguments, was gradient mode on?)"""
T = TypeVar("T")


class Source:
    """One deferred call of a linear layer: its arguments, and how its scores were used."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, key: WideLayer, watcher: Layers) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.key, self.watcher = key, watcher
        kind = hidden.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.in_training = torch.is_grad_enabled()
        self.is_formed = self.is_fused = self.is_kept = False
        self.by_scores = False
        """Was the gradient with respect to the scores requested? Then they are formed in the backward pass."""
        self._state = self._fingerprint()
        self._trained = self._requires_grad()

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.hidden.dtype

    def keep(self) -> None:
        """The weights are about to change: use a copy of them from now on. Where they have changed already, that is an
        error only if the scores are used."""
        if self.is_formed or self.is_kept or self._fingerprint() != self._state:
            return
        self.is_kept = True
        self.weight = self.weight.detach().clone()
        self.bias = None if self.bias is None else self.bias.detach().clone()
        self._state = self._fingerprint()

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as it was when the layer was called, and linear layers not deferred."""
        before, self.watcher.busy = self.watcher.busy, True
        try:
            with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            self.watcher.busy = before

    def form(self, by: str) -> Tensor:
        """What the layer would have returned, for the operation `by`; without a graph."""
        self.check()
        if not self.is_formed:
            self.is_formed = True
            self.watcher.formed(self, by)
        with torch.no_grad(), self.precision():
            rows = LINEAR(self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias)
            # Not a view for autograd: a view that a Function returns could not be modified in place.
            shaped: Tensor = unsafe_view(rows, (*self.hidden.shape[:-1], self.classes))
        return shaped

    def check(self) -> None:
        """Raises ScriptError if the layer's arguments have changed: the scores would be different ones."""
        if self._fingerprint() != self._state:
            raise ScriptError(
                "a layer's scores were used after its weights had been changed in place",
                limit="the chunked loss computes scores only when they are used",
                remedy='use them before, or remove `loss = "chunked"` from the plan',
            )

    def trains_the_same(self) -> bool:
        """Do the layer's arguments have gradients as when it was called? A fused loss would use those of now."""
        return self._requires_grad() == self._trained

    def _requires_grad(self) -> list[bool]:
        return [one is not None and one.requires_grad for one in (self.hidden, self.weight, self.bias)]

    def _fingerprint(self) -> tuple[tuple[int, int], ...]:
        tensors = [one for one in (self.hidden, self.weight, self.bias) if one is not None]
        return tuple((version_of(one), storage_identity(one.untyped_storage())) for one in tensors)


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Is it one of torch's own tensors, with memory or without (in a forecast)?"""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_fake(tensor)


class LazyScores(torch.Tensor):
    """See the module. `place`: how it was derived from its layer's call."""

    place: Place

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],  # one of torch's functions, whatever it returns
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in ABOUT:
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
        result = func(*_formed_in(args, name), **_formed_in(kwargs, name))
        if args and isinstance(args[0], LazyScores) and args[0].place.has_changed():
            args[0].place.follow(args[0])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """An operation from below Python, after autograd."""
        if func is torch.ops.aten.copy_.default and isinstance(args[0], LazyScores) and args[0].place.is_following:
            return args[0]
        values = tree_map_only(LazyScores, lambda one: one.place.plain(str(func)), (args, kwargs or {}))
        return func(*values[0], **values[1])


class Place:
    """How a LazyScores was derived from its source: the operations in between, also applied to the layer's input."""

    def __init__(
        self,
        source: Source,
        features: Tensor,
        axis: int,
        like: Tensor,
        base: LazyScores | None,
        steps: tuple[Step, ...],
    ) -> None:
        self.source, self.features, self.axis, self.like = source, features, axis, like
        """features: like the scores, with the layer's input features in place of the classes, along `axis`."""
        self.base, self.steps = base, steps
        self.weight, self.bias = source.weight, source.bias
        self.classes = source.classes
        self.in_training = source.in_training
        """Do they have a gradient? torch's views do even where they are made without one."""
        self.formed: Tensor | None = None
        self._formed_version = 0
        self.is_following = False
        self.node: torch.autograd.graph.Node | None = None
        self.is_normalised = False
        """Are they the log-softmax over the classes?"""

    def tensor(self, before: LazyScores | None = None) -> LazyScores:
        """The LazyScores itself; `before`: the one that the last step was applied to."""
        made = _scores(self.features, self.weight, self.bias, self.like) if before is None else _moved(before, self)
        made.place = self
        self.node = made.grad_fn
        return made

    def moved(self, own: LazyScores, func: Operation, args: Arguments, kwargs: Keywords) -> LazyScores | None:
        """The scores after an operation that only rearranges; None where it does more."""
        if self.source.is_formed or own.grad_fn is not self.node:
            return None
        try:
            like, features, axis = MOVING[func](self, func, args, kwargs)
        except (DoesMore, RuntimeError, IndexError, TypeError, NotImplementedError):
            return None  # if it is a mistake, the scores themselves will raise
        if func is torch.Tensor.__getitem__:  # the script may change an index before the scores are computed
            args = tree_map_only(Tensor, torch.clone, args)
        step = (func, args, kwargs, torch.is_grad_enabled())
        base = own if self.base is None else self.base
        found = Place(self.source, features, axis, like, base, (*self.steps, step))
        if func is torch.Tensor.detach:
            found.weight, found.bias = self.weight.detach(), _detached(self.bias)
        else:
            found.weight, found.bias = self.weight, self.bias
        found.classes = self.classes
        if like.shape[axis] < self.classes:  # the first of them
            found.classes = like.shape[axis]
        found.is_normalised = self.is_normalised or MOVING[func] is log_softmax
        is_view = like.dtype == self.like.dtype and MOVING[func] is not log_softmax
        found.in_training = self.in_training and (is_view or torch.is_grad_enabled())
        return found.tensor(own)

    def form(self, own: LazyScores, by: str) -> Tensor:
        """The scores as a plain tensor in autograd's graph, the same one each time."""
        if self.formed is None:
            with torch.inference_mode(False):  # whatever asks first: a loss may follow
                if self.base is None or own.grad_fn is not self.node:
                    with torch.enable_grad():  # in-place operations gave it another history: that one counts
                        self.formed = _form(own, self, by)
                else:
                    self.formed = self._replay(self.base.place.form(self.base, by))
            self._formed_version = self.formed._version
        return self.formed

    def has_changed(self) -> bool:
        """Were the scores changed in place since they were formed, or since `follow`?"""
        return self.formed is not None and self.formed._version != self._formed_version

    def follow(self, own: LazyScores) -> None:
        """Take over the history of the scores, which were changed in place: code below Python finds it there."""
        assert self.formed is not None
        self._formed_version, self.is_following = self.formed._version, True
        try:
            with torch.inference_mode(False), torch.enable_grad(), without_subclass_torch_function():
                own.copy_(self.formed)  # copies nothing
        finally:
            self.is_following = False

    def plain(self, by: str) -> Tensor:
        """The scores, detached."""
        with torch.no_grad():
            return self._replay(self.source.form(by), graph=False) if self.formed is None else self.formed.detach()

    def _replay(self, scores: Tensor, *, graph: bool = True) -> Tensor:
        for func, args, kwargs, with_graph in self.steps:
            with torch.set_grad_enabled(graph and with_graph):
                scores = func(scores, *args, **kwargs)
        return scores


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, key: WideLayer, watcher: Layers) -> LazyScores:
    """hidden: [..., features], weight: [classes, features], bias: [classes] or None -> [..., classes]."""
    source = Source(hidden, weight, bias, key, watcher)
    like = shape_alone((*hidden.shape[:-1], source.classes), source.dtype)
    return Place(source, hidden, hidden.dim() - 1, like, None, ()).tensor()


class NodeContext(Protocol):
    """torch.autograd.function.FunctionCtx"""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _ScoresContext(NodeContext, Protocol):
    saved_tensors: tuple[Tensor, Tensor]
    dtype: torch.dtype
    biased: bool


class _Scores(torch.autograd.Function):
    """The scores' node: gradients from code below Python go through it to the layer."""

    @staticmethod
    def forward(context: _ScoresContext, features: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
        context.set_materialize_grads(False)
        context.save_for_backward(features, weight)
        context.dtype, context.biased = like.dtype, bias is not None
        return _without_memory(like, features.device)

    @staticmethod
    def backward(context: _ScoresContext, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        features, weight = context.saved_tensors
        by_score = gradient.to(context.dtype)
        of_features = (by_score @ weight.to(context.dtype)).to(features.dtype)
        rows = by_score.reshape(-1, by_score.shape[-1])
        inputs = features.reshape(-1, features.shape[-1])
        of_weight = (rows.t() @ inputs.to(context.dtype)).to(weight.dtype)
        return of_features, of_weight, rows.sum(0).to(weight.dtype) if context.biased else None, None


_scores: Callable[[Tensor, Tensor, Tensor | None, Tensor], LazyScores] = _Scores.apply


class _MovedContext(NodeContext, Protocol):
    before: Place | None
    """None: a backward pass has freed it. A loss holds its graph, and would hold the scores beyond the update, so that
    the weights would be copied for them."""
    step: Step


class _Moved(torch.autograd.Function):
    """From one LazyScores to the next: the last step of `place`, which only the gradient has to go through."""

    @staticmethod
    def forward(context: _MovedContext, before: LazyScores, place: Place) -> Tensor:
        context.set_materialize_grads(False)
        context.before, context.step = before.place, place.steps[-1]
        return _without_memory(place.like, place.features.device)

    @staticmethod
    def backward(context: _MovedContext, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        before, (func, args, kwargs, _) = context.before, context.step
        if not keeps_graph():
            context.before = None
        if gradient is None:
            return None, None
        if before is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: set retain_graph=True the first time"
            )
        if MOVING[func] is log_softmax:
            values = before.plain("log_softmax")
        else:  # the gradient does not depend on the values
            values = torch.empty((), dtype=before.like.dtype, device=gradient.device).expand(before.like.shape)
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            moved = func(values, *args, **kwargs)
        (found,) = torch.autograd.grad(moved, values, gradient, create_graph=torch.is_grad_enabled())
        return found, None


_moved: Callable[[LazyScores, Place], LazyScores] = _Moved.apply


def _without_memory(like: Tensor, device: torch.device) -> Tensor:
    made: Tensor = wrapper_without_memory(LazyScores, like.shape, dtype=like.dtype, device=device)
    return made


class _Form(torch.autograd.Function):
    """From a LazyScores to the scores themselves."""

    @staticmethod
    def forward(context: object, lazy: Tensor, place: Place, by: str) -> Tensor:
        scores = place.plain(by)
        return scores.clone() if is_view(scores) else scores

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None


_form: Callable[[LazyScores, Place, str], Tensor] = _Form.apply


class _How(TypedDict):
    """Arguments of cross-entropy."""

    ignore_index: int
    label_smoothing: float
    reduction: Literal["mean", "sum"]


class _TwiceContext(NodeContext, Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
    scores: LazyScores | None
    how: _How


class _Twice(torch.autograd.Function):
    """After the chunked loss: gradients that it does not compute.

    A gradient that is to be differentiated itself is computed the plain way, with all scores. So is the gradient with
    respect to the scores, where it was requested; from there it reaches the layer.
    """

    @staticmethod
    def forward(
        context: _TwiceContext,
        loss: Tensor,
        scores: LazyScores,
        targets: Tensor,
        how: _How,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        context.save_for_backward(targets, rows, weight, bias)
        # Not saved with them: a hook of saved tensors (activation offload, `save_on_cpu`) would get them computed.
        context.scores, context.how = scores, how
        return loss.clone()

    @staticmethod
    def backward(context: _TwiceContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        targets, rows, weight, bias = context.saved_tensors  # raises in a second pass, if the first freed them
        scores = context.scores
        assert scores is not None
        if not keeps_graph():
            context.scores = None
        layer = (rows, weight, bias)
        twice = torch.is_grad_enabled()
        if scores.place.source.by_scores:
            return None, _by_score(scores, targets, context.how, gradient, twice), *[None] * (2 + len(layer))
        if not twice:
            return gradient, *[None] * (3 + len(layer))
        with scores.place.source.precision():
            plain = LINEAR(rows, weight, bias)
            loss = functional.cross_entropy(plain[:, : scores.place.classes], targets.reshape(-1), **context.how)
            # Not by autograd down to the layer: where an embedding shares the weight, its rows lead there once more.
            (by_score,) = torch.autograd.grad(loss, plain, gradient.to(loss.dtype), create_graph=True)
            parts = by_score @ weight, by_score.t() @ rows, by_score.sum(0)
        typed = [
            part.to(one.dtype) if one is not None and one.requires_grad else None
            for part, one in zip(parts, layer, strict=True)
        ]
        return None, None, None, None, *typed


_twice: Callable[[Tensor, LazyScores, Tensor, _How, Tensor, Tensor, Tensor | None], Tensor] = _Twice.apply


def _by_score(scores: LazyScores, targets: Tensor, how: _How, gradient: Tensor, twice: bool) -> Tensor:
    """The gradient of the cross-entropy with respect to the scores, in the form that it took."""
    with torch.enable_grad():
        values = scores.place.form(scores, "a gradient") if twice else scores.place.plain("a gradient")
        values = values if twice else values.requires_grad_()
        if scores.place.is_normalised:
            loss = functional.nll_loss(values, targets, ignore_index=how["ignore_index"], reduction=how["reduction"])
        else:
            loss = functional.cross_entropy(values, targets, **how)
    (found,) = torch.autograd.grad(loss, values, gradient.to(loss.dtype), create_graph=twice)
    return found


def _fused_in(args: Arguments, kwargs: Keywords) -> list[Source]:
    """The sources of scores among the arguments, if a loss used all of them without forming them."""
    leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, LazyScores)]
    fused = [one.place.source for one in leaves if one.place.source.is_fused and one.grad_fn is one.place.node]
    return fused if len(fused) == len(leaves) else []


def _by_scores(sources: list[Source], func: Callable[..., T], args: Arguments, kwargs: Keywords) -> T:
    """A request for gradients with respect to LazyScores, whose nodes are those in the loss's graph."""
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
    input: object,
    target: object,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
) -> Tensor | None:
    """torch's `nll_loss` of a lazy log-softmax; None where it has to be computed."""
    if not isinstance(input, LazyScores) or not input.place.is_normalised:
        return None
    return _loss(input, target, weight, size_average, ignore_index, reduce, reduction)


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor | None:  # as _loss takes them
    input = args[0] if args else kwargs.get("input")
    return None if isinstance(input, LazyScores) and input.place.is_normalised else _loss(*args, **kwargs)


def _loss(
    input: object,
    target: object,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Cross-entropy in chunks; None where it needs the scores. Names and defaults are torch's."""
    if not isinstance(input, LazyScores) or not is_plain(target):
        return None
    place = input.place
    source = place.source
    features = place.features.movedim(place.axis, -1) if place.axis else place.features
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    indices = target.dtype == torch.int64 and target.shape == features.shape[:-1] and features.numel() > 0
    at_home = target.device == features.device and input.grad_fn is place.node
    ready = input.dtype in (source.dtype, torch.float32) and input.dtype != torch.float16
    unseen = not source.is_formed and not source.is_kept and source.trains_the_same()
    if not (plain and indices and at_home and ready and unseen and place.axis == min(1, features.dim() - 1)):
        return None
    source.check()
    how: _How = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": "mean" if reduction == "mean" else "sum",
    }
    kind = features.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(kind) and input.dtype != torch.float64 else input.dtype
    weights, bias = place.weight, place.bias
    if not (torch.is_grad_enabled() and place.in_training):  # the kernel checks requires_grad of its arguments alone
        features, weights, bias = features.detach(), weights.detach(), _detached(bias)
    try:
        with source.precision():
            loss = linear_cross_entropy(features, weights, target, bias, classes=place.classes, **how)
    except (UsageError, IndexError, RuntimeError):
        return None  # a mistake of the script: torch explains it, on the scores
    source.watcher.fused(source)
    if loss.requires_grad:
        source.is_fused = True
        rows = features.reshape(-1, features.shape[-1])
        loss = _twice(loss, input, target, how, rows, place.weight, place.bias)
    return loss.to(dtype)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


_T = torch.Tensor
_GRADIENTS = {_T.retain_grad, _T.register_hook, grad_slot.__get__}
"""Requests for the gradient with respect to the scores, which the script may make once the loss exists. So is
torch.autograd.grad, which is looked up when needed, as Flatout or the script may have replaced it."""
_LOSSES: dict[object, Callable[..., Tensor | None]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: _negative_log_likelihood,
}
ABOUT = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")),
    *(getattr(_T, name).__get__ for name in ("is_leaf", "grad_fn", "is_sparse", "is_meta", "itemsize", "nbytes")),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__, _T.element_size),
    *(_T.is_floating_point, _T.is_complex, _T.get_device, torch.is_floating_point, torch.is_complex),
    *(torch.numel,),
}
"""What is asked of a tensor without its values: LazyScores have it without computing anything."""


def _formed_in(values: T, by: str) -> T:
    formed: T = tree_map_only(LazyScores, lambda one: one.place.form(one, by), values)
    return formed
