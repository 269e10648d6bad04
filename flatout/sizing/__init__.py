"""What size a training should have: speed and memory against the batch size, measured.

flatout.batch_curve(step, batch)        # of a TrainStep
script_batch_curve(request)             # of an unmodified script: `flatout memory --batch-curve`
"""

from __future__ import annotations

from flatout.sizing.curve import BatchCurve, BatchPoint, FailedSize
from flatout.sizing.step_curve import batch_curve

__all__ = ["BatchCurve", "BatchPoint", "FailedSize", "batch_curve"]
