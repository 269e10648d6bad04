"""A training loop from the library's parts: steps, evaluation, averages, schedules, logs, checkpoints, resume.

    fit(step, train, epochs=10, evaluation=lambda: evaluate(step, test), checkpoints="runs/digits", patience=3)

Started again after a crash, a kill, SIGTERM or Ctrl-C it resumes at the next sample, and ends with the weights, the
average, the learning rates and the log of an uninterrupted run. A loop of your own can replace it.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from flatout.arguments import as_function, as_instance, as_path, as_whole_number, wrong
from flatout.checkpoint.capturing import check_object_names
from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import Batches
from flatout.data.given_batches import GivenBatches, batches_of
from flatout.data.stream import Stream
from flatout.errors import UsageError
from flatout.parallel.whole_tensors import is_distributed
from flatout.train.fit_run import USUAL_METRIC, Evaluation, Run, Source
from flatout.train.interruption import Stop, stop_on_signals
from flatout.train.loggers import Logger, RunLoggers, check_loggers
from flatout.train.patience import Patience, Waiting, as_patience, direction
from flatout.train.progress import Progress
from flatout.train.ranks import SharedStop, gathered, is_first
from flatout.train.schedulers import check_scheduler_of, needs_metric
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel

AfterStep: TypeAlias = "Callable[[TrainStep, Tensor], object]"
AfterEpoch: TypeAlias = "Callable[[TrainStep, int, dict[str, float]], object]"
StopWhen: TypeAlias = Callable[[dict[str, float]], bool]
Ended = Literal["epochs", "steps", "patience", "stop_when"]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a call of `fit` did; steps and seconds are those of this call, so after a resume only the rest."""

    steps: int
    epochs: int
    """Complete epochs, including those before a resume."""
    seconds: float
    loss: float | None
    """Mean over the last epoch that had a step in this call, weighted by terms; None if there was none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The figures that loss_fn returned besides the loss, averaged in the same way."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    skipped: int = 0
    """Steps without an update because a gradient was not finite (fp16, or the plan's nonfinite = 'skip')."""
    nonfinite_losses: int = 0
    """Steps of this TrainStep whose loss was inf or NaN, if the plan does not skip them."""
    resumed_at_step: int | None = None
    ended: Ended = "epochs"
    """What ended the training."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def fit(
    step: TrainStep,
    data: object,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    evaluation: Evaluation | None = None,
    metric: str = "loss",
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    save_every_steps: int | None = None,
    objects: Mapping[str, object] | None = None,
    after_step: AfterStep | None = None,
    after_epoch: AfterEpoch | None = None,
    stop_when: StopWhen | None = None,
    epoch_scheduler: LRScheduler | None = None,
    ema: AveragedModel | None = None,
    patience: int | Patience | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool | None = None,
) -> FitResult:
    """Train for `epochs` epochs, or until the step has taken `steps` steps, whichever comes first.

    `data` is the result of `flatout.batches`; a DataLoader; columns such as (inputs, targets) or a data set, in
    shuffled batches of 64; or any other iterable, of batches. The last kind resumes within an epoch only if it yields
    the same batches again, through set_epoch(epoch) or the global random generators; otherwise it is a UsageError.

    After each step, in this order: the average of the weights `ema` (torch.optim.swa_utils.AveragedModel, best with
    use_buffers=True) is updated; `after_step(step, loss)` is called with the loss as a device tensor; every
    `save_every_steps` steps everything is saved. Evaluate the average with
    `evaluate(ema, test, step.metrics, plan=plan)`.

    After each epoch: `evaluation()` returns figures. Together with the training's own, train_loss and train_NAME for
    each figure besides the loss, they are the epoch's figures; one of them, `metric`, ranks the checkpoints.
    `epoch_scheduler` is stepped (ReduceLROnPlateau with the metric), `patience` counts epochs without a better metric,
    the figures are logged, then `after_epoch(step, epoch, figures)` is called, where epoch is the number of complete
    epochs, and `stop_when(figures)`, which ends the training by returning True. Everything is saved. An exception in
    one of these three functions or in a logger ends the training after everything was saved; they are not called again
    for that step or epoch. After one in the evaluation, a resumed run evaluates that epoch again. If `steps` ends the
    training within an epoch, it is evaluated, logged and saved, and the epoch stays unfinished.

    `loggers` have log(figures, step), as CSVLog, TensorBoardLog and a wandb run do: for each step batch_loss,
    batch_NAME and lr, read from the device every 32 steps, at the end of an epoch and before a save; for each epoch its
    figures and its number. An evaluation may return no figure called epoch, step, or like one of the training's own.

    With `checkpoints` (or a folder) the run resumes from the newest intact checkpoint: the step with all that it
    trains, the position in the data, random states, average, schedule, patience, logs (see `flatout.train.loggers`) and
    `objects`, further objects with state_dict() by name. `progress` shows a bar; by default on a terminal. With several
    ranks each calls it with the same arguments; figures are averaged over the ranks that have them, the first rank
    logs, of single steps its own part of the loss and figures, and when asked to stop they stop after the same step.

    On SIGTERM and Ctrl-C the current step or evaluation is finished, or the wait for data broken off; then everything
    is saved, and fit raises SystemExit(143) for SIGTERM, KeyboardInterrupt for Ctrl-C. A second Ctrl-C ends it at once,
    without saving.

    Raises NumericsError, instead of saving them, if weights are inf or NaN; they are checked after each epoch and
    before each save. Raises UsageError for an argument of the wrong kind, an exhausted stream, and a metric that is not
    among the figures. Exceptions of the step, the evaluation, the functions and the loggers pass through.
    """
    _check_functions(evaluation, after_step, after_epoch, stop_when)
    _check_length(epochs, steps, save_every_steps)
    patience = as_patience(patience)
    run = _run(step, data, metric, checkpoints, objects, epoch_scheduler, ema, patience, loggers)
    _check_metric_of_training(evaluation, metric, patience, epoch_scheduler)
    resumed_at = run.resume()
    first, began, stopping, source = step.steps, time.perf_counter(), SharedStop(step.together, step.device), run.source
    _check_source(step, source, epochs, steps)
    _prepare(run, stop_when, epochs, steps)
    with (
        run.logging(),
        stop_on_signals(breaks_off=stopping.alone) as stop,
        Progress(_total(source, epochs, steps), first, shown=progress) as bar,
    ):
        while (ended := _ended(run, epochs, steps)) is None:
            whole = _train_epoch(run, bar, stop, stopping, steps, save_every_steps, after_step)
            _end_epoch(run, bar, evaluation, after_epoch, stop_when, whole=whole)
            if stopping.alone and stop.requested:
                run.leave(stop, saved=True)
    run.finish()
    return _result(run, step.steps - first, time.perf_counter() - began, resumed_at, ended)


def _prepare(run: Run, stop_when: StopWhen | None, epochs: int | None, steps: int | None) -> None:
    """A run that `stop_when` had ended continues with another rule, or none. If it goes on, it can be saved."""
    if run.stopped:
        run.stopped = stop_when is not None and _any_rank(run.call(stop_when, dict(run.figures)), run.step)
    if _ended(run, epochs, steps) is None:
        run.check_saving()


def _end_epoch(
    run: Run,
    bar: Progress,
    evaluation: Evaluation | None,
    after_epoch: AfterEpoch | None,
    stop_when: StopWhen | None,
    *,
    whole: bool,
) -> None:
    """Evaluate, log, call the script's functions and save; the functions only after a whole epoch."""
    figures = run.end_epoch(evaluation, whole=whole)
    bar.say_figures(run.source.epoch, figures)
    if whole and after_epoch is not None:
        run.call(after_epoch, run.step, run.source.epoch, dict(figures))
    if whole and stop_when is not None:
        run.stopped = _any_rank(run.call(stop_when, dict(figures)), run.step)
    run.save_epoch(ranked=whole and (evaluation is not None or run.metric != USUAL_METRIC))
    run.check_loggers()


def _result(run: Run, steps: int, seconds: float, resumed_at: int | None, ended: Ended) -> FitResult:
    return FitResult(
        steps=steps,
        epochs=run.source.epoch,
        seconds=seconds,
        loss=run.train_figures.get("loss"),
        figures={name: value for name, value in run.train_figures.items() if name != "loss"},
        evaluations=tuple(run.evaluations),
        skipped=run.step.skipped,
        nonfinite_losses=run.step.nonfinite_losses,
        resumed_at_step=resumed_at,
        ended=ended,
    )


def _train_epoch(
    run: Run,
    bar: Progress,
    stop: Stop,
    stopping: SharedStop,
    steps: int | None,
    save_every_steps: int | None,
    after_step: AfterStep | None,
) -> bool:
    """The rest of the current epoch, or until the last of `steps`; True if the epoch is complete."""
    step, source = run.step, run.source
    run.begin_epoch()
    at = source.position
    for batch in run.batches(stop):
        bar.step_begins()
        loss = run.take(batch)
        bar.step_ended(loss, source.batch_size if isinstance(source, GivenBatches) else source.position - at)
        at = source.position
        if after_step is not None:
            run.call(after_step, step, loss)
        if stopping(stop.requested):
            run.leave(stop)
        run.check_loggers(saved=False)
        if step.steps >= (steps or math.inf) and not (isinstance(source, Batches) and source.at_end):
            return False
        if save_every_steps is not None and step.steps % save_every_steps == 0:
            run.save()
    return True


def _ended(run: Run, epochs: int | None, steps: int | None) -> Ended | None:
    if run.stopped:
        return "stop_when"
    if run.waiting is not None and run.waiting.over:
        return "patience"
    if run.source.epoch >= (epochs or math.inf):
        return "epochs"
    return "steps" if run.step.steps >= (steps or math.inf) and not _at_end(run.source) else None


def _at_end(source: Source) -> bool:
    """Were all batches of the epoch handed out?"""
    return isinstance(source, Batches) and source.position > 0 and source.at_end


def _any_rank(answer: object, step: TrainStep) -> bool:
    return any(gathered(bool(answer), step.together))


def _run(
    step: TrainStep,
    data: object,
    metric: str,
    checkpoints: Checkpoints | str | os.PathLike[str] | None,
    objects: Mapping[str, object] | None,
    epoch_scheduler: LRScheduler | None,
    ema: AveragedModel | None,
    patience: Patience | None,
    loggers: Sequence[Logger],
) -> Run:
    """The parts, checked and put together."""
    remedy = "make one: flatout.TrainStep(model, optimizer, loss_fn)"
    as_instance(step, "step", TrainStep, limit="it is a flatout.TrainStep", remedy=remedy)
    source = batches_of(data, step.plan, step.device)
    as_instance(metric, "metric", str, limit="it is the name of a figure of the evaluation")
    if epoch_scheduler is not None:
        _check_epoch_scheduler(step, epoch_scheduler)
    if ema is not None:
        _check_ema(ema, step)
    folder = (
        None if checkpoints is None or isinstance(checkpoints, Checkpoints) else as_path(checkpoints, "checkpoints")
    )
    given = checkpoints if isinstance(checkpoints, Checkpoints) else None
    needed = folder is not None or patience is not None
    best = direction(metric, given, patience, epoch_scheduler, needed=needed)
    if isinstance(source, GivenBatches) and checkpoints is not None and step.together is not None:
        raise UsageError(
            "checkpoints are given, and the data is an iterable of batches",
            limit="with several ranks the position in it cannot be found again",
            remedy="pass flatout.batches(dataset, batch_size), which shares its batches among the ranks",
        )
    return Run(
        step=step,
        source=source,
        checkpoints=Checkpoints(folder, best=best) if folder is not None else given,
        metric=metric,
        best=best,
        objects=_all_objects(objects, ema=ema, epoch_scheduler=epoch_scheduler),
        ema=ema,
        epoch_scheduler=epoch_scheduler,
        waiting=None if patience is None else Waiting(patience, best),
        loggers=RunLoggers(check_loggers(loggers) if is_first(step.together) else ()),
    )


def _all_objects(objects: Mapping[str, object] | None, **parts: object) -> dict[str, object]:
    if not isinstance(objects, Mapping | None) or not all(isinstance(name, str) for name in objects or ()):
        raise wrong(
            "objects", objects, "it maps names to objects with state_dict()", 'for example {"sampler": sampler}'
        )
    check_object_names(objects or ())
    given = {name: part for name, part in parts.items() if part is not None}
    if double := sorted(given.keys() & (objects or {}).keys()):
        raise UsageError(
            f"{double[0]} is given, and in objects too", limit="it is saved once", remedy="leave it out of objects"
        )
    return {**(objects or {}), **given}


def _check_epoch_scheduler(step: TrainStep, scheduler: LRScheduler) -> None:
    check_scheduler_of(step.optimizer, scheduler, "epoch_scheduler")
    if scheduler is step.scheduler:
        raise UsageError(
            f"the step's scheduler, a {type(scheduler).__name__}, is the epoch_scheduler too",
            limit="it would be stepped after each step, and once more after each epoch",
            remedy="give it to one of the two",
        )


def _check_ema(ema: AveragedModel, step: TrainStep) -> None:
    from torch.optim.swa_utils import AveragedModel

    remedy = "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True) of torch.optim.swa_utils"
    as_instance(ema, "ema", AveragedModel, limit="it is torch.optim.swa_utils.AveragedModel", remedy=remedy)
    in_parts = step.plan.parallel in ("fsdp", "pipeline") or any(map(is_distributed, step.model.parameters()))
    if step.together is not None and in_parts:
        raise UsageError(
            f"ema is given, and parallel is {step.plan.parallel!r}",
            limit="a rank has a part of the weights, and would average what is not there",
            remedy="train without an average, or use parallel = 'ddp' or 'zero1'",
        )
    ours, theirs = ([one.shape for one in module.parameters()] for module in (ema.module, step.model))
    if ours != theirs:
        raise UsageError("ema averages another model", limit="it is made from the model that is trained", remedy=remedy)


def _check_functions(evaluation: object, after_step: object, after_epoch: object, stop_when: object) -> None:
    def check(function: object, name: str, arguments: int, called: str, remedy: str = "") -> None:
        if function is not None:
            as_function(function, name, arguments, limit=f"it is called as {name}({called}", remedy=remedy)

    check(evaluation, "evaluation", 0, ") and returns a dict of figures", "lambda: flatout.evaluate(step, test)")
    check(after_step, "after_step", 2, "step, loss)")
    check(after_epoch, "after_epoch", 3, "step, epoch, figures)")
    check(stop_when, "stop_when", 1, "figures) and returns True to stop", "lambda figures: figures['loss'] < 0.1")


def _check_metric_of_training(
    evaluation: Evaluation | None, metric: str, patience: Patience | None, scheduler: object
) -> None:
    """Without an evaluation there are the training's own figures alone."""
    if evaluation is not None or metric.startswith("train_"):
        return
    reader = "patience" if patience is not None else "epoch_scheduler" if needs_metric(scheduler) else None
    if reader is not None or metric != USUAL_METRIC:
        named = f"metric is {metric!r}" if reader is None else f"{reader} reads {metric!r}"
        raise UsageError(
            f"{named}, and there is no evaluation",
            limit="without one the figures of an epoch are train_loss, and train_NAME for those of loss_fn",
            remedy="pass evaluation, or metric='train_loss'",
        )


def _check_length(epochs: object, steps: object, save_every_steps: object) -> None:
    if epochs is None and steps is None:
        raise UsageError("neither epochs nor steps is given", limit="a run has an end", remedy="pass epochs=10")
    for name, value in (("epochs", epochs), ("steps", steps), ("save_every_steps", save_every_steps)):
        if value is not None:
            as_whole_number(value, name)


def _check_source(step: TrainStep, source: Source, epochs: int | None, steps: int | None) -> None:
    """Refuse data that the run would use up, or that is used up; warn of ranks that each train a model of their own."""
    once = not isinstance(source, Batches) and source.once
    if once and steps is None and (epochs or 1) > source.epoch + 1:  # said now, and not after the first epoch
        raise UsageError(
            f"epochs is {epochs}, and the data is an iterator",
            limit="it can be read only once",
            remedy="pass epochs=1, or an object whose __iter__ starts over each time",
        )
    if epochs is not None and not step.steps and source.epoch >= epochs:  # it would train nothing, without an error
        raise UsageError(
            f"the data is at the end of epoch {source.epoch}, and this step has taken no step",
            limit=f"epochs is {epochs}, counted from the first of the data",
            remedy="make the data anew for each training: flatout.batches(...)",
        )
    if isinstance(source, Batches | Stream) and source.ranks > 1 and step.together is None:
        warnings.warn(  # no more than that: hooks of the script's own may average the gradients
            f"each of the {source.ranks} ranks trains a model of its own, on its share of the samples: the plan has no "
            "`parallel`, and the model is in no DistributedDataParallel; pass Plan(parallel='ddp') to TrainStep and "
            "batches, or rank=0, ranks=1 to batches where each is to have all samples",
            stacklevel=3,
        )


def _total(source: Source, epochs: int | None, steps: int | None) -> int | None:
    """Steps of the whole run, as far as it is known."""
    by_epochs = epochs * len(source) if epochs is not None and isinstance(source, Batches) else None
    known = [total for total in (by_epochs, steps) if total is not None]
    return min(known) if known else None
