"""The parts put together: steps, progress, evaluation, checkpoints, resume. Read it; it is short, and yours to replace.

    measured = lambda: evaluate(model, test, loss_fn.measure)
    fit(step, train, epochs=10, evaluation=measured, checkpoints="runs/digits")

Started again after a crash, a kill, SIGTERM or Ctrl-C it goes on at the next sample, and ends with the weights of an
undisturbed run.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from flatout.arguments import as_function, as_instance, as_path, as_whole_number, described, wrong
from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.data.batches import Batches, Stream
from flatout.errors import NumericsError, UsageError
from flatout.train.interruption import BrokenOff, Stop, stop_on_signals
from flatout.train.progress import Progress
from flatout.train.ranks import SharedStop
from flatout.train.step import TrainStep

Evaluation = Callable[[], Mapping[str, float]]
_END = object()


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
    """Steps left out because a gradient was not finite (fp16, or the plan's nonfinite = 'skip')."""
    nonfinite_losses: int = 0
    """Steps of this TrainStep whose loss was inf or NaN, where the plan does not leave them out."""
    resumed_at_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Run:
    """What `fit` holds between its steps."""

    step: TrainStep
    source: Batches | Stream
    checkpoints: Checkpoints | None
    metric: str
    objects: Mapping[str, Any]
    evaluations: list[Mapping[str, float]] = field(default_factory=list)
    loss_sum: Any = None
    loss_steps: int = 0

    def resume(self) -> int | None:
        """Go on from the newest whole checkpoint; the step that it was taken at."""
        loaded = self.checkpoints.load() if self.checkpoints is not None else None
        if loaded is None:
            return None
        state = loaded.state
        if "step" not in state:  # saved by the first version of `fit`
            state = {**state, "step": state.get("extra", {}).get("step", {})}
        restore(state, self.step, self.source, **self.objects)
        return self.step.steps

    def save(self, metric: float | None = None) -> None:
        """Raises NumericsError for weights that are not finite; where no loss was finite, nothing is saved."""
        learnt = self.step.check_finite()
        if self.checkpoints is None or not learnt:
            return
        state = capture(self.step, self.source, **self.objects)
        self.checkpoints.save(state, step=self.step.steps, metric=metric)

    def batches(self, stop: Stop) -> Iterator[Any]:
        """The rest of the epoch. Asked to stop while it waits for data, it saves what stands and leaves."""
        batches = iter(self.source)
        while True:
            place = self.source.state_dict()
            try:
                batch = stop.waiting(lambda: next(batches, _END))
            except BrokenOff:
                self.source.load_state_dict(place)  # whatever was handed out since was not trained on
                self.leave(stop)
            if batch is _END:
                return
            yield batch

    def evaluate(self, evaluation: Evaluation | None) -> Mapping[str, float]:
        if evaluation is None:
            return {}
        returned = evaluation()
        if not isinstance(returned, Mapping):
            raise UsageError(
                f"evaluation returned {described(returned)}",
                limit="it returns a dict of figures",
                remedy="for example lambda: flatout.evaluate(model, test, loss_fn.measure)",
            )
        figures = {name: float(value) for name, value in returned.items()}
        self.evaluations.append(figures)
        return figures

    def end_epoch(self, figures: Mapping[str, float], *, evaluated: bool) -> None:
        """Save, ranked by the metric. UsageError where the evaluation has no such figure; what was learnt is saved."""
        self.save(figures.get(self.metric))
        if evaluated and self.checkpoints is not None and self.metric not in figures:
            self.checkpoints.wait()
            raise UsageError(
                f"metric is {self.metric!r}",
                limit=f"the evaluation gives {', '.join(map(repr, figures)) or 'no figure'}",
                remedy="name one of these; the epoch is saved without a metric, and the run goes on from there",
            )

    def leave(self, stop: Stop, *, saved: bool = False) -> NoReturn:
        """Save, unless that has just been done, and end as the signal wants it."""
        try:
            if not saved:
                self.save()
        except NumericsError as error:
            warnings.warn(f"nothing was saved: {error}", stacklevel=3)
        if self.checkpoints is not None:
            self.checkpoints.wait()
        stop.leave(self.step.steps)

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
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    save_every_steps: int | None = None,
    objects: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> FitResult:
    """Train for `epochs` epochs, or until the step has taken `steps` steps, whichever comes first.

    `evaluation` runs after each epoch; its figure `metric` ranks the checkpoints. With `checkpoints` (or a folder)
    the run goes on from the newest whole one, and saves after each epoch, every `save_every_steps` steps, and when it
    is asked to stop: the step, all that it trains, the place in the data, random numbers, and `objects`, further ones
    with state_dict() by name, such as {"ema": averaged}. `progress` shows a bar; by default on a terminal. Of several
    ranks each calls it, with the same arguments; asked to stop, they stop after the same step.

    SIGTERM and Ctrl-C end the step or the evaluation under way, or the wait for data; then all is saved, and fit raises
    SystemExit(143) for SIGTERM, KeyboardInterrupt for Ctrl-C. A second Ctrl-C ends it at once, with nothing saved.

    Weights that are inf or NaN end it with NumericsError before they are saved: looked at after each epoch and before
    each save. UsageError: an argument of the wrong kind, a stream that runs dry, a metric that the evaluation does not
    give. Otherwise whatever the step or the evaluation raise.
    """
    run = _checked(step, source, evaluation, metric, checkpoints, objects)
    _check_length(epochs, steps, save_every_steps)
    resumed_at = run.resume()
    first, began, stopping = step.steps, time.perf_counter(), SharedStop(step.model)
    _check_passes(source, epochs, steps)
    with (
        stop_on_signals(breaks_off=stopping.alone) as stop,
        Progress(_total(source, epochs, steps), first, shown=progress) as bar,
    ):
        while source.epoch < (epochs or math.inf) and step.steps < (steps or math.inf):
            _train_epoch(run, bar, stop, stopping, steps, save_every_steps)
            figures = run.evaluate(evaluation)
            if figures:
                bar.say(f"epoch {source.epoch}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            run.end_epoch(figures, evaluated=evaluation is not None)
            if stopping.alone and stop.requested:
                run.leave(stop, saved=True)
    step.finish()
    if run.checkpoints is not None:
        run.checkpoints.wait()
    return FitResult(
        steps=step.steps - first,
        epochs=source.epoch,
        seconds=time.perf_counter() - began,
        loss=run.mean_loss(),
        evaluations=tuple(run.evaluations),
        skipped=step.skipped,
        nonfinite_losses=step.nonfinite_losses,
        resumed_at_step=resumed_at,
    )


def _train_epoch(
    run: _Run, bar: Progress, stop: Stop, stopping: SharedStop, steps: int | None, save_every_steps: int | None
) -> None:
    """The rest of the epoch that is under way, or until the last of `steps`."""
    step = run.step
    run.loss_sum, run.loss_steps = None, 0
    for batch in run.batches(stop):
        bar.step_begins()
        loss = step(batch)
        run.count(loss)
        bar.step_ended(loss, run.source.batch_size)
        if stopping(stop.requested):
            run.leave(stop)
        if step.steps >= (steps or math.inf):
            break
        if save_every_steps is not None and step.steps % save_every_steps == 0:
            run.save()


def _checked(step: Any, source: Any, evaluation: Any, metric: Any, checkpoints: Any, objects: Any) -> _Run:
    remedy = "make one: flatout.TrainStep(model, optimizer, loss_fn)"
    as_instance(step, "step", TrainStep, limit="it is a flatout.TrainStep", remedy=remedy)
    limit, remedy = "it is what flatout.batches gives", "pass flatout.batches(data, 64); a DataLoader is such data too"
    as_instance(source, "source", (Batches, Stream), limit=limit, remedy=remedy)
    if evaluation is not None:
        limit = "it is called as evaluation() and returns a dict of figures"
        as_function(evaluation, "evaluation", 0, limit=limit, remedy="lambda: flatout.evaluate(model, test, measure)")
    as_instance(metric, "metric", str, limit="it is the name of a figure of the evaluation")
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        folder = as_path(checkpoints, "checkpoints")
        if metric != "loss":
            raise UsageError(
                f"checkpoints is a folder, and metric is {metric!r}",
                limit="whether a high or a low one is best has to be said",
                remedy=f"pass flatout.Checkpoints({str(folder)!r}, best='max')",
            )
        checkpoints = Checkpoints(folder)
    if not isinstance(objects, Mapping | None) or not all(isinstance(name, str) for name in objects or ()):
        raise wrong("objects", objects, "it maps names to objects with state_dict()", 'for example {"ema": averaged}')
    return _Run(step, source, checkpoints, metric, objects or {})


def _check_length(epochs: Any, steps: Any, save_every_steps: Any) -> None:
    if epochs is None and steps is None:
        raise UsageError("neither epochs nor steps is given", limit="a run has an end", remedy="pass epochs=10")
    for name, value in (("epochs", epochs), ("steps", steps), ("save_every_steps", save_every_steps)):
        if value is not None:
            as_whole_number(value, name)


def _check_passes(source: Batches | Stream, epochs: int | None, steps: int | None) -> None:
    """An iterator can be read once: said before the first epoch rather than after it."""
    if isinstance(source, Stream) and source.once and steps is None and (epochs or 1) > source.epoch + 1:
        raise UsageError(
            f"epochs is {epochs}, and the data is an iterator",
            limit="it can be read once",
            remedy="pass epochs=1, or an object whose __iter__ begins anew each time",
        )


def _total(source: Batches | Stream, epochs: int | None, steps: int | None) -> int | None:
    """Steps of the whole run, as far as it is known."""
    by_epochs = epochs * len(source) if epochs is not None and isinstance(source, Batches) else None
    known = [total for total in (by_epochs, steps) if total is not None]
    return min(known) if known else None
