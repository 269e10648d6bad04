"""Scores of all tokens of which each rank has some, and their cross-entropy, without gathering them.

`SplitScores` is a tensor with the shape of all scores and no memory; `local` are this rank's. Operations that only
rearrange rows or cut off the last classes return another one, and cross-entropy exchanges three numbers a row: the
largest score, the sum of exponentials, and the target's score. Every other operation gathers the scores first, once,
and continues with a plain tensor: any loss is right, and the usual one is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar  # Any: arguments of torch's functions

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from flatout.levers.lazy_scores import ABOUT, NodeContext
from flatout.memory.fake_run import is_fake
from flatout.parallel.tensor.parts import Cut, gathered
from flatout.torch_private.dispatch import tree_map_only, without_subclass_torch_function
from flatout.torch_private.tensors import wrapper_without_memory

T = TypeVar("T")
Operation = Callable[..., Any]  # Any: one of torch's, whatever it returns


def split_scores(local: Tensor, cut: Cut) -> Tensor:
    """[..., own columns] -> [..., all columns] in name; `cut`: of the weight that made them."""
    if torch.compiler.is_compiling():  # in one graph, tensors with a mind of their own would be breaks
        return gathered(local, cut)
    return _Place(local, cut, cut.shape[cut.dim], None, None).tensor()


class _Place:
    """What a SplitScores stands for."""

    def __init__(
        self, local: Tensor, cut: Cut, classes: int, base: SplitScores | None, step: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.local, self.cut, self.classes = local, cut, classes
        """classes: how many of all columns, from the first."""
        self.base, self.step = base, step
        """Where it was derived from another one: from which, and how."""
        self.formed: Tensor | None = None
        self.version = 0
        self.node: object = None
        self.is_watched = False
        """Is something told of the gradient of all scores?"""

    def tensor(self) -> SplitScores:
        made: SplitScores = _Named.apply(self.local, self)  # type: ignore[no-untyped-call]  # as torch has it
        made.place, self.node = self, made.grad_fn
        return made

    def form(self) -> Tensor:
        """The scores as a plain tensor in autograd's graph, the same one each time; a collective the first time."""
        if self.formed is None:
            with torch.set_grad_enabled(self.local.requires_grad):  # whatever it is that asks first
                if self.base is None or self.step is None:
                    self.formed = gathered(self.local, self.cut)
                else:
                    self.formed = self.step(self.base.place.form())
            self.version = self.formed._version
        return self.formed

    @property
    def untouched(self) -> bool:
        """Were these scores, and those that they come from, not changed in place, nor is their gradient asked for?"""
        own = not self.is_watched and (self.formed is None or self.formed._version == self.version)
        return own and (self.base is None or self.base.place.untouched)


