"""Samples a second and peak memory of an unmodified script against its batch size.

    curve = script_batch_curve(CurveRequest(target=Target.from_command(["train.py"])))

The script runs as a trial that changes none of its files, and the batch size of the torch DataLoader that feeds it is
changed between two steps. A script that forms its batches itself cannot be varied from outside, and is refused. One
that ends is started again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from flatout.errors import FlatoutError, ScriptError
from flatout.levers.lever import Choice
from flatout.levers.observed import LoaderSeen, Observed
from flatout.machine.detect import available_memory_bytes
from flatout.script.entry import Target
from flatout.script.loader_batches import BatchSize, LiveBatches
from flatout.script.trial.answers import TrialEnded, TrialHangs, explain_end, no_step_within
from flatout.script.trial.fork_server import ForkServer
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup
from flatout.script.work_folder import work_folder
from flatout.sizing.curve import SHARE, BatchCurve
from flatout.sizing.measuring import Prepared, Range, SizeFails, TooLarge, measure_curve
from flatout.sizing.target import SHARE_OF_HOST_MEMORY
from flatout.statistics import median
from flatout.units import format_bytes

BUDGET_SECONDS = 60.0
PATIENCE_SECONDS = 1800.0
LEAST_BATCHES_AN_EPOCH = 4
"""With fewer, ends of epochs, evaluation and short last batches are too many of the steps."""
FIRST_STEPS = 3
"""That show how many samples a step draws."""
LEVERS = "flatout.script.loader_batches:LEVERS"
NEEDED = "that is too few to time a batch size within one run of it"
REMEDY = "in code, with a step of your own: flatout.batch_curve(step, batch)"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CurveRequest:
    """Which script to vary, and for how long."""

    target: Target
    budget_seconds: float = BUDGET_SECONDS
    patience_seconds: float = PATIENCE_SECONDS
    """From a start to its first step: a script that never steps, or hangs, is ended then."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    stdin_file: Path | None = None


def script_batch_curve(request: CurveRequest, tell: Callable[[str], None] = lambda line: None) -> BatchCurve:
    """Measure it. Raises ScriptError where the batch size cannot be varied from outside, or the script fails."""
    request.target.check()
    began = time.perf_counter()
    with work_folder() as folder, ForkServer() as fork_server:
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            levers=LEVERS,
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=request.stdin_file,
            fork_server=fork_server,
        )
        with contextlib.closing(_VariedScript(setup, request.patience_seconds)) as script:
            tell(f"starting {request.target.name}")
            sizes = Range(given=script.find_given())
            curve = measure_curve(script, sizes, share=SHARE, budget_seconds=request.budget_seconds, tell=tell)
    notes = (*curve.notes, "a step includes loading its batch, as the script does it")
    return replace(curve, notes=notes, seconds=time.perf_counter() - began)


