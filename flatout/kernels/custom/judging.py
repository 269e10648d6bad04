"""How far a result may be from the reference.

The expected value is the reference's in float64, on the same inputs. In the inputs' own dtype the reference is off by
rounding; a kernel that rounds elsewhere, or sums in another order, may be off by a few times as much. Errors are taken
as a share of the expected value, but at least of the median one, and of a thousandth of the largest: where values
cancel to nearly nothing, their own size says nothing about rounding.

The reference may be exact by luck where every other order of operations is not, as in the gradient of a softmax for
equal incoming gradients, which is 0. So it is also asked how much the expected value changes when each input changes by
one rounding: no kernel can be expected to be nearer than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 4.0
"""Times the largest error of the reference in the same dtype, or the change by one rounding of the inputs."""
LEAST_SCALE = 1e-3
"""Of the largest expected value."""
FLOOR_ROUNDINGS = 4.0
"""Units of rounding that are allowed even where the reference happens to be exact."""
_WIDE = (torch.float32, torch.float64)
"""Dtypes in which sums are made; in the others only results are kept."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is allowed."""

    tolerance: Mapping[str, float]
    """By dtype, the user's own; it replaces the rest."""
    longest: int
    """The longest sum that may have been made: rounding errors of a sum grow with the root of its length."""

    def allowed(self, dtype: torch.dtype, own_error: float) -> float:
        """The largest error, as a share of the expected value."""
        name = str(dtype).removeprefix("torch.")
        if name in self.tolerance:
            return self.tolerance[name]
        grown = math.sqrt(max(16, self.longest)) if dtype in _WIDE else 1.0
        return max(FACTOR * own_error, FLOOR_ROUNDINGS * torch.finfo(dtype).eps * grown)


def difference(found: Tensor, truth: Tensor, own: Tensor, nudged: Tensor, rule: Rule) -> str | None:
    """What is wrong with `found`; None: it is as near as it has to be.

    truth: the reference in float64; nudged: the same for inputs that are one rounding off; own: in the call's dtype.
    All have the same shape, and `found` and `own` the same dtype.
    """
    if not found.is_floating_point():
        wrong = (found != own) & (found != truth.to(found.dtype))
        return _exact(found, own, wrong) if bool(wrong.any()) else None
    if not found.numel():
        return None
    right = (found == own) | (found.isnan() & own.isnan()) | (found.double() == truth)
    right |= truth.isnan() & ~own.isnan()  # the reference itself gives either, as for infinite inputs of a norm
    ordinary = truth.isfinite() & own.isfinite()
    misplaced = ~right & ~(truth.isfinite() & found.isfinite())
    if bool(misplaced.any()):
        return _misplaced(found, truth, misplaced)
    scale = _scale(truth, ordinary)
    own_error = torch.where(ordinary, torch.maximum((own.double() - truth).abs(), _change(nudged, truth)) / scale, 0.0)
    error = torch.where(right, 0.0, (found.double() - truth).abs() / scale)  # own may overflow where found does not
    allowed = rule.allowed(found.dtype, float(own_error.max()))
    count = int((error > allowed).sum())
    return _too_far(found, truth, error, allowed, count) if count else None


def _change(nudged: Tensor, truth: Tensor) -> Tensor:
    return torch.where(nudged.isfinite(), (nudged.double() - truth).abs(), 0.0)


def _scale(truth: Tensor, ordinary: Tensor) -> Tensor:
    sizes = truth[ordinary].abs()
    least = max(float(sizes.median()), LEAST_SCALE * float(sizes.max())) if len(sizes) else 0.0
    return truth.abs().clamp(min=least or 1.0)


def _exact(found: Tensor, own: Tensor, wrong: Tensor) -> str:
    at = _first(wrong)
    return f"{_place(at)} is {found[at].item()}, expected {own[at].item()}; {_share(int(wrong.sum()), wrong)}"


def _misplaced(found: Tensor, truth: Tensor, misplaced: Tensor) -> str:
    at = _first(misplaced)
    values = f"{_place(at)} is {found[at].item():.6g}, expected {truth[at].item():.6g}"
    return f"{values}; {_share(int(misplaced.sum()), misplaced)}"


def _too_far(found: Tensor, truth: Tensor, error: Tensor, allowed: float, count: int) -> str:
    worst = int(error.argmax())
    at = tuple(int(one) for one in torch.unravel_index(torch.tensor(worst), error.shape))
    values = f"{_place(at)} is {found[at].item():.6g}, expected {truth[at].item():.6g}"
    return f"{values} (error {error[at].item():.2g}, allowed {allowed:.2g}); {_share(count, error)}"


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _place(at: tuple[int, ...]) -> str:
    return f"element {list(at)}" if at else "the result"


def _share(count: int, of: Tensor) -> str:
    return f"{count} of {of.numel()} elements wrong"
