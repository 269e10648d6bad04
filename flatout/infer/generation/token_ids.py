"""Numbers as users write them: Python's, numpy's, and tensors of one value."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np
from torch import Tensor


def whole_number(value: object) -> int | None:
    """The integer that `value` is, bool included; None for anything else.

    >>> whole_number(7), whole_number(7.0)
    (7, None)
    """
    if isinstance(value, int):
        return operator.index(value)
    if not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of floating-point numbers, or of several
        return None


def plain_number(value: object) -> object:
    """Python's own number for one of numpy's or a tensor without dimensions; anything else as it is.

    >>> plain_number(np.int64(7)), plain_number("7")
    (7, '7')
    """
    if isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0):
        found: object = value.item()
        return found
    return value
