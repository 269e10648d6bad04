"""Token ids as users write them: Python's integers, numpy's, and whole-number tensors of one value."""

from __future__ import annotations

import operator
from typing import SupportsIndex


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
