"""`forecast`: the memory that a training step is going to need, known before it runs.

The step itself runs, as `TrainStep` would run it under the plan, but on fake tensors: every operation of forward,
backward and optimizer, with the shapes, dtypes and lifetimes that it will have, and no memory behind them. Where a
program's course hangs on its data, two short real steps at small batches are measured and extended instead.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.data.nested import batch_length, map_tensors, slice_batch, tensors_in
from flatout.environment import cuda_allocator_settings
from flatout.errors import FlatoutError, UsageError
from flatout.generators import generators_kept
from flatout.machine.published_peaks import catalogue_entry
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.forecast import MemoryForecast, Target, forecast_of
from flatout.plan import Plan
from flatout.train.loss import LossFn
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    from flatout.memory.timeline import Timeline
    from flatout.memory.tracking import Tracker

STEPS = 2
"""The first makes the optimizer's state, the second has it from the start."""
UNCERTAINTY_CPU = 0.03
UNCERTAINTY_CUDA = 0.1
UNCERTAINTY_COMPILED = 0.3
UNCERTAINTY_EXTENDED = 0.15
UNCERTAINTY_SUMS = 0.3
CONTEXT_BYTES = 600 * 1024**2
"""Taken off a catalogue entry's memory: the driver's context and torch's kernels, some hundred MiB."""

_FIXED = ("weights", "gradients", "optimizer")
"""As large in a batch of any size; where two runs differ in them, one of them left out a part of the model."""

_NOT_OF_MEMORY = (
    "compile",
    "threads",
    "flush_denormals",
    "allocator",
    "cudnn_benchmark",
    "matmul_precision",
    "attention",
    "nonfinite",
)
"""Choices that change time alone, or cannot be carried out on fake tensors, where what they hold is small."""


def forecast(
    model: Any,
    optimizer: Any,
    loss_fn: LossFn,
    example_batch: Any,
    plan: Plan | None = None,
    *,
    device: Any = None,
    batch_size: int | None = None,
) -> MemoryForecast:
    """The peak of one training step of `model` under `plan`, without running it. Nothing of yours is changed.

    model, optimizer, loss_fn, plan: as for `TrainStep`. example_batch: any batch of the right kinds and shapes; with
    `batch_size`, its tensors are taken to have that many samples instead. device: where it would run; None: where the
    model is; 'cpu', 'cuda', or a GPU of the catalogue ('rtx-4090', 'a100-80gb', 'h200'), which need not be here.

    Raises UsageError for a GPU that is not known, a batch without tensors, a model and optimizer that do not match.
    """
    began = time.perf_counter()
    plan = checked_plan(plan)
    check_training(model, optimizer, loss_fn)
    samples = samples_of(example_batch)
    check_batch_size(batch_size)
    target = find_target(device, model)
    asked = _Asked(model, optimizer, loss_fn, example_batch, plan, target, samples, batch_size or samples)
    try:
        timeline, method = asked.fake_timeline(), "fake run"
    except FlatoutError:
        raise
    except Exception as error:  # the course hangs on values, or an operation knows no fake tensors: .numpy()
        if asked.samples < 2 and not isinstance(error, asked.depends_on_data):
            raise
        found = asked.extended(error)
        return replace(found, seconds=time.perf_counter() - began)
    made = forecast_of(
        timeline,
        target,
        batch_size=asked.batch_size,
        uncertainty=asked.uncertainty,
        not_covered=asked.not_covered,
        method=method,
        device=None if asked.pretends else ("cuda" if target.cuda else None),
    )
    return replace(made, seconds=time.perf_counter() - began)


def find_target(device: Any, model: Any) -> Target:
    """The device of that name (or a torch.device), with the allocator's settings of this process's environment.

    UsageError with the nearest names where there is no such device.
    """
    target = _device_named(device, model)
    text = cuda_allocator_settings()
    return replace(target, settings=AllocatorSettings.from_text(text)) if target.cuda and text else target


