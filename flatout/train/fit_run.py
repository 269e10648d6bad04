"""The state of `fit` between its steps: resuming, recording steps and epochs, saving, and stopping."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat, TypeAlias, TypedDict, TypeVar, cast

from flatout.arguments import described
from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.checkpoint.saved import Loaded
from flatout.checkpoint.structure import split
from flatout.data.batches import Batches
from flatout.data.given_batches import GivenBatches
from flatout.data.stream import Stream
from flatout.errors import NumericsError, UsageError, describe_error
from flatout.machine.ranks import joined_ranks
from flatout.train.epoch_means import EpochMeans
from flatout.train.interruption import BrokenOff, Stop
from flatout.train.loggers import RunLoggers
from flatout.train.patience import Best, Waiting, WaitingState
from flatout.train.ranks import SameLengths, gathered, is_first, mean_figures
from flatout.train.schedulers import before_any_step, learning_rate, needs_metric
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel

Evaluation: TypeAlias = Callable[[], Mapping[str, SupportsFloat]]
Source: TypeAlias = Batches | Stream | GivenBatches
T = TypeVar("T")
USUAL_METRIC = "loss"
"""What `fit` ranks by where the caller names nothing."""
_END = object()


class RunState(TypedDict, total=False):
    """What a checkpoint holds of `fit` itself; earlier versions saved less."""

    means: dict[str, list[float]]
    waiting: WaitingState | None
    figures: dict[str, float]
    stopped: bool
    loggers: dict[str, object]
    ranked_by: tuple[str, str] | None
    """The metric, and whether its lowest or highest is best; None: no epoch had it."""


@dataclass(kw_only=True)
class Run:
    """The parts of a run, and the figures of its current epoch."""

    step: TrainStep
    source: Source
    checkpoints: Checkpoints | None
    metric: str
    best: Best
    objects: Mapping[str, Any]  # what `capture` and `restore` take by name
    """Further objects to save, including the average of the weights and the epoch scheduler."""
    ema: AveragedModel | None
    epoch_scheduler: LRScheduler | None
    waiting: Waiting | None
    loggers: RunLoggers
    evaluations: list[Mapping[str, float]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Of the last epoch."""
    train_figures: dict[str, float] = field(default_factory=dict)
    """The loss and the other figures of loss_fn, over the last epoch."""
    stopped: bool = False
    """Did `stop_when` end it?"""
    _end_of_epoch: Callable[[], None] | None = field(default=None, init=False)
    """Goes back to the place after the last batch of the epoch that has just ended; None within an epoch."""

    def __post_init__(self) -> None:
        self.means = EpochMeans(self.loggers.log)

    # from one process to the next

    def resume(self) -> int | None:
        """Resume from the newest intact checkpoint; returns the step at which it was taken."""
        loaded = self._loaded()
        if loaded is None:
            return None
        extra = loaded.state.get("extra")
        extra = extra if isinstance(extra, Mapping) else {}  # of a loop of the user's own it is anything
        state = loaded.state
        if "step" not in state:  # saved by the first version of `fit`
            state = {**state, "step": extra.get("step", {})}
        try:
            restore(state, self.step, self.source, **self.objects)
        except UsageError as error:  # its remedies are arguments of restore
            remedy = "build step, data and objects as they were when it was saved, or give another folder"
            raise UsageError(error.what, limit=error.limit, remedy=remedy) from error
        own = extra.get("fit")
        self._load_state(cast("RunState", own) if isinstance(own, Mapping) else RunState())
        return self.step.steps

    def _loaded(self) -> Loaded | None:
        """The newest intact checkpoint. UsageError, on every rank, where the ranks do not find the same one."""
        if self.checkpoints is None:
            return None
        loaded: Loaded | None = None
        failure: UsageError | None = None
        try:
            loaded = self.checkpoints.load()
        except UsageError as error:  # raised when the other ranks know
            failure = error
        here = "none" if loaded is None else loaded.checkpoint.folder.name
        here = here if failure is None else failure.what
        files = {} if loaded is None else {name: one.sha256 for name, one in loaded.checkpoint.files.items()}
        every = gathered((here, files), self.step.together)
        if failure is not None:
            raise failure
        if any(one != every[0] for one in every):
            listed = ", ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(every))
            raise UsageError(
                f"the ranks found different checkpoints ({listed})",
                limit="they resume from the same one",
                remedy="name a folder that all machines share",
            )
        return loaded

    def _load_state(self, state: RunState) -> None:
        """Restore what `_state` returned; checkpoints not made by `fit`, or by an earlier version, lack parts of it."""
        ranked_by = state.get("ranked_by")
        if ranked_by is not None and tuple(ranked_by) != (self.metric, self.best):
            raise UsageError(
                f"the metric is {self.metric!r}, of which the {_named_best(self.best)} is best",
                limit=f"the epochs of this run were ranked by {ranked_by[0]!r}, the {_named_best(ranked_by[1])} first",
                remedy="rank by the same, or train into another folder",
            )
        if "means" in state:
            self.means.load_state_dict(state["means"], first_rank=is_first(self.step.group))
        if self.waiting is not None and (waiting := state.get("waiting")) is not None:
            self.waiting.load_state_dict(waiting)
        self.figures, self.stopped = dict(state.get("figures", {})), state.get("stopped", False)
        self.loggers.load_state_dict(state.get("loggers", {}))

    def _state(self) -> RunState:
        means = self.means.state_dict(self.step.group)  # before the loggers: it logs what was not read yet
        return {
            "means": means,
            "waiting": None if self.waiting is None else self.waiting.state_dict(),
            "figures": self.figures,
            "stopped": self.stopped,
            "loggers": self.loggers.state_dict(),
            "ranked_by": (self.metric, self.best) if self.metric in self.figures else None,
        }

    def save(self, metric: float | None = None) -> None:
        """Raises NumericsError for weights that are not finite; if no loss was finite, nothing is saved."""
        learnt = self.step.check_finite()
        if self.checkpoints is None:
            return
        if not learnt:
            warnings.warn(f"step {self.step.steps} was not saved: no loss since the last save was finite", stacklevel=2)
            return
        state = capture(self.step, self.source, extra={"fit": self._state()}, **self.objects)
        self.checkpoints.save(state, step=self.step.steps, metric=metric)

    def check_saving(self) -> None:
        """What would fail at the first save fails before the training."""
        if self.checkpoints is None:
            return
        if is_first(self.step.together):
            self.checkpoints.check_writable()
        if joined_ranks() == 1:  # with several, a capture takes all of them
            split(capture(extra={"fit": self._state()}, **self.objects))

    def finish(self) -> None:
        """Wait for what the step and the last save still have to do."""
        self.step.finish()
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def leave(self, stop: Stop, *, saved: bool = False) -> NoReturn:
        """Save, unless that has just been done, and end as the signal requires."""
        self._save_at_last(saved=saved)
        stop.leave(self.step.steps)

    def _save_at_last(self, metric: float | None = None, *, saved: bool = False) -> None:
        """Save on the way out; if the weights are not finite, warn instead."""
        try:
            if not saved:
                self.save(metric)
        except NumericsError as error:
            warnings.warn(f"nothing was saved: {error}", stacklevel=3)
        self.means.flush()
        if self.checkpoints is not None:
            self.checkpoints.wait()

    # steps

    def batches(self, stop: Stop) -> Iterator[object]:
        """The rest of the epoch. If asked to stop while it waits for data, it saves and ends."""
        batches, lengths = iter(self.source), self._same_lengths()
        while True:
            go_back = self.source.here()
            try:
                batch = stop.waiting(lambda: next(batches, _END))
            except BrokenOff:
                go_back()  # batches handed out since were not trained on
                self.leave(stop)
            except UsageError:  # of data without any batch
                if lengths is not None:
                    lengths.check(ended=True)
                raise
            if lengths is not None:
                lengths.check(ended=batch is _END)
            if batch is _END:
                self._end_of_epoch = go_back
                return
            yield batch

    def _same_lengths(self) -> SameLengths | None:
        """None: this rank is alone, or the ranks share the batches of one source."""
        if self.step.together is None or not isinstance(self.source, GivenBatches):
            return None
        return SameLengths(self.step.together, self.step.device)

    def take(self, batch: object) -> Tensor:
        """One step, and everything that follows each step."""
        step = self.step
        beside = learning_rate(step.optimizer) if self.loggers else {}
        # Before the step, whose loss may take something out of the batch; with several ranks only the step knows it.
        terms = None if step.group is not None else step.weight_of_loss(batch)
        loss = step(batch)
        if terms is None:
            terms = step.weight_of_loss(batch)
        if self.ema is not None:
            self.ema.update_parameters(step.model)
        self.means.add(step.steps, loss, step.figures, terms, **beside)
        return loss

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """However the run ends, the loggers get what was not read yet, and are flushed. What one raised ends the run,
        if nothing else does."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # of a GPU that has failed nothing can be read
                self.means.flush()
            self.loggers.flush()
            for failure in self.loggers.failures.values():
                if failure is not error:
                    warnings.warn(f"a logger failed: {describe_error(failure)}", stacklevel=2)
            raise
        self.loggers.flush()
        self.check_loggers()

    def check_loggers(self, *, saved: bool = True) -> None:
        """Raise what a logger has raised, after everything was saved."""
        for failure in self.loggers.failures.values():
            if not saved:
                self._save_after_failure()
            raise failure

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call one of the user's functions; an exception in it passes through after everything was saved."""
        try:
            return function(*arguments)
        except (Exception, SystemExit):
            self._save_after_failure()
            raise

    def _save_after_failure(self) -> None:
        if self.step.together is not None:
            warnings.warn("nothing was saved: the other ranks do not know of this rank's exception", stacklevel=3)
        else:
            self._save_at_last(self.figures.get(self.metric) if self.source.position == 0 else None)

    # epochs

    def begin_epoch(self) -> None:
        self._end_of_epoch = None
        if self.source.position == 0:
            self.means.begin()
        if self.step.together is not None and isinstance(self.source, GivenBatches):
            self._check_counts(self.source.count)

    def _check_counts(self, here: int | None) -> None:
        """UsageError, on every rank, for batches of other numbers: a rank without one would never join the others."""
        counts = gathered(here, self.step.together)
        if None not in counts and len(set(counts)) > 1:
            raise UsageError(
                f"the ranks have different numbers of batches: {', '.join(map(str, counts))}",
                limit="all take part in every step",
                remedy="give each as many, or let flatout.batches(dataset, batch_size, plan) share them among ranks",
            )

    def end_epoch(self, evaluation: Evaluation | None, *, whole: bool) -> dict[str, float]:
        """Evaluate, and record the figures; schedule and patience only count whole epochs."""
        self.train_figures = self.means.means(self.step.group)
        figures = {f"train_{name}": value for name, value in self.train_figures.items()} if whole else {}
        figures |= self._evaluate(evaluation)
        self.figures = figures
        if whole and (self.waiting is not None or needs_metric(self.epoch_scheduler)) and self.metric not in figures:
            with self._before_end_of_epoch():
                self.save()
            self._refuse_metric(figures)
        if whole:
            self._next_rates(figures)
            if self.waiting is not None:
                self.waiting.note(figures[self.metric])
        if figures:
            self.loggers.log({"epoch": self.source.epoch, **figures}, self.step.steps)
        return figures

    def _evaluate(self, evaluation: Evaluation | None) -> dict[str, float]:
        if evaluation is None:
            return {}
        try:
            own = self._own_figures(evaluation())
        except (Exception, SystemExit):
            with self._before_end_of_epoch():
                self._save_after_failure()
            raise
        figures = mean_figures(own, self.step.together)
        self.evaluations.append(figures)
        return figures

    @contextlib.contextmanager
    def _before_end_of_epoch(self) -> Iterator[None]:
        """Within, the last batch of the epoch was handed out, and its end is still to come: a run that is resumed from
        there evaluates the epoch again, and steps schedule and patience, which were not stepped."""
        go_on = self.source.here()
        if self._end_of_epoch is not None:
            self._end_of_epoch()
        try:
            yield
        finally:
            go_on()

    def _own_figures(self, returned: object) -> dict[str, float]:
        """What an evaluation returned, as numbers. UsageError for anything else, and for names of fit's own figures."""
        if not isinstance(returned, Mapping):
            raise UsageError(
                f"evaluation returned {described(returned)}",
                limit="it returns a dict of figures",
                remedy="for example lambda: flatout.evaluate(step, test)",
            )
        ours = {"epoch", "step", *(f"train_{name}" for name in self.train_figures)}
        for name in returned:
            if name in ours or not isinstance(name, str):
                raise UsageError(
                    f"evaluation returned a figure named {name!r}",
                    limit="a name is a text, and none of fit's own: " + ", ".join(sorted(ours)),
                    remedy="give it another name, such as 'test_loss'",
                )
        return {name: _as_number(name, value) for name, value in returned.items()}

    def _next_rates(self, figures: Mapping[str, float]) -> None:
        scheduler = self.epoch_scheduler
        if scheduler is None:
            return
        with before_any_step():
            if needs_metric(scheduler):
                scheduler.step(figures[self.metric])
            else:
                scheduler.step()

    def save_epoch(self, *, ranked: bool) -> None:
        """Save, ranked by the metric. UsageError, after saving, if there is no such figure; where nothing is ranked,
        for a name that the caller gave."""
        self.save(self.figures.get(self.metric))
        asked = self.checkpoints is not None or self.metric != USUAL_METRIC
        if ranked and asked and self.metric not in self.figures:
            self._refuse_metric(self.figures)

    def _refuse_metric(self, figures: Mapping[str, float]) -> NoReturn:
        if self.checkpoints is not None:
            self.checkpoints.wait()
        raise UsageError(
            f"metric is {self.metric!r}",
            limit=f"the figures of an epoch are {', '.join(map(repr, figures)) or 'none'}",
            remedy="name one of these" + ("; the run resumes from what is saved" if self.checkpoints else ""),
        )


def _as_number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"evaluation returned {described(value)} as the figure {name!r}",
            limit="a figure is a single number",
            remedy="leave it out, or write it to a place of its own",
        ) from error


def _named_best(best: str) -> str:
    return "lowest" if best == "min" else "highest"
