"""Operators whose gradients cannot be differentiated again: that is an error, where torch would return zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.errors import UsageError


def differentiated_once(name: str, library: torch.library.Library) -> None:
    """Of the operator of this name, which computes the gradients of another: it raises UsageError when gradients of its
    results are requested. Without that torch warns, and returns zeros."""

    def backward(context: object, *gradients: Tensor) -> None:
        raise UsageError(
            f"flatout::{name} has no gradient",
            limit="Flatout's kernels can be differentiated once, and this is a gradient of a gradient",
            remedy="drop `kernels` and `normalization` from the plan, or compute that loss without them",
        )

    torch.library.register_autograd(f"flatout::{name}", backward, lib=library)