def _device_named(device: Any, model: Any) -> Target:
    import torch

    if device is None:
        device = next((one.device.type for one in model.parameters()), "cpu")
    if isinstance(device, torch.device):
        device = str(device)
    names = "it is 'cpu', 'cuda', 'cuda:0' or a GPU of the catalogue, such as 'rtx-4090'"
    if not isinstance(device, str):
        raise UsageError(f"device is {device!r}", limit=names)
    if device == "cpu":
        return Target(name="cpu", cuda=False)
    kind, colon, number = device.partition(":")
    if kind == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else None
        if colon and (not number.isdecimal() or (present is not None and int(number) >= present)):
            raise UsageError(f"device is {device!r}", limit=names if present is None else f"{present} GPUs are here")
        if not torch.cuda.is_available():
            return Target(name=device, cuda=True)
        properties = torch.cuda.get_device_properties(int(number or 0))
        capability = properties.major, properties.minor
        return Target(name=device, cuda=True, capacity_bytes=properties.total_memory, compute_capability=capability)
    entry = catalogue_entry(device)
    return Target(
        name=entry.key,
        cuda=True,
        capacity_bytes=entry.memory_bytes - CONTEXT_BYTES,
        compute_capability=entry.compute_capability,
    )


def checked_plan(plan: Plan | None) -> Plan:
    """The plan, or the empty one; UsageError for anything else."""
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(
            f"plan is {plan!r}", limit="it is a flatout.Plan or None", remedy="for example Plan(precision='bf16')"
        )
    return plan or Plan()


def check_training(model: Any, optimizer: Any, loss_fn: Any) -> None:
    """UsageError where one of the three cannot be what it is given as."""
    from torch.nn.modules.loss import _Loss

    if not hasattr(model, "named_parameters") or not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"got {type(model).__name__} as the model and {type(optimizer).__name__} as the optimizer",
            limit="they are a torch.nn.Module and a torch.optim.Optimizer, in this order",
        )
    if not callable(loss_fn) or isinstance(loss_fn, _Loss):
        raise UsageError(
            f"loss_fn is {loss_fn!r}",
            limit="it is called as loss_fn(model, batch) and returns the mean loss",
            remedy="for (inputs, targets): flatout.supervised(torch.nn.CrossEntropyLoss())",
        )


def check_batch_size(batch_size: Any) -> None:
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(f"batch_size is {batch_size!r}", limit="it must be a whole number of at least 1")


def count_operations(model: Any, optimizer: Any, loss_fn: LossFn, batch: Any, plan: Plan) -> float:
    """Floating point operations of one step under the plan, recomputation included, counted in a fake run."""
    from flatout.memory.fake_run import FakeRun
    from flatout.train.flops import count_step

    world = FakeRun()
    model, optimizer, loss_fn, batch = world.twins((model, optimizer, loss_fn, batch))
    with generators_kept(), world:
        step = TrainStep(model, optimizer, loss_fn, _carried_out(plan))
        finish = count_step()
        try:
            step(batch)
        finally:
            counted = finish()
            step.close()
    return counted.flops


def _carried_out(plan: Plan) -> Plan:
    """What a fake run can do and memory depends on. fp16 runs as bf16, which is as large and asks for no value."""
    plan = plan.without(*(name for name in _NOT_OF_MEMORY if getattr(plan, name) is not None))
    return replace(plan, precision="bf16") if plan.precision == "fp16" else plan


