"""One way to train a workload each: `make(workload)` returns `run(steps) -> seconds of each step`.

Each is written as its own documentation shows it, in fp32 with AdamW, shuffled batches of a TensorDataset through
a DataLoader; Flatout has its own batches. A step lasts from one optimizer's step to the next, so fetching counts, and
what a framework does around a step too. The first steps of each window are left out by the caller.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.train.workloads import Workload
from flatout import TrainStep, batches, supervised, tune

Run = Callable[[int], list[float]]
TUNE_SECONDS = 60.0


def _loader(workload: Workload) -> Any:
    data = TensorDataset(workload.inputs, workload.targets)
    return DataLoader(data, batch_size=workload.batch_size, shuffle=True)


def _endless(source: Any) -> Iterator[Any]:
    while True:
        yield from source


def _timed(step: Callable[[Any], None], source: Any, steps: int) -> list[float]:
    marks = [time.perf_counter()]
    for batch in itertools.islice(_endless(source), steps):
        step(batch)
        marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


def by_hand(workload: Workload, source: Any = None) -> Run:
    model = workload.model()
    optimizer = workload.optimizer(model)
    source = source or _loader(workload)

    def step(batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    return lambda steps: _timed(step, source, steps)


def by_hand_on_our_batches(workload: Workload) -> Run:
    return by_hand(workload, batches((workload.inputs, workload.targets), workload.batch_size))


def flatout(workload: Workload) -> Run:
    model = workload.model()
    step = TrainStep(model, workload.optimizer(model), supervised(workload.loss))
    source = batches((workload.inputs, workload.targets), workload.batch_size)
    return lambda steps: _timed(step, source, steps)


def flatout_tuned(workload: Workload) -> Run:
    """The plan that `flatout.tune` finds here and now."""
    model = workload.model()
    optimizer, loss_fn = workload.optimizer(model), supervised(workload.loss)
    source = batches((workload.inputs, workload.targets), workload.batch_size)
    found = tune(TrainStep(model, optimizer, loss_fn), source, seconds=TUNE_SECONDS)
    chosen = ", ".join(f"{name} = {value}" for name, value in found.plan.choices().items()) or "nothing"
    print(f"  tuned in {found.seconds:.0f} s: {chosen} ({found.plan.exactness})", flush=True)

    def run(steps: int) -> list[float]:
        step = TrainStep(model, optimizer, loss_fn, found.plan)
        try:
            return _timed(step, source, steps)
        finally:
            step.close()  # a plan may set what holds for the process, such as its threads

    return run


def _engine(workload: Workload, engine: Any, model: Any, optimizer: Any, source: Any) -> Run:
    """The loop of a library that takes over `backward` and leaves the rest to the user."""

    def step(batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        engine.backward(workload.loss(model(inputs), targets))
        optimizer.step()

    return lambda steps: _timed(step, source, steps)


def fabric(workload: Workload) -> Run:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    raw = workload.model()
    model, optimizer = engine.setup(raw, workload.optimizer(raw))
    source = engine.setup_dataloaders(_loader(workload))
    return _engine(workload, engine, model, optimizer, source)


def accelerate(workload: Workload) -> Run:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    raw = workload.model()
    model, optimizer, source = engine.prepare(raw, workload.optimizer(raw), _loader(workload))
    return _engine(workload, engine, model, optimizer, source)


def lightning(workload: Workload) -> Run:
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()
            self.marks: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return workload.loss(self.net(inputs), targets)

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return workload.optimizer(self.net)

    module, loader = Module(), _loader(workload)

    def run(steps: int) -> list[float]:
        module.marks = []
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader)
        return [b - a for a, b in itertools.pairwise(module.marks)]

    return run


def hugging_face(workload: Workload) -> Run:
    import tempfile

    import accelerate  # noqa: F401  # the Trainer needs it, and says so only when it runs
    import transformers

    transformers.logging.set_verbosity_error()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()

        def forward(self, inputs: Any, labels: Any) -> Any:
            scores = self.net(inputs)
            return {"loss": workload.loss(scores, labels), "logits": scores}

    class Marks(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    model = Model()
    samples = [{"inputs": x, "labels": y} for x, y in zip(workload.inputs, workload.targets, strict=True)]

    def run(steps: int) -> list[float]:
        marks = Marks()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=workload.batch_size,
                max_steps=steps + 1,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                learning_rate=1e-3,
            )
            trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[marks])
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        return [b - a for a, b in itertools.pairwise(marks.marks)]

    return run


CONTENDERS: dict[str, Callable[[Workload], Run]] = {
    "by hand": by_hand,
    "by hand, our batches": by_hand_on_our_batches,
    "flatout": flatout,
    "flatout, tuned": flatout_tuned,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Lightning": lightning,
    "HF Trainer": hugging_face,
}
