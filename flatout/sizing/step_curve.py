"""`batch_curve`: samples a second and peak memory of a TrainStep against the batch size.

    curve = flatout.batch_curve(step, batch)
    print(curve)
    curve.knee.batch_size, [(point.batch_size, point.samples_per_second, point.peak_bytes) for point in curve.points]

Copies of model, optimizer and loss train, on the given batch with its samples repeated or cut.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flatout.arguments import as_bytes, as_seconds, as_whole_number
from flatout.data.nested import map_tensors, repeat_batch, tensors_in
from flatout.errors import UsageError, describe_error
from flatout.generators import generators_kept, seed_generators
from flatout.levers.subject import Subject
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.memory.real_run import LimitedRun
from flatout.memory.tracking import plain_tensors
from flatout.plan import Plan
from flatout.replaced import settings_changed
from flatout.script.device_calls import device_of
from flatout.sizing.curve import SHARE, BatchCurve
from flatout.sizing.forecasting import forecast_training
from flatout.sizing.measuring import Prepared, Range, SizeFails, TooLarge, measure_curve
from flatout.sizing.target import available_bytes, find_target
from flatout.sizing.training import Training, never_split, tell_terminal
from flatout.statistics import median
from flatout.torch_private.attributes import COMPILED_CALL, ORIGINAL_MODULE
from flatout.torch_private.compiler import dynamo_settings
from flatout.train.split import release
from flatout.train.step import StepState, TrainStep
from flatout.tuning.step_tuning import SEED, copies_of
from flatout.units import format_bytes

BUDGET_SECONDS = 60.0
LEAST_FACTOR = 1.1
FIRST_STEPS = 2
"""That are tracked for their memory: an optimizer makes its state in the first ever, so the second is a usual one."""


def batch_curve(
    step: TrainStep,
    batch: object,
    *,
    at_least: int = 1,
    at_most: int | None = None,
    factor: float = 2.0,
    limit: int | str | None = None,
    share: float = SHARE,
    seconds: float = BUDGET_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> BatchCurve:
    """How fast `step` trains, and what it holds, at the size of `batch` times the powers of `factor`.

    batch: as the step takes it, tensors [samples, ...]; its samples are repeated or cut to other sizes. at_least,
    at_most: sizes not to go beyond. limit: of tensors on the CPU, of reserved memory on CUDA, a number of bytes or a
    text such as "2 GiB"; None: what is available now. A size above one that ran is forecast first, and not run where
    the forecast may pass the limit. share: the knee is the smallest size that reaches this share of the best speed.
    seconds: for all of it; one round is always finished. progress: called with a line; None: lines on a terminal's
    standard error.

    Sizes are timed in turns, and each is compared with the fastest round by round, at 95 %; where the machine is too
    noisy, the knee is None, with the reason. Model, optimizer, loss and random generators stay as they are: copies
    train. The schedule of the learning rate is left out, and so is loading the data.

    It is advice, and applied nowhere: with another batch size the model trains differently, so learning rate and number
    of steps have to be chosen again, and the result may be a worse model.

    Raises UsageError for what cannot be measured this way, MachineError where not even the smallest size fits, and
    what the step itself raises on `batch`.
    """
    sizes, limit_bytes = _checked(step, batch, at_least, at_most, factor, limit)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise UsageError(f"share is {share!r}", limit="it is above 0 and below 1", remedy="0.95 is 95 % of the best")
    as_seconds(seconds)
    began = time.perf_counter()
    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of losses that are not finite: the copies train on the same samples for long
        seed_generators(SEED)
        with contextlib.closing(_Copies(step, batch, limit_bytes)) as copies:
            curve = measure_curve(copies, sizes, share=share, budget_seconds=seconds, tell=progress or tell_terminal)
    return replace(curve, seconds=time.perf_counter() - began)


class _Copies:
    """Copies of a step's parts, which train on any number of samples. `Sized` for `measure_curve`."""

    def __init__(self, step: TrainStep, batch: object, limit_bytes: int | None) -> None:
        model, optimizer, loss_fn = copies_of(step.model, step.optimizer, step.loss_fn)
        plan = never_split(step.plan)
        batch = map_tensors(lambda tensor: tensor.detach().clone(), batch)  # a loss may change it in place
        given = Training.of(step, batch)
        self._training = given.under(plan).on_copies(model, optimizer, loss_fn, batch, given.samples)
        subject = Subject()
        subject.modules.add(model)
        self._device = device_of(subject)
        self.subject = type(step.model).__name__
        self.target = find_target(None, model)
        self.device = self.target.name
        self._is_followed = self.target.cuda or plan.compile is None
        how = "by torch's allocator" if self.target.cuda else "by following each tensor"
        self.peak_source = f"measured {how}: the most that a step of that size holds, weights and optimizer included"
        if not self._is_followed:
            self.peak_source = "forecast, not measured: what compiled code holds on a CPU cannot be followed"
        self._others_bytes = self._allocated_bytes() - self._held_bytes()
        self.limit_bytes = available_bytes(model) - self._others_bytes if limit_bytes is None else limit_bytes
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(_one_version_a_size(plan))
        self._step: TrainStep | None = None
        self._state: StepState | None = None
        self._largest_that_ran = 0

    def close(self) -> None:
        self._close_step()
        self._closing.close()

    # Sized

    def prepare(self, batch_size: int) -> Prepared:
        forecast = None
        if batch_size > self._largest_that_ran or not self._is_followed:
            forecast = self._forecast(batch_size)
        peak = self._first_steps(batch_size)
        self._largest_that_ran = max(batch_size, self._largest_that_ran)
        return Prepared(
            samples_per_step=batch_size, peak_bytes=forecast if peak is None else peak, forecast_bytes=forecast
        )

    def window(self, batch_size: int, *, settle: int, steps: int) -> float:
        with self._errors(batch_size):
            batch, step = self._batch(batch_size), self._open_step()
            for _ in range(settle):
                step(batch)
            self._device.synchronize()
            marks = [self._device.mark()]
            for _ in range(steps):
                step(batch)
                marks.append(self._device.mark())
            self._device.synchronize()
            return median([self._device.elapsed_seconds(a, b) for a, b in itertools.pairwise(marks)])

    # inside

    def _forecast(self, batch_size: int) -> int:
        """Raises TooLarge where the upper end of the forecast is above the limit."""
        self._close_step()  # its levers act on the model that the forecast copies, and the forecast applies them itself
        with self._errors(batch_size):
            made = forecast_training(self._training, self.target, batch_size)
        if made.peak_bytes * (1 + made.uncertainty) > self.limit_bytes:
            raise TooLarge(
                f"batch {batch_size} is forecast to take {format_bytes(made.peak_bytes)} ±{made.uncertainty:.0%}, and "
                f"the limit is {format_bytes(self.limit_bytes)}"
            )
        return made.peak_bytes

    def _first_steps(self, batch_size: int) -> int | None:
        """The most that they held, of this training alone; None where that cannot be followed."""
        with self._errors(batch_size):
            if not self._is_followed:
                self._take(batch_size)
                return None
            run = LimitedRun(self.target.name, self.limit_bytes + self._others_bytes)
            with run:
                run.hold(self._training.held())
                self._take(batch_size, run)
            if not self.target.cuda:
                return run.peak_bytes
            return int(torch.cuda.max_memory_allocated(self.target.name)) - self._others_bytes

    def _allocated_bytes(self) -> int:
        """On CUDA, by all of this process: the user's own model is among it. On the CPU nothing counts that."""
        return int(torch.cuda.memory_allocated(self.target.name)) if self.target.cuda else 0

    def _held_bytes(self) -> int:
        """On CUDA, by the copies."""
        held = (*self._training.held(), *(one for _, one in tensors_in(self._training.batch)))
        plain = (inner for one in held for inner in plain_tensors(one))
        return sum(one.untyped_storage().nbytes() for one in plain if one.is_cuda)

    def _take(self, batch_size: int, run: LimitedRun | None = None) -> None:
        batch, step = self._batch(batch_size), self._open_step()
        if run is not None:
            run.hold(one for _, one in tensors_in(batch))
        for _ in range(FIRST_STEPS):
            step(batch)

    def _batch(self, batch_size: int) -> object:
        return repeat_batch(self._training.batch, batch_size)

    @contextlib.contextmanager
    def _errors(self, batch_size: int) -> Iterator[None]:
        """What a size raises: out of memory, or the step's own error."""
        try:
            yield
        except TooLarge:
            raise
        except Exception as error:
            failure: Exception
            if is_out_of_memory(error):
                failure = TooLarge(f"batch {batch_size} took more than the limit of {format_bytes(self.limit_bytes)}")
            else:
                failure = SizeFails(describe_error(error))
                failure.__cause__ = error
        else:
            return
        release(self._training.model, self._training.optimizer)  # outside the handler, which holds the tensors
        raise failure

    def _open_step(self) -> TrainStep:
        if self._step is None:
            one = self._training
            self._step = one.make_step()
            if self._state is not None:
                self._step.load_state_dict(self._state)
        return self._step

    def _close_step(self) -> None:
        if self._step is not None:
            self._state = self._step.state_dict()
            self._step.close()
            self._step = None


