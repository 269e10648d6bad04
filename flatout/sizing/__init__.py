"""What size a training should have: speed and memory against the batch size, measured.

>>> from flatout.sizing import batch_curve
>>> batch_curve.__name__
'batch_curve'
"""

from __future__ import annotations

from flatout.sizing.curve import BatchCurve, BatchPoint, FailedSize
from flatout.sizing.step_curve import batch_curve

__all__ = ["BatchCurve", "BatchPoint", "FailedSize", "batch_curve"]
