"""Operations that only move scores about, done to a layer's input instead, which stands for them.

Each takes where scores stand (`Stands`), the operation and its further arguments, and gives the same of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Stands(Protocol):
    """Scores that are not there."""

    like: Tensor
    """Their shape and type; no memory."""
    features: Tensor
    """As the scores, with the layer's input where the classes are."""
    axis: int
    """That of the classes."""
    is_normalised: bool
    classes: int
    """How many there are: those of the layer, or the first of them."""


def shape_alone(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape and type that takes no memory: it is one value, seen everywhere."""
    return torch.empty((), dtype=dtype).expand(shape)


class DoesMore(Exception):
    """An operation that does more than move positions."""


Moved = tuple[Tensor, Tensor, int]
"""(the scores' shape and type, the features put through the same, the classes' axis)"""


def _reshape(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    like = func(place.like, *args, **kwargs)
    last = like.dim() - 1
    fits = place.axis == place.like.dim() - 1 and like.shape[last] == place.classes
    if not fits or like.dtype != place.like.dtype:
        raise DoesMore
    return like, place.features.reshape(*like.shape[:-1], place.features.shape[-1]), last


def _permute(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    order = func(torch.empty(tuple(range(place.like.dim())), device="meta"), *args, **kwargs).shape
    return func(place.like, *args, **kwargs), func(place.features, *args, **kwargs), list(order).index(place.axis)


def _same(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    return place.like, place.features, place.axis


def _cast(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    given = [*args, *kwargs.values()] or [torch.float32]
    if len(given) > 1 or not isinstance(given[0], torch.dtype) or not given[0].is_floating_point:
        raise DoesMore
    return shape_alone(place.like.shape, given[0]), place.features, place.axis


def log_softmax(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    dimension = kwargs.get("dim", args[0] if args else None)
    more = {name for name, value in kwargs.items() if value is not None} - {"dim", "_stacklevel"} or len(args) > 1
    if more or dimension is None or dimension % place.like.dim() != place.axis or place.is_normalised:
        raise DoesMore
    exact = torch.is_autocast_enabled(place.features.device.type)
    return shape_alone(place.like.shape, torch.float32 if exact else place.like.dtype), place.features, place.axis


def _detach(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    return place.like, place.features.detach(), place.axis


def _index(place: Stands, func: Any, args: Any, kwargs: Any) -> Moved:
    (index,) = args
    if (count := first_classes(place, index)) is not None:
        return shape_alone((*place.like.shape[:-1], count), place.like.dtype), place.features, place.axis
    if place.axis != place.like.dim() - 1 or not _spares_classes(index, place.like.dim()):
        raise DoesMore
    features = place.features[index]
    shape = (*features.shape[:-1], place.classes)
    return shape_alone(shape, place.like.dtype), features, len(shape) - 1


def first_classes(place: Stands, index: Any) -> int | None:
    """How many, where an index takes the first classes and nothing else: `scores[..., :50257]` of a padded layer."""
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


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _spares_classes(index: Any, dimensions: int) -> bool:
    """Does an index leave the last dimension whole?"""
    items = _items(index)
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
MOVING: dict[Any, Callable[[Any, Any, Any, Any], Moved]] = {
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
