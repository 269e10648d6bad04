"""Operations that only rearrange scores, applied to the layer's input instead of the scores.

Each function takes the scores' description (`Place`), the operation and its other arguments, and returns the
description of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from flatout.levers.lazy_scores import Place


def shape_alone(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape and dtype that takes no memory: one value, expanded."""
    return torch.empty((), dtype=dtype).expand(tuple(shape))


class DoesMore(Exception):
    """An operation that does more than rearrange."""


Moved = tuple[Tensor, Tensor, int]
"""(shape and dtype of the scores, the features rearranged in the same way, the dimension of the classes)"""
Operation = Callable[..., Tensor]
Arguments = tuple[object, ...]
Keywords = dict[str, object]


def _reshape(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    like = func(place.like, *args, **kwargs)
    last = like.dim() - 1
    fits = place.axis == place.like.dim() - 1 and like.shape[last] == place.classes
    if not fits or like.dtype != place.like.dtype:
        raise DoesMore
    return like, place.features.reshape(*like.shape[:-1], place.features.shape[-1]), last


def _permute(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    order = func(torch.empty(tuple(range(place.like.dim())), device="meta"), *args, **kwargs).shape
    return func(place.like, *args, **kwargs), func(place.features, *args, **kwargs), list(order).index(place.axis)


def _same(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    return place.like, place.features, place.axis


def _cast(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    given = [*args, *kwargs.values()] or [torch.float32]
    if len(given) > 1 or not isinstance(given[0], torch.dtype) or not given[0].is_floating_point:
        raise DoesMore
    return shape_alone(place.like.shape, given[0]), place.features, place.axis


def log_softmax(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    dimension: Any = kwargs.get("dim", args[0] if args else None)  # whatever torch takes for one
    more = {name for name, value in kwargs.items() if value is not None} - {"dim", "_stacklevel"} or len(args) > 1
    if more or dimension is None or dimension % place.like.dim() != place.axis or place.is_normalised:
        raise DoesMore
    exact = place.features.device.type == "cuda" and torch.is_autocast_enabled("cuda")  # on a CPU in bf16 as well
    return shape_alone(place.like.shape, torch.float32 if exact else place.like.dtype), place.features, place.axis


def _detach(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    return place.like, place.features.detach(), place.axis


def _index(place: Place, func: Operation, args: Arguments, kwargs: Keywords) -> Moved:
    index: Any  # whatever torch takes for one
    (index,) = args
    if (count := first_classes(place, index)) is not None:
        return shape_alone((*place.like.shape[:-1], count), place.like.dtype), place.features, place.axis
    if place.axis != place.like.dim() - 1 or not _spares_classes(index, place.like.dim()):
        raise DoesMore
    features = place.features[index]
    shape = (*features.shape[:-1], place.classes)
    return shape_alone(shape, place.like.dtype), features, len(shape) - 1


def first_classes(place: Place, index: object) -> int | None:
    """How many classes, if an index takes the first ones and does nothing else: `scores[..., :50257]` of a padded
    layer."""
    if place.axis != place.like.dim() - 1 or place.is_normalised or not isinstance(index, tuple) or not index:
        return None
    *others, last = index
    whole = all(one is Ellipsis or (isinstance(one, slice) and one == slice(None)) for one in others)
    reaches_last = others.count(Ellipsis) == 1 or (Ellipsis not in others and len(others) == place.axis)
    if not (whole and reaches_last and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)):
        return None
    if not isinstance(last.stop, int) or isinstance(last.stop, bool) or last.stop < 1:
        return None
    return min(last.stop, place.classes)


def _spares_classes(index: object, dimensions: int) -> bool:
    """Does an index keep the whole last dimension?"""
    items = index if isinstance(index, tuple) else (index,)
    taken = 0
    for one in items:
        if isinstance(one, Tensor) and type(one) is Tensor and one.dtype in (torch.bool, torch.int64):
            taken += one.dim() if one.dtype == torch.bool else 1
        elif isinstance(one, slice) or (isinstance(one, int) and not isinstance(one, bool)):
            taken += 1
        elif one is not None and one is not Ellipsis:
            return False
    reaches_last = taken == dimensions or (any(one is Ellipsis for one in items) and items[-1] is not Ellipsis)
    last = items[-1]
    return taken < dimensions if not reaches_last else isinstance(last, slice) and last == slice(None)


_T = torch.Tensor
MOVING: dict[object, Callable[[Place, Operation, Arguments, Keywords], Moved]] = {
    **dict.fromkeys((_T.view, _T.reshape, _T.flatten, _T.unsqueeze, _T.squeeze, _T.unflatten), _reshape),
    **dict.fromkeys((torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze, torch.unflatten), _reshape),
    **dict.fromkeys((_T.transpose, _T.permute, _T.swapaxes, _T.movedim, _T.swapdims, _T.moveaxis), _permute),
    **dict.fromkeys((torch.transpose, torch.permute, torch.swapaxes, torch.movedim, torch.swapdims), _permute),
    **dict.fromkeys((_T.contiguous,), _same),
    **dict.fromkeys((_T.float, _T.to), _cast),
    **dict.fromkeys((functional.log_softmax, torch.log_softmax, _T.log_softmax), log_softmax),
    _T.detach: _detach,
    _T.__getitem__: _index,
}