class _VariedScript:
    """A trial whose loader gives batches of any size. `Sized` for `measure_curve`."""

    device = "cpu"
    peak_source = "measured by following each tensor: the most that a step holds; the whole process takes more"

    def __init__(self, setup: TrialSetup, patience_seconds: float) -> None:
        self.limit_bytes = int(SHARE_OF_HOST_MEMORY * available_memory_bytes())
        self.subject = setup.name
        self._setup, self._patience_seconds = setup, patience_seconds
        self._trial: TrialProcess | None = None
        self._given = 0
        self._data_samples: int | None = None
        self._batches_per_step = 1
        self._peaks: dict[int, int] = {}

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def find_given(self) -> int:
        """The script's own batch size. ScriptError where it cannot be varied."""
        try:
            loader = _only_loader(self._running().describe())
            assert loader.batch_size is not None, "checked with the loader"
            self._given, self._data_samples = loader.batch_size, loader.samples
            window = self._running().window(_choices(self._given), settle=1, steps=FIRST_STEPS)
        except TrialEnded as end:
            raise explain_end(end, self._setup.name, needed=NEEDED) from end
        except TrialHangs as hang:
            raise no_step_within(hang, self._setup.name) from hang
        if window.rolled_back:
            raise ScriptError(
                "the script's batch size cannot be varied", limit=next(iter(window.rolled_back.values())), remedy=REMEDY
            )
        drawn = max((one or 0 for one in window.samples), default=0)
        self._batches_per_step = drawn // self._given
        if not drawn or drawn % self._given:
            raise ScriptError(
                f"a step draws {drawn} samples from a loader whose batches have {self._given}",
                limit="only a step that draws whole batches can be varied",
                remedy=REMEDY,
            )
        return self._given

    # Sized

    def prepare(self, batch_size: int) -> Prepared:
        self._check_data(batch_size)
        forecast = self._forecast(batch_size)
        peak = self._asked(batch_size, lambda trial, choices: trial.peak(choices).peak_bytes)
        if peak is not None:
            self._peaks[batch_size] = peak
        samples = batch_size * self._batches_per_step
        found = self._asked(batch_size, lambda trial, choices: trial.window(choices, settle=1, steps=FIRST_STEPS))
        drawn = max(one or 0 for one in found.samples)
        if drawn != samples:
            raise SizeFails(f"a step draws {drawn} samples, and {samples} were expected")
        return Prepared(samples_per_step=samples, peak_bytes=peak, forecast_bytes=forecast)

    def window(self, batch_size: int, *, settle: int, steps: int) -> float:
        """The median of the steps that drew whole batches."""
        found = self._asked(batch_size, lambda trial, choices: trial.window(choices, settle=settle, steps=steps))
        whole = batch_size * self._batches_per_step
        seconds = [took for took, drawn in zip(found.seconds, found.samples, strict=True) if drawn == whole]
        if not seconds:  # the only step of this window was an epoch's last
            return self.window(batch_size, settle=settle, steps=steps + 1)
        return median(seconds)

    # inside

    def _check_data(self, batch_size: int) -> None:
        held, most = self._data_samples, batch_size * self._batches_per_step * LEAST_BATCHES_AN_EPOCH
        if held is not None and batch_size > self._given and held < most:
            raise TooLarge(
                f"the data set has {held:,} samples, fewer than {LEAST_BATCHES_AN_EPOCH} steps of batch {batch_size}"
            )

    def _forecast(self, batch_size: int) -> int | None:
        """The line through the two largest measured peaks; in proportion where there is only one."""
        known = sorted(self._peaks.items())
        if not known or batch_size <= known[-1][0]:
            return None
        (size, peak), slope = known[-1], known[-1][1] / known[-1][0]
        if len(known) > 1:
            slope = max(0.0, (peak - known[-2][1]) / (size - known[-2][0]))
        made = round(peak + slope * (batch_size - size))
        if made > self.limit_bytes:
            raise TooLarge(
                f"batch {batch_size} would take {format_bytes(made)} by the peaks of smaller sizes, and "
                f"{format_bytes(self.limit_bytes)} are available"
            )
        return made

    def _asked(self, batch_size: int, ask: Callable[[TrialProcess, list[Choice]], T]) -> T:
        """What the running script answers; where it ends, a new one is asked once more."""
        while True:
            fresh = self._trial is None
            try:
                return ask(self._running(), _choices(batch_size))
            except TrialEnded as end:
                self.close()
                if end.status == 0 and not fresh:
                    continue
                failed = end.headline if end.status else f"the script ended after {end.steps} steps"
                raise SizeFails(failed) from explain_end(end, self._setup.name, needed=NEEDED)
            except FlatoutError as error:
                self.close()
                raise SizeFails(str(error)) from error

    def _running(self) -> TrialProcess:
        if self._trial is None:
            self._trial = self._setup.trial([Choice(LiveBatches(), True)], label="curve")
            self._trial.start_within(self._patience_seconds)
        return self._trial


def _choices(batch_size: int) -> list[Choice]:
    return [Choice(BatchSize(), batch_size)]


def _only_loader(seen: Observed) -> LoaderSeen:
    """The one that feeds training. ScriptError where its batches cannot be varied from outside."""
    obstacle = ""
    if seen.device != "cpu":
        obstacle = f"it trains on {seen.device}, where the peak of a larger batch cannot be forecast from outside"
    elif not seen.loaders:
        obstacle = "it forms its batches itself: only those of a torch DataLoader can be given another size"
    elif len(seen.loaders) > 1:
        obstacle = f"{len(seen.loaders)} loaders feed its training, and which is the batch is not known"
    elif seen.loaders[0].workers:
        obstacle = "its loader has worker processes, which fetch batches of the old size ahead"
    elif seen.loaders[0].batch_size is None:
        obstacle = "its loader has a batch sampler of its own"
    elif seen.compiled_in_script or any(module.compiled for module in seen.modules):
        obstacle = "it compiles its model, and code compiled for one size serves another less well"
    if obstacle:
        raise ScriptError("the script's batch size cannot be varied", limit=obstacle, remedy=REMEDY)
    return seen.loaders[0]