class SplitScores(torch.Tensor):
    """See the module."""

    place: _Place

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with without_subclass_torch_function():
                return func(*args, **kwargs)
        own = args[0] if args else kwargs.get("input")
        if isinstance(own, SplitScores) and func in _WATCHING:
            hook = args[1] if len(args) > 1 else kwargs.get("hook")
            if func is _T.register_hook and _is_of_fsdp(hook):
                return own.place.local.register_hook(hook)
            own.place.is_watched = True
        if isinstance(own, SplitScores) and own.place.untouched and own.grad_fn is own.place.node:
            if func is F.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif func in _MOVES:
                moved = _moved(own, func, args[1:], kwargs)
                if moved is not None:
                    return moved
        args, kwargs = tree_map_only(SplitScores, lambda one: one.place.form(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """An operation from below Python, after autograd."""
        with torch.no_grad():
            plain = tree_map_only(SplitScores, lambda one: one.place.form().detach(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class _NamedContext(NodeContext, Protocol):
    bounds: tuple[int, int]
    columns: int


class _Named(torch.autograd.Function):
    """The node of a SplitScores: a gradient of all scores goes through it to this rank's."""

    @staticmethod
    def forward(ctx: _NamedContext, local: Tensor, place: _Place) -> Tensor:
        ctx.bounds, ctx.columns = place.cut.bounds, local.shape[-1]
        shape = (*local.shape[:-1], place.classes)
        made: Tensor = wrapper_without_memory(SplitScores, shape, dtype=local.dtype, device=local.device)
        return made

    @staticmethod
    def backward(ctx: _NamedContext, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient[..., ctx.bounds[0] : ctx.bounds[1]]
        return F.pad(own, (0, ctx.columns - own.shape[-1])), None


def _moved(scores: SplitScores, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitScores | None:
    """The scores with other rows or fewer classes; None where the operation does more than that."""
    place = scores.place
    classes = place.classes
    if func is torch.Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        rows, last = index[:-1], index[-1]
        if len(rows) != 1 or rows[0] is not Ellipsis or not isinstance(last, slice) or last.start not in (None, 0):
            return None
        if last.step not in (None, 1) or (last.stop is not None and not 0 < last.stop <= classes):
            return None
        kept = classes if last.stop is None else last.stop
        local = place.local
    elif func in (torch.Tensor.view, torch.Tensor.reshape, torch.reshape):
        sizes = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        if kwargs or not all(isinstance(one, int) for one in sizes) or sizes[-1:] != (classes,):
            return None
        kept, local = classes, place.local.reshape(*sizes[:-1], place.local.shape[-1])
    elif func in (torch.Tensor.flatten, torch.flatten):
        start = kwargs.get("start_dim", args[0] if args else 0)
        end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
        if end % scores.dim() == scores.dim() - 1:
            return None
        kept, local = classes, place.local.flatten(start, end)
    else:  # float, contiguous, to
        to_float = func is _T.to and len(args) == 1 and isinstance(args[0], torch.dtype) and args[0].is_floating_point
        if kwargs or (args and not to_float):
            return None
        kept, local = classes, func(place.local, *args)
    return _Place(local, place.cut, kept, scores, lambda whole: func(whole, *args, **kwargs)).tensor()


def _cross_entropy(
    input: SplitScores,
    target: object,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """torch's, of these scores; None where it needs them gathered. Names and defaults are torch's."""
    place = input.place
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return None
    if input.dim() != 2 or target.shape != input.shape[:1] or target.device != place.local.device:
        return None
    counted = target != ignore_index
    known = (target >= 0) & (target < place.classes)
    if target.device.type == "cpu" and not is_fake(target) and bool((counted & ~known).any()):
        return None  # torch raises its own error; on a GPU such a loss is NaN
    kind = place.local.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(kind) and input.dtype != torch.float64 else input.dtype
    local = place.local.to(torch.promote_types(input.dtype, torch.float32))
    first, _ = place.cut.bounds
    local = local[:, : max(0, place.classes - first)]
    losses: Tensor = _RowLoss.apply(local, target, place.cut)  # type: ignore[no-untyped-call]
    losses = torch.where(counted, torch.where(known, losses, float("nan")), 0.0)
    if reduction == "none":
        return losses.to(dtype)
    total = losses.sum()
    return (total / counted.sum() if reduction == "mean" else total).to(dtype)


class _RowLossContext(NodeContext, Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor]


class _RowLoss(torch.autograd.Function):
    """Own columns [rows, columns], targets [rows] -> the cross-entropy of each row, over all ranks' columns."""

    @staticmethod
    def forward(ctx: _RowLossContext, local: Tensor, target: Tensor, cut: Cut) -> Tensor:
        first, _ = cut.bounds
        mine = (target >= first) & (target < first + local.shape[1])
        column = torch.where(mine, target - first, 0)
        largest = local.amax(1) if local.shape[1] else local.new_full(target.shape, float("-inf"))
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=cut.across.group)
        exponentials = (local - largest[:, None]).exp()
        picked = local.gather(1, column[:, None])[:, 0] if local.shape[1] else torch.zeros_like(largest)
        sums = torch.stack((exponentials.sum(1), torch.where(mine, picked - largest, 0.0)))
        distributed.all_reduce(sums, group=cut.across.group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), column, mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: _RowLossContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares, column, mine = ctx.saved_tensors
        found = shares.clone()
        if found.shape[1]:
            found.scatter_add_(1, column[:, None], -mine.to(found.dtype)[:, None])
        return found * gradient[:, None], None, None


def _is_of_fsdp(hook: object) -> bool:
    """FSDP2's, on a model's outputs: it gathers parameters for the backward pass, and looks at no gradient."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


_T = torch.Tensor
_WATCHING = {_T.register_hook, _T.retain_grad}
_ABOUT = ABOUT | {getattr(_T, name).__get__ for name in ("_base", "is_nested")}
_MOVES = {_T.__getitem__, _T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.float, _T.contiguous, _T.to}
