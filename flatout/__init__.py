"""Flatout runs PyTorch flat out on the machine at hand, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout import errors as errors
    from flatout import kernels as kernels
    from flatout import models as models
    from flatout import plan as plan
    from flatout.application.check import CheckResult as CheckResult
    from flatout.application.check import check as check
    from flatout.application.choose_parallel import ParallelChoice as ParallelChoice
    from flatout.application.choose_parallel import choose_parallel as choose_parallel
    from flatout.application.profile import ProfileResult as ProfileResult
    from flatout.application.profile import measure as measure
    from flatout.application.profile import profile as profile
    from flatout.application.run import RunResult as RunResult
    from flatout.application.run import run as run
    from flatout.application.tune import TuneResult as TuneResult
    from flatout.application.tune import tune as tune
    from flatout.checkpoint.capturing import capture as capture
    from flatout.checkpoint.differences import Differences as Differences
    from flatout.checkpoint.folder import Checkpoints as Checkpoints
    from flatout.checkpoint.restoring import restore as restore
    from flatout.data.batches import Batches as Batches
    from flatout.data.batches import batches as batches
    from flatout.data.nested import to_device as to_device
    from flatout.data.stream import Stream as Stream
    from flatout.diagnose.finding import Finding as Finding
    from flatout.errors import FlatoutError as FlatoutError
    from flatout.errors import UsageError as UsageError
    from flatout.infer.choosing.tune_inference import InferenceTuning as InferenceTuning
    from flatout.infer.choosing.tune_inference import tune_inference as tune_inference
    from flatout.infer.exporting.export import export as export
    from flatout.infer.exporting.report import ExportReport as ExportReport
    from flatout.infer.generation.generated import Generation as Generation
    from flatout.infer.generation.generated import Piece as Piece
    from flatout.infer.generation.token_generator import TokenGenerator as TokenGenerator
    from flatout.infer.generation.token_generator import generate as generate
    from flatout.infer.prediction.predict import Predictions as Predictions
    from flatout.infer.prediction.predict import predict as predict
    from flatout.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from flatout.machine.description import Machine as Machine
    from flatout.machine.ranks import Ranks as Ranks
    from flatout.machine.ranks import ranks as ranks
    from flatout.memory.forecast import MemoryForecast as MemoryForecast
    from flatout.plan import Plan as Plan
    from flatout.predicted_time.predicting import whatif as whatif
    from flatout.predicted_time.prediction import Prediction as Prediction
    from flatout.predicted_time.prediction import WhatIf as WhatIf
    from flatout.search.trial import Trial as Trial
    from flatout.sizing.curve import BatchCurve as BatchCurve
    from flatout.sizing.fit_to_memory import FitToMemory as FitToMemory
    from flatout.sizing.fit_to_memory import fit_to_memory as fit_to_memory
    from flatout.sizing.forecasting import forecast as forecast
    from flatout.sizing.largest_batch import LargestBatch as LargestBatch
    from flatout.sizing.largest_batch import largest_batch as largest_batch
    from flatout.sizing.step_curve import batch_curve as batch_curve
    from flatout.statistics import Comparison as Comparison
    from flatout.timing import Measurement as Measurement
    from flatout.train.evaluate import evaluate as evaluate
    from flatout.train.fit import FitResult as FitResult
    from flatout.train.fit import fit as fit
    from flatout.train.global_metrics import over_all as over_all
    from flatout.train.loggers import CSVLog as CSVLog
    from flatout.train.loggers import TensorBoardLog as TensorBoardLog
    from flatout.train.loss import supervised as supervised
    from flatout.train.patience import Patience as Patience
    from flatout.train.placement import device as device
    from flatout.train.step import TrainStep as TrainStep
    from flatout.tuning.results import Proof as Proof

__version__ = "0.1.0"

_HOMES = {
    name: f"flatout.{module}"
    for module, names in {
        "application.check": ("CheckResult", "check"),
        "application.choose_parallel": ("ParallelChoice", "choose_parallel"),
        "application.profile": ("ProfileResult", "measure", "profile"),
        "application.run": ("RunResult", "run"),
        "application.tune": ("TuneResult", "tune"),
        "checkpoint.capturing": ("capture",),
        "checkpoint.differences": ("Differences",),
        "checkpoint.folder": ("Checkpoints",),
        "checkpoint.restoring": ("restore",),
        "data.batches": ("Batches", "batches"),
        "data.nested": ("to_device",),
        "data.stream": ("Stream",),
        "diagnose.finding": ("Finding",),
        "errors": ("FlatoutError", "UsageError"),
        "infer.choosing.tune_inference": ("InferenceTuning", "tune_inference"),
        "infer.exporting.export": ("export",),
        "infer.exporting.report": ("ExportReport",),
        "infer.generation.generated": ("Generation", "Piece"),
        "infer.generation.token_generator": ("TokenGenerator", "generate"),
        "infer.prediction.predict": ("Predictions", "predict"),
        "kernels.linear_cross_entropy": ("linear_cross_entropy",),
        "machine.description": ("Machine",),
        "machine.ranks": ("Ranks", "ranks"),
        "memory.forecast": ("MemoryForecast",),
        "plan": ("Plan",),
        "predicted_time.predicting": ("whatif",),
        "predicted_time.prediction": ("Prediction", "WhatIf"),
        "search.trial": ("Trial",),
        "sizing.curve": ("BatchCurve",),
        "sizing.fit_to_memory": ("FitToMemory", "fit_to_memory"),
        "sizing.forecasting": ("forecast",),
        "sizing.largest_batch": ("LargestBatch", "largest_batch"),
        "sizing.step_curve": ("batch_curve",),
        "statistics": ("Comparison",),
        "timing": ("Measurement",),
        "train.evaluate": ("evaluate",),
        "train.fit": ("FitResult", "fit"),
        "train.global_metrics": ("over_all",),
        "train.loggers": ("CSVLog", "TensorBoardLog"),
        "train.loss": ("supervised",),
        "train.patience": ("Patience",),
        "train.placement": ("device",),
        "train.step": ("TrainStep",),
        "tuning.results": ("Proof",),
    }.items()
    for name in names
}
"""Public name -> its module."""

__all__ = sorted((*_HOMES, "__version__"))


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
