"""Flatout runs PyTorch flat out on the machine at hand, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout import errors as errors
    from flatout import kernels as kernels
    from flatout import models as models
    from flatout import plan as plan
    from flatout.application.check import CheckResult, check
    from flatout.application.choose_parallel import ParallelChoice, choose_parallel
    from flatout.application.profile import ProfileResult, measure, profile
    from flatout.application.run import RunResult, run
    from flatout.application.tune import TuneResult, tune
    from flatout.checkpoint.capturing import capture
    from flatout.checkpoint.differences import Differences
    from flatout.checkpoint.folder import Checkpoints
    from flatout.checkpoint.restoring import restore
    from flatout.data.batches import Batches, batches
    from flatout.data.nested import to_device
    from flatout.data.stream import Stream
    from flatout.diagnose.finding import Finding
    from flatout.errors import FlatoutError, UsageError
    from flatout.infer.choosing.tune_inference import tune_inference
    from flatout.infer.choosing.tuning import InferenceTuning
    from flatout.infer.exporting.export import export
    from flatout.infer.exporting.report import ExportReport
    from flatout.infer.generation.generated import Generation, Piece
    from flatout.infer.generation.token_generator import TokenGenerator, generate
    from flatout.infer.prediction.predict import Predictions, predict
    from flatout.kernels.linear_cross_entropy import linear_cross_entropy
    from flatout.machine.description import Machine
    from flatout.machine.ranks import Ranks, ranks
    from flatout.memory.forecast import MemoryForecast
    from flatout.plan import Plan
    from flatout.predicted_time.predicting import whatif
    from flatout.predicted_time.prediction import Prediction, WhatIf
    from flatout.search.trial import Trial
    from flatout.sizing.curve import BatchCurve
    from flatout.sizing.fit_to_memory import FitToMemory, fit_to_memory
    from flatout.sizing.forecasting import forecast
    from flatout.sizing.largest_batch import LargestBatch, largest_batch
    from flatout.sizing.step_curve import batch_curve
    from flatout.statistics import Comparison
    from flatout.timing import Measurement
    from flatout.train.evaluate import evaluate
    from flatout.train.fit import FitResult, fit
    from flatout.train.global_metrics import over_all
    from flatout.train.loggers import CSVLog, TensorBoardLog
    from flatout.train.loss import supervised
    from flatout.train.patience import Patience
    from flatout.train.placement import device
    from flatout.train.step import TrainStep
    from flatout.tuning.results import Proof

__version__ = "0.1.0"

__all__ = [
    "BatchCurve",
    "Batches",
    "CSVLog",
    "CheckResult",
    "Checkpoints",
    "Comparison",
    "Differences",
    "ExportReport",
    "Finding",
    "FitResult",
    "FitToMemory",
    "FlatoutError",
    "Generation",
    "InferenceTuning",
    "LargestBatch",
    "Machine",
    "Measurement",
    "MemoryForecast",
    "ParallelChoice",
    "Patience",
    "Piece",
    "Plan",
    "Prediction",
    "Predictions",
    "ProfileResult",
    "Proof",
    "Ranks",
    "RunResult",
    "Stream",
    "TensorBoardLog",
    "TokenGenerator",
    "TrainStep",
    "Trial",
    "TuneResult",
    "UsageError",
    "WhatIf",
    "__version__",
    "batch_curve",
    "batches",
    "capture",
    "check",
    "choose_parallel",
    "device",
    "evaluate",
    "export",
    "fit",
    "fit_to_memory",
    "forecast",
    "generate",
    "largest_batch",
    "linear_cross_entropy",
    "measure",
    "over_all",
    "predict",
    "profile",
    "ranks",
    "restore",
    "run",
    "supervised",
    "to_device",
    "tune",
    "tune_inference",
    "whatif",
]

_HOMES = {
    "BatchCurve": "flatout.sizing.curve",
    "Batches": "flatout.data.batches",
    "CSVLog": "flatout.train.loggers",
    "CheckResult": "flatout.application.check",
    "Checkpoints": "flatout.checkpoint.folder",
    "Comparison": "flatout.statistics",
    "Differences": "flatout.checkpoint.differences",
    "ExportReport": "flatout.infer.exporting.report",
    "Finding": "flatout.diagnose.finding",
    "FitResult": "flatout.train.fit",
    "FitToMemory": "flatout.sizing.fit_to_memory",
    "FlatoutError": "flatout.errors",
    "Generation": "flatout.infer.generation.generated",
    "InferenceTuning": "flatout.infer.choosing.tuning",
    "LargestBatch": "flatout.sizing.largest_batch",
    "Machine": "flatout.machine.description",
    "Measurement": "flatout.timing",
    "MemoryForecast": "flatout.memory.forecast",
    "ParallelChoice": "flatout.application.choose_parallel",
    "Patience": "flatout.train.patience",
    "Piece": "flatout.infer.generation.generated",
    "Plan": "flatout.plan",
    "Prediction": "flatout.predicted_time.prediction",
    "Predictions": "flatout.infer.prediction.predict",
    "ProfileResult": "flatout.application.profile",
    "Proof": "flatout.tuning.results",
    "Ranks": "flatout.machine.ranks",
    "RunResult": "flatout.application.run",
    "Stream": "flatout.data.stream",
    "TensorBoardLog": "flatout.train.loggers",
    "TokenGenerator": "flatout.infer.generation.token_generator",
    "TrainStep": "flatout.train.step",
    "Trial": "flatout.search.trial",
    "TuneResult": "flatout.application.tune",
    "UsageError": "flatout.errors",
    "WhatIf": "flatout.predicted_time.prediction",
    "batch_curve": "flatout.sizing.step_curve",
    "batches": "flatout.data.batches",
    "capture": "flatout.checkpoint.capturing",
    "check": "flatout.application.check",
    "choose_parallel": "flatout.application.choose_parallel",
    "device": "flatout.train.placement",
    "evaluate": "flatout.train.evaluate",
    "export": "flatout.infer.exporting.export",
    "fit": "flatout.train.fit",
    "fit_to_memory": "flatout.sizing.fit_to_memory",
    "forecast": "flatout.sizing.forecasting",
    "generate": "flatout.infer.generation.token_generator",
    "largest_batch": "flatout.sizing.largest_batch",
    "linear_cross_entropy": "flatout.kernels.linear_cross_entropy",
    "measure": "flatout.application.profile",
    "over_all": "flatout.train.global_metrics",
    "predict": "flatout.infer.prediction.predict",
    "profile": "flatout.application.profile",
    "ranks": "flatout.machine.ranks",
    "restore": "flatout.checkpoint.restoring",
    "run": "flatout.application.run",
    "supervised": "flatout.train.loss",
    "to_device": "flatout.data.nested",
    "tune": "flatout.application.tune",
    "tune_inference": "flatout.infer.choosing.tune_inference",
    "whatif": "flatout.predicted_time.predicting",
}


_MODULES = ("errors", "kernels", "models", "plan")
"""Modules that `import flatout` is enough for."""


if not TYPE_CHECKING:  # type checkers have the imports above, and are to report any other name

    def __getattr__(name: str) -> object:
        """Load a public name's module when the name is first used, so that `import flatout` costs nothing."""
        if name in _MODULES:
            return importlib.import_module(f"flatout.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'flatout' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