@contextlib.contextmanager
def _one_version_a_size(plan: Plan) -> Iterator[None]:
    """Compile each size for itself, as a run of that size alone would: by default torch takes the second size as a sign
    that sizes vary, and generates slower code that serves any."""
    if plan.compile is None:
        yield
        return
    with settings_changed(dynamo_settings(), automatic_dynamic_shapes=False):
        yield


def _checked(
    step: TrainStep, batch: object, at_least: int, at_most: int | None, factor: float, limit: int | str | None
) -> tuple[Range, int | None]:
    """The sizes, and the limit. UsageError for what cannot be measured."""
    samples = Training.of(step, batch).samples
    _check_step(step)
    as_whole_number(at_least, "at_least")
    if at_least > samples:
        raise UsageError(
            f"at_least is {at_least}", limit=f"the batch given has {samples} samples", remedy="give a larger batch"
        )
    if at_most is not None and as_whole_number(at_most, "at_most") < samples:
        raise UsageError(
            f"at_most is {at_most}", limit=f"the batch given has {samples} samples", remedy="give a smaller batch"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not LEAST_FACTOR <= factor < float("inf"):
        raise UsageError(f"factor is {factor!r}", limit=f"it is at least {LEAST_FACTOR}", remedy="2 doubles each size")
    parts, reason = step.plan.micro_batches or 1, ""
    if parts > at_least:
        at_least, reason = min(parts, samples), f"the plan splits a batch into micro_batches = {parts}"
    sizes = Range(given=samples, at_least=at_least, at_most=at_most, factor=factor, least_reason=reason)
    return sizes, None if limit is None else as_bytes(limit, "limit")


def _check_step(step: TrainStep) -> None:
    if step.together is not None:
        raise UsageError(
            f"the model is trained by {step.together.size()} ranks",
            limit="each rank would measure by itself, and wait for the others in every step",
            remedy="measure in one process: a batch there is a rank's share",
        )
    device = next((one.device for one in step.model.parameters()), None)
    if device is not None and device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the model is on {str(device)!r}", limit="memory is known on the CPU and on CUDA", remedy="move it there"
        )
    ours = step.plan.compile is not None or step.plan.activation_checkpointing is not None
    compiled = not ours and any(getattr(one, COMPILED_CALL) is not None for one in step.model.modules())
    if compiled or hasattr(step.model, ORIGINAL_MODULE):
        raise UsageError(
            "the model is compiled already",
            limit="a copy of it would run uncompiled",
            remedy="give the plain model to TrainStep, with Plan(compile='default')",
        )
    if not step.model.training:
        raise UsageError("the model is in evaluation mode", limit="a step trains", remedy="call model.train() first")
