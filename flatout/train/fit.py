"""The parts put together: steps, progress, evaluation, checkpoints, resume. Read it; it is short, and yours to replace.

    measured = lambda: evaluate(model, test, loss_fn.measure)
    fit(step, train, epochs=10, evaluation=measured, checkpoints=Checkpoints("run"))

Started again after a crash or a kill it goes on at the next sample, and ends with the weights of an undisturbed run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.data.batches import Batches, Stream
from flatout.errors import UsageError
from flatout.train.interruption import stop_on_sigterm
from flatout.train.progress import Progress
from flatout.train.ranks import SharedStop
from flatout.train.step import TrainStep

Evaluation = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a call of `fit` did; steps and seconds are those of this call, after a resume only the rest."""

    steps: int
    epochs: int
    """Epochs that are complete, those before a resume included."""
    seconds: float
    loss: float | None
    """Mean over the last epoch's steps of this call; None if there was none."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    skipped: int = 0
    resumed_at_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Run:
    """What `fit` holds between its steps."""

    step: TrainStep
    source: Batches | Stream
    checkpoints: Checkpoints | None
    evaluations: list[Mapping[str, float]] = field(default_factory=list)
    loss_sum: Any = None
    loss_steps: int = 0

    def resume(self) -> int | None:
        """Go on from the newest whole checkpoint; the step that it was taken at."""
        loaded = self.checkpoints.load() if self.checkpoints is not None else None
        if loaded is None:
            return None
        step = self.step
        scheduler = {} if step.scheduler is None else {"scheduler": step.scheduler}
        restore(loaded, model=step.model, optimizer=step.optimizer, data=self.source, **scheduler)
        step.load_state_dict(loaded.state["extra"]["step"])
        return step.steps

    def save(self, metric: float | None = None) -> None:
        if self.checkpoints is None:
            return
        step = self.step
        state = capture(
            model=step.model,
            optimizer=step.optimizer,
            scheduler=step.scheduler,
            data=self.source,
            plan=step.plan,
            extra={"step": step.state_dict()},
        )
        self.checkpoints.save(state, step=step.steps, metric=metric)

    def count(self, loss: Any) -> None:
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        self.loss_steps += 1

    def mean_loss(self) -> float | None:
        return float(self.loss_sum) / self.loss_steps if self.loss_steps else None


def fit(
    step: TrainStep,
    source: Batches | Stream,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    evaluation: Evaluation | None = None,
    metric: str = "loss",
    checkpoints: Checkpoints | None = None,
    save_every_steps: int | None = None,
    progress: bool | None = None,
) -> FitResult:
    """Train for `epochs` epochs, or until the step has taken `steps` steps, whichever comes first.

    `evaluation` runs after each epoch; its figure `metric` ranks the checkpoints. With `checkpoints` the run goes on
    from the newest whole one, and saves after each epoch, every `save_every_steps` steps, and on SIGTERM, after which
    it raises SystemExit(143). `progress` shows a bar; by default on a terminal. Of several ranks each calls it, with
    the same arguments; asked to stop, they stop after the same step.

    Raises UsageError where neither `epochs` nor `steps` is given, and whatever the step or the evaluation raise.
    """
    _check_length(epochs, steps)
    run = _Run(step, source, checkpoints)
    resumed_at = run.resume()
    first, began, stopping = step.steps, time.perf_counter(), SharedStop(step.model)
    with stop_on_sigterm() as stop, Progress(_total(source, epochs, steps), first, shown=progress) as bar:
        while source.epoch < (epochs or math.inf) and step.steps < (steps or math.inf):
            run.loss_sum, run.loss_steps, before = None, 0, source.epoch
            for batch in source:
                bar.step_begins()
                loss = step(batch)
                run.count(loss)
                bar.step_ended(loss, source.batch_size)
                if stopping(stop.requested):
                    _leave(run)
                if step.steps >= (steps or math.inf):
                    break
                if save_every_steps is not None and step.steps % save_every_steps == 0:
                    run.save()
            if source.epoch == before and step.steps < (steps or math.inf):
                raise UsageError("an epoch had no batch", limit="a source of batches has at least one")
            figures = dict(evaluation()) if evaluation is not None else {}
            if figures:
                run.evaluations.append(figures)
                bar.say(f"epoch {source.epoch}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            run.save(figures.get(metric))
    step.finish()
    if checkpoints is not None:
        checkpoints.wait()
    return FitResult(
        steps=step.steps - first,
        epochs=source.epoch,
        seconds=time.perf_counter() - began,
        loss=run.mean_loss(),
        evaluations=tuple(run.evaluations),
        skipped=step.skipped,
        resumed_at_step=resumed_at,
    )


def _leave(run: _Run) -> None:
    run.save()
    if run.checkpoints is not None:
        run.checkpoints.wait()
    raise SystemExit(143)  # 128 + SIGTERM, as a shell reports it


def _check_length(epochs: int | None, steps: int | None) -> None:
    if epochs is None and steps is None:
        raise UsageError("neither epochs nor steps is given", limit="a run has an end", remedy="pass epochs=10")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}", limit="it is a whole number of at least 1")


def _total(source: Batches | Stream, epochs: int | None, steps: int | None) -> int | None:
    """Steps of the whole run, as far as it is known."""
    by_epochs = epochs * len(source) if epochs is not None and isinstance(source, Batches) else None
    known = [total for total in (by_epochs, steps) if total is not None]
    return min(known) if known else None
