"""Every public function, given a wrong kind of each main argument: an error of ours with value, limit and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import flatout
from flatout.arguments import described
from flatout.errors import FlatoutError

X, Y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
W = torch.zeros(3, 4)
MODEL = nn.Linear(4, 3)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
LOSS = flatout.supervised(nn.CrossEntropyLoss())
GPT = flatout.models.GPT2(flatout.models.GPT2Config(vocab_size=9, max_tokens=8, width=8, heads=1, layers=1))

Wrong = dict[str, Any]
MODELS: Wrong = {
    "text": "model.pt",
    "None": None,
    "class": nn.Linear,
    "weights": MODEL.state_dict(),
    "optimizer": OPTIMIZER,
    "lazy": nn.LazyLinear(3),
}
OPTIMIZERS: Wrong = {
    "None": None,
    "text": "adam",
    "class": torch.optim.SGD,
    "model": MODEL,
    "of another model": torch.optim.SGD(nn.Linear(4, 3).parameters(), 0.1),
}
LOSSES: Wrong = {
    "None": None,
    "text": "mse",
    "criterion": nn.CrossEntropyLoss(),
    "functional": nn.functional.cross_entropy,
    "class": nn.MSELoss,
    "supervised itself": flatout.supervised,
    "model": MODEL,
    "one argument": lambda batch: batch,
}
PLANS: Wrong = {
    "dict": {"precision": "bf16"},
    "text": "flatout.toml",
    "path": Path("flatout.toml"),
    "class": flatout.Plan,
    "number": 2,
}
EXAMPLES: Wrong = {"None": None, "text": "batch", "numbers": [1, 2], "differing": (X, Y[:3])}
DEVICES: Wrong = {"no such kind": "gpu", "a number": 1.5, "not here": "cuda:99"}


def step(**given: Any) -> Any:
    return flatout.TrainStep(**({"model": MODEL, "optimizer": OPTIMIZER, "loss_fn": LOSS} | given))


def on_a_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        return function(**({"step": step(), "batch": (X, Y)} | given))

    return call


def fit(**given: Any) -> Any:
    usual = {"step": step(), "data": flatout.batches((X, Y), 4), "epochs": 1}
    return flatout.fit(**(usual | given))


def evaluate(**given: Any) -> Any:
    return flatout.evaluate(**({"step_or_model": MODEL, "data": [(X, Y)], "metrics": LOSS.metrics} | given))


def fit_to_memory(**given: Any) -> Any:
    return flatout.fit_to_memory(**({"limit": 2**30, "step": step(), "batch": (X, Y)} | given))


TRAINING = {"model": MODELS, "optimizer": OPTIMIZERS, "loss_fn": LOSSES, "plan": PLANS}
SOURCES: Wrong = {"text": "data", "None": None, "number": 3, "empty": [], "differing": (X, Y[:3])}
STEPS: Wrong = {"model": MODEL, "None": None, "class": flatout.TrainStep}
ON_A_BATCH = {"step": STEPS, "batch": EXAMPLES}
LIMITS: Wrong = {"model": MODEL, "-1": -1, "0": 0, "text": "lots"}
DATA: Wrong = {
    "None": None,
    "text": "data.npz",
    "number": 3,
    "dict of lists": {"x": [1, 2]},
    "tuple of lists": ([[1.0], [2.0]], [0, 1]),
    "list beside a tensor": (X, Y.tolist()),
    "nothing": [],
    "lengths that differ": (X, Y[:3]),
}
ITERABLES: Wrong = {"None": None, "number": 5, "text": "data", "one batch": (X, Y), "one tensor": X}
SCHEDULERS: Wrong = {
    "number": 5,
    "class": torch.optim.lr_scheduler.StepLR,
    "of another optimizer": torch.optim.lr_scheduler.StepLR(OPTIMIZERS["of another model"], 1),
}

TABLE: dict[str, tuple[Callable[..., Any], dict[str, Wrong]]] = {
    "Checkpoints": (
        lambda **given: flatout.Checkpoints(**({"folder": "x"} | given)),
        {
            "folder": {"None": None, "number": 3, "empty": "", "file": __file__},
            "keep_last": {"0": 0, "text": "3"},
            "keep_best": {"-1": -1, "None": None},
            "best": {"name": "accuracy"},
        },
    ),
    "CSVLog": (
        lambda **given: flatout.CSVLog(**({"path": "log.csv"} | given)),
        {"path": {"None": None, "number": 3}, "every": {"0": 0, "text": "2"}},
    ),
    "measure": (
        lambda **given: flatout.measure(**({"function": lambda: None} | given)),
        {
            "function": {"None": None, "what it returned": 3},
            "warmup": {"-1": -1, "text": "3"},
            "min_samples": {"0": 0, "text": "10"},
            "max_seconds": {"0": 0.0, "text": "10"},
        },
    ),
    "profile": (
        lambda **given: flatout.profile(**({"function": lambda: None} | given)),
        {
            "function": {"None": None, "a script": "train.py"},
            "steps": {"0": 0, "text": "5"},
            "trace": {"number": 3, "no known ending": "trace.txt"},
        },
    ),
    "Patience": (
        lambda **given: flatout.Patience(**({"epochs": 3} | given)),
        {"epochs": {"0": 0, "None": None}, "best": {"high": "high"}, "least_gain": {"-1": -1.0, "text": "0"}},
    ),
    "Plan": (
        flatout.Plan,
        {
            "precision": {"unknown": "fp8", "class": float},
            "micro_batches": {"0": 0, "text": "4", "float": 2.0},
            "accumulate": {"old name": 4},
            "compile": {"flag": True},
        },
    ),
    "ranks": (lambda **given: flatout.ranks(**given), {"timeout_seconds": {"0": 0, "text": "5", "NaN": float("nan")}}),
    "TensorBoardLog": (
        lambda **given: flatout.TensorBoardLog(**({"folder": "logs"} | given)),
        {"folder": {"None": None, "number": 3}, "every": {"0": 0}},
    ),
    "TokenGenerator": (
        lambda **given: flatout.TokenGenerator(**({"model": GPT} | given)),
        {"model": {**MODELS, "another family": MODEL}, "plan": PLANS, "draft": {"text": "gpt2"}, "slots": {"0": 0}},
    ),
    "TrainStep": (
        step,
        {
            **TRAINING,
            "scheduler": SCHEDULERS,
            "clip_norm": {"0": 0, "text": "1"},
            "count_terms": {"number": 3, "no argument": lambda: 1},
        },
    ),
    "batch_curve": (
        on_a_batch(flatout.batch_curve),
        {
            **ON_A_BATCH,
            "at_least": {"0": 0, "float": 1.5},
            "at_most": {"0": 0, "text": "4"},
            "factor": {"1": 1.0, "text": "2"},
            "share": {"0": 0, "2": 2, "text": "most"},
            "limit": LIMITS,
            "seconds": {"0": 0, "text": "5"},
        },
    ),
    "batches": (
        lambda **given: flatout.batches(**({"data": (X, Y), "batch_size": 4} | given)),
        {
            "data": DATA,
            "batch_size": {"None": None, "0": 0, "text": "64", "plan": flatout.Plan()},
            "plan": PLANS,
            "seed": {"text": "a", "None": None},
            "collate_fn": {"number": 3, "no argument": lambda: None, "class of functions": nn.Flatten},
            "tokens": {"0": 0, "without lengths": 64},
            "length": {"number": 3, "text": "len", "of a tuple": len},
            "device": DEVICES,
            "rank": {"-1": -1, "beyond": 2},
        },
    ),
    "capture": (
        flatout.capture,
        {
            "step": {"model": MODEL, "number": 5, "class": flatout.TrainStep},
            "model": {"number": 5, "text": "m"},
            "data": {"tuple": (X, Y)},
            "plan": PLANS,
            "optimiser": {"a slip": OPTIMIZER},
            "ema": {"no state": 3},
        },
    ),
    "device": (flatout.device, {"index": {"99": 99, "text": "cuda"}}),
    "evaluate": (
        evaluate,
        {
            "step_or_model": MODELS,
            "data": {**ITERABLES, "none": []},
            "metrics": {
                "None": None,
                "supervised": LOSS,
                "criterion": nn.MSELoss(),
                "numbers": lambda model, batch: 1.0,
                "texts": lambda model, batch: {"a": "b"},
            },
            "plan": PLANS,
        },
    ),
    "export": (
        lambda **given: flatout.export(**({"model": MODEL, "example_inputs": X, "path": "x"} | given)),
        {"model": MODELS, "path": {"None": None, "number": 3}, "example_inputs": {"None": None, "text": "x"}},
    ),
    "fit": (
        fit,
        {
            "step": {"model": MODEL, "None": None, "class": flatout.TrainStep},
            "data": SOURCES,
            "epochs": {"0": 0, "float": 1.5, "none": None},
            "steps": {"text": "5"},
            "save_every_steps": {"0": 0},
            "evaluation": {"dict": {"loss": 1.0}, "an argument": lambda model: {}, "None": lambda: None},
            "metric": {"number": 3},
            "checkpoints": {"number": 3, "class": flatout.Checkpoints},
            "objects": {"list": [MODEL], "number": 3},
            "after_step": {"number": 3, "no argument": lambda: None},
            "after_epoch": {"two arguments": lambda step, epoch: None},
            "stop_when": {"no argument": lambda: True},
            "epoch_scheduler": SCHEDULERS,
            "ema": {"model": MODEL, "of another model": AveragedModel(nn.Linear(5, 3))},
            "patience": {"0": 0, "text": "5", "float": 1.5},
            "loggers": {"number": 3, "one": flatout.CSVLog("log.csv"), "class": [flatout.CSVLog]},
        },
    ),
    "fit_to_memory": (
        fit_to_memory,
        {
            **ON_A_BATCH,
            "limit": LIMITS,
            "exactness": {"unknown": "exact"},
            "batch_size": {"0": 0},
            "device": {"no such kind": "gpu", "a number": 1.5},
        },
    ),
    "forecast": (on_a_batch(flatout.forecast), {**ON_A_BATCH, "batch_size": {"0": 0, "text": "4"}}),
    "whatif": (
        on_a_batch(flatout.whatif),
        {
            **ON_A_BATCH,
            "devices": {"text": "h100", "none": [], "unknown": ["h1000"], "number": [3]},
            "plan": PLANS,
            "batch_size": {"0": 0, "text": "4"},
            "threads": {"0": 0, "without cpu": 2},
            "prices": {"0": {"h100": 0}, "text": {"h100": "1"}, "another": {"t4": 1.0}},
        },
    ),
    "generate": (
        lambda **given: flatout.generate(**({"model": GPT, "prompts": [[1, 2]]} | given)),
        {"model": MODELS, "plan": PLANS, "prompts": {"None": None, "text": "no tokenizer"}},
    ),
    "largest_batch": (
        on_a_batch(flatout.largest_batch),
        {**ON_A_BATCH, "limit": LIMITS, "at_most": {"0": 0, "text": "4"}, "multiple_of": {"0": 0, "None": None}},
    ),
    "linear_cross_entropy": (
        lambda **given: flatout.linear_cross_entropy(**({"hidden": X, "weight": W, "targets": Y} | given)),
        {
            "hidden": {"None": None, "another width": torch.zeros(8, 5)},
            "weight": {"None": None, "one row": torch.zeros(4)},
            "targets": {"None": None, "floats": X[:, 0], "too few": Y[:3], "no class": Y + 3},
            "bias": {"another size": torch.zeros(5), "number": 1.0},
            "reduction": {"none": "none"},
            "label_smoothing": {"2": 2.0, "text": "much"},
            "chunk_bytes": {"0": 0, "text": "1 MiB"},
        },
    ),
    "over_all": (flatout.over_all, {"metric": {"None": None, "text": "f1", "class": nn.MSELoss}}),
    "predict": (
        lambda **given: flatout.predict(**({"model": MODEL, "inputs": X} | given)),
        {"model": MODELS, "inputs": {"None": None, "number": 3, "text": "x"}, "plan": PLANS, "device": DEVICES},
    ),
    "restore": (
        lambda **given: flatout.restore(**({"source": flatout.capture(model=MODEL), "model": MODEL} | given)),
        {
            "source": {"None": None, "number": 3, "no folder": "nowhere", "model": MODEL},
            "step": {"model": MODEL},
            "model": {"number": 3, "another": nn.Linear(5, 3)},
            "optimizer": {"not saved": OPTIMIZER},
        },
    ),
    "supervised": (
        flatout.supervised,
        {
            "criterion": {
                "None": None,
                "text": "ce",
                "class": nn.CrossEntropyLoss,
                "not reduced": nn.MSELoss(reduction="none"),
            },
        },
    ),
    "to_device": (lambda **given: flatout.to_device(**({"nested": X} | given)), {"device": DEVICES}),
    "check": (flatout.check, {}),
    "choose_parallel": (
        lambda **given: flatout.choose_parallel(**({"training": "net.py:make", "ranks": 2} | given)),
        {
            "training": {"None": None, "step": step(), "missing": "nowhere.py:make", "no function": "net.py"},
            "ranks": {"0": 0, "1": 1, "flag": True, "text": "two", "too many": 4096},
            "plan": {**PLANS, "parallel": flatout.Plan(parallel="ddp")},
            "seconds": {"0": 0, "text": "1m"},
        },
    ),
    "run": (
        lambda **given: flatout.run(**({"script": __file__} | given)),
        {
            "script": {"None": None, "empty": "", "bytes": b"train.py", "missing": "nowhere.py"},
            "arguments": {"text": "--lr 1", "numbers": [1]},
            "plan": {**PLANS, "weights": flatout.Plan(weights="int8")},
            "without": {"text": "compile", "unknown": ["compilation"]},
            "device": {"unknown": "gpu", "missing": "cuda:99"},
            "report": {"folder": "/", "no folder": "missing/run.json", "number": 3},
        },
    ),
    "tune": (
        lambda **given: flatout.tune(**({"subject": step(), "batches": [(X, Y)]} | given)),
        {
            "subject": {"None": None, "model": MODEL, "no script": "nowhere.py"},
            "batches": {**ITERABLES, "nothing": [], "dict": {"x": X}},
            "arguments": {"of a step": ["--lr", "0.1"]},
            "fit": {"of a step": "12 GiB"},
            "devices": {"of a step": 2},
            "exactness": {"unknown": "exact", "None": None},
            "seconds": {"0": 0, "text": "1m", "flag": True},
            "steps": {"0": 0, "text": "3"},
        },
    ),
    "tune_inference": (
        lambda **given: flatout.tune_inference(**({"model": MODEL, "sample_inputs": X} | given)),
        {"model": MODELS, "sample_inputs": {"None": None, "none": []}, "plan": PLANS, "items": {"0": 0}},
    ),
}
RECORDS = {
    "BatchCurve",
    "Batches",
    "CheckResult",
    "Comparison",
    "Differences",
    "ExportReport",
    "Finding",
    "FitResult",
    "FitToMemory",
    "Generation",
    "InferenceTuning",
    "LargestBatch",
    "Machine",
    "Measurement",
    "MemoryForecast",
    "ParallelChoice",
    "Piece",
    "Prediction",
    "Predictions",
    "ProfileResult",
    "Proof",
    "Ranks",
    "RunResult",
    "Stream",
    "Trial",
    "TuneResult",
    "WhatIf",
}
"""What others return, and nobody makes."""

CASES = [
    pytest.param(function, argument, value, id=f"{name}-{argument}-{kind}")
    for name, (function, arguments) in TABLE.items()
    for argument, wrong in arguments.items()
    for kind, value in wrong.items()
]


def test_the_table_is_complete() -> None:
    public = {name for name in flatout.__all__ if not name.endswith(("Error", "__"))}
    assert public == set(TABLE) | RECORDS


@pytest.mark.parametrize(("function", "argument", "value"), CASES)
def test_a_wrong_argument_is_an_error_of_ours(
    function: Callable[..., Any], argument: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlatoutError) as caught:
        function(**{argument: value})
    assert caught.value.limit or caught.value.remedy
    assert len(str(caught.value)) < 800
    assert list(tmp_path.iterdir()) == []


def test_what_is_meant_is_named() -> None:
    def said(**given: Any) -> str:
        with pytest.raises(FlatoutError) as caught:
            step(**given)
        return str(caught.value)

    assert said(loss_fn=nn.CrossEntropyLoss()) == (
        "loss_fn is a CrossEntropyLoss; it is called as loss_fn(model, batch) and returns the mean loss; "
        "wrap it: flatout.supervised(torch.nn.CrossEntropyLoss(...))"
    )
    assert said(plan="p.toml").endswith("read it with flatout.plan.read_plan('p.toml')")
    assert "make the optimizer after that" in said(model=nn.LazyLinear(3))
    assert said(model=OPTIMIZER, optimizer=MODEL).endswith("the model comes first, then its optimizer")


def test_data_of_another_type_than_the_model_is_explained() -> None:
    source = flatout.batches((np.zeros((8, 4)), np.zeros(8, dtype=int)), 4)
    with pytest.raises(FlatoutError, match=r"batch\[0\] is float64, .*weights are float32, .*astype\('float32'\)"):
        step()(next(iter(source)))
    with pytest.raises(FlatoutError, match=r"batch\[0\] is float64"):
        evaluate(data=source)
    with pytest.raises(FlatoutError, match=r"batch\[0\] is a numpy array; .*flatout.batches"):
        step()((X.numpy(), Y.numpy()))


def test_a_wrong_value_is_shown_shortly() -> None:
    assert described("x" * 100).startswith("'xxxxx")
    assert len(described("x" * 100)) < 40
    assert described(nn.Linear) == "the class Linear"
    assert described([1]) == "a list"
    assert described(OPTIMIZER) == "a SGD"
    assert described(None) == "None"