class _Asked:
    """One question, with what answering it needs."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: LossFn,
        batch: Any,
        plan: Plan,
        target: Target,
        samples: int,
        batch_size: int,
    ) -> None:
        from flatout.memory.fake_run import DEPENDS_ON_DATA

        self.model, self.optimizer, self.loss_fn, self.batch = model, optimizer, loss_fn, batch
        self.plan, self.target, self.samples, self.batch_size = plan, target, samples, batch_size
        self.depends_on_data = DEPENDS_ON_DATA
        self.carried_out = _carried_out(plan)

    @property
    def pretends(self) -> bool:
        """Is the target another device than the one that the model is on?"""
        here = next((one.device.type for one in self.model.parameters()), "cpu")
        return self.target.cuda != (here == "cuda")

    @property
    def workspace_of(self) -> Any:
        """Rules for what kernels hold inside, where they are known: of the CPU."""
        from flatout.memory.kernel_workspaces import cpu_workspace

        return None if self.target.cuda else cpu_workspace

    @property
    def uncertainty(self) -> float:
        if self.plan.compile is not None:
            return UNCERTAINTY_COMPILED
        return UNCERTAINTY_CUDA if self.target.cuda else UNCERTAINTY_CPU

    @property
    def not_covered(self) -> list[str]:
        import torch

        found = []
        kinds = [type(one) for one in self.model.modules()]
        if self.plan.compile is not None:
            found.append("torch.compile: the forecast is of the uncompiled model, which usually keeps more")
        if self.target.cuda:
            found.append("the CUDA context (some hundred MiB) and NCCL's buffers")
            if any(issubclass(kind, torch.nn.modules.conv._ConvNd) for kind in kinds):
                found.append("cuDNN's workspaces for convolutions")
            if any(issubclass(kind, torch.nn.RNNBase) for kind in kinds):
                found.append("what cuDNN's recurrent layers keep for the backward pass")
        else:
            found.append("buffers inside kernels that Flatout has no rule for (flatout.memory.kernel_workspaces)")
        return found

    def fake_timeline(self) -> Timeline:
        from flatout.memory.fake_run import (
            FakeRun,
            ValuesForOptimizers,
            operations_as_on_cuda,
            real_gradients_guarded,
            torch_keeps_quiet,
        )
        from flatout.memory.tracking import Tracker

        world = FakeRun()
        try:
            model, optimizer, loss_fn, batch = world.twins((self.model, self.optimizer, self.loss_fn, self.batch))
        except Exception as error:
            raise UsageError(
                f"the model cannot be copied: {type(error).__name__}: {error}",
                limit="a forecast runs a twin of it",
                remedy="keep files, locks and generators out of the model and the loss function",
            ) from error
        if self.batch_size != self.samples:
            batch = map_tensors(lambda one: _resized(world, one, self.samples, self.batch_size), batch)
        if self.target.cuda:
            _default_to_foreach(optimizer)
        pretend = operations_as_on_cuda() if self.target.cuda and self.pretends else contextlib.nullcontext()
        guarded = real_gradients_guarded(list(self.model.parameters()))
        tracker = Tracker(workspace_of=self.workspace_of)
        with torch_keeps_quiet(), guarded as touched, generators_kept(), world, pretend, ValuesForOptimizers(), tracker:
            _steps(tracker, model, optimizer, loss_fn, batch, self.carried_out)
        if touched:
            raise UsageError(
                "the loss function uses a model of its own",
                limit="a forecast gives it a twin as its argument",
                remedy="write it as loss_fn(model, batch) and use that model",
            )
        return tracker.timeline()

    def extended(self, error: Exception) -> MemoryForecast:
        """Two small real runs; what they differ in grows with the batch, the rest does not."""
        from flatout.memory.timeline import extended

        if self.samples < 2:
            raise UsageError(
                f"a fake run is impossible: {_first_line(error)}",
                limit="two real steps of 1 and 2 samples would be measured, and the example batch has 1 sample",
                remedy="give an example batch of at least 2 samples",
            ) from error
        least = self.plan.accumulate or 1  # fewer samples would be split into fewer parts
        small = max(1, min(self.samples // 2, max(least, self.batch_size // 4)))
        sizes = small, 2 * small
        first, second = (self._real_timeline(size) for size in sizes)
        scale = (self.batch_size - sizes[0]) / (sizes[1] - sizes[0])
        timeline = extended(first, second, scale)
        made = self._of_real(timeline) if timeline is not None else self._extended_by_sums(first, second, scale)
        return replace(
            made,
            method=f"two real steps of {sizes[0]} and {sizes[1]} samples, extended",
            not_covered=(*made.not_covered, f"a fake run was impossible: {_first_line(error)}"),
        )

    def _real_timeline(self, size: int) -> Timeline:
        from flatout.memory.tracking import Tracker

        model, optimizer, loss_fn = copy.deepcopy((self.model, self.optimizer, self.loss_fn))
        batch = map_tensors(lambda one: one.clone(), slice_batch(self.batch, 0, size))  # a slice holds it all
        with generators_kept(), Tracker(workspace_of=self.workspace_of) as tracker:
            _steps(tracker, model, optimizer, loss_fn, batch, self.carried_out)
        return tracker.timeline()

    def _of_real(self, timeline: Timeline) -> MemoryForecast:
        return forecast_of(
            timeline,
            self.target,
            batch_size=self.batch_size,
            uncertainty=max(UNCERTAINTY_EXTENDED, self.uncertainty),
            not_covered=self.not_covered,
        )

    def _extended_by_sums(self, first: Timeline, second: Timeline, scale: float) -> MemoryForecast:
        """The runs took different courses: only their totals can be extended, which knows of no other peak."""
        one, other = self._of_real(first), self._of_real(second)

        def extend(a: int, b: int) -> int:
            return max(0, round(a + (b - a) * scale))

        categories = {
            name: max(size, other.categories[name]) if name in _FIXED else extend(size, other.categories[name])
            for name, size in one.categories.items()
        }
        tensors = sum(categories.values())
        around = extend(one.peak_bytes - one.tensor_bytes, other.peak_bytes - other.tensor_bytes)
        return replace(
            other,
            peak_bytes=tensors + around,
            tensor_bytes=tensors,
            rounding_bytes=extend(one.rounding_bytes, other.rounding_bytes),
            cached_bytes=extend(one.cached_bytes, other.cached_bytes),
            between_steps_bytes=extend(one.between_steps_bytes, other.between_steps_bytes),
            categories=categories,
            largest=(),
            uncertainty=max(UNCERTAINTY_SUMS, self.uncertainty),
        )


def _steps(tracker: Tracker, model: Any, optimizer: Any, loss_fn: LossFn, batch: Any, plan: Plan) -> None:
    tracker.model = model
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    tracker.hold(_weights(model), "weights")
    tracker.hold((one for _, one in tensors_in(batch)), "inputs")
    tracker.hold((one for state in optimizer.state.values() for _, one in tensors_in(state)), "optimizer")
    step = TrainStep(model, optimizer, loss_fn, plan)
    try:
        tracker.hold(_weights(model), "weights")  # a lever may have laid them out anew
        for number in range(STEPS):
            tracker.step = number
            step(batch)
    finally:
        step.close()


def _weights(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def samples_of(batch: Any) -> int:
    """How many samples an example batch has; at least one."""
    try:
        samples = batch_length(batch)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the example batch is a {type(batch).__name__}",
            limit="its tensors must share their first size, the number of samples",
            remedy="give a batch as the loss function takes it",
        ) from error
    if samples < 1:
        raise UsageError(
            "the example batch has 0 samples", limit="at least 1 is needed", remedy="give a batch as it comes"
        )
    return samples


def _resized(world: Any, tensor: Any, samples: int, wanted: int) -> Any:
    if not tensor.dim() or tensor.shape[0] != samples:
        return tensor
    return world.tensor_like(tensor, (wanted, *tensor.shape[1:]))


def _default_to_foreach(optimizer: Any) -> None:
    """As torch does for weights on CUDA; it does not recognise fake ones as such."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
