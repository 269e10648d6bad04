"""`forecast`: the memory that a training step is going to need, known before it runs.

The step itself runs, as `TrainStep` would run it under the plan, but on fake tensors: every operation of forward,
backward and optimizer, with the shapes, dtypes and lifetimes that it will have, and no memory behind them. Where
control flow depends on the data, a few real steps at small batches are measured and extrapolated instead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.arguments import as_whole_number
from flatout.data.nested import resize_batch
from flatout.errors import FlatoutError, UsageError, describe_error
from flatout.flops import count_step
from flatout.generators import generators_kept
from flatout.levers.activation_offload import PretendedHost, offloading_to
from flatout.levers.compile import repeated_blocks
from flatout.levers.model_call import set_call
from flatout.machine.ranks import PretendedExchange, pretended_ranks
from flatout.memory.cuda_workspaces import cuda_workspaces
from flatout.memory.fake_run import (
    DEPENDS_ON_DATA,
    FakeRun,
    RealTensorsKept,
    ValuesForOptimizers,
    operations_as_on_cuda,
    torch_keeps_quiet,
)
from flatout.memory.forecast import MemoryForecast, Target, forecast_of
from flatout.memory.kernel_workspaces import cpu_workspace
from flatout.memory.onednn_workspaces import rules_were_read_for
from flatout.memory.timeline import Timeline
from flatout.memory.tracking import Tracker
from flatout.memory.workspace import WorkspaceOf
from flatout.parallel.whole_tensors import STAGES
from flatout.parameters import parameters_of
from flatout.plan import shares_of_batch
from flatout.sizing.real_steps import forecast_from_real_steps
from flatout.sizing.target import find_target
from flatout.sizing.training import (
    Training,
    cannot_be_copied,
    carried_out,
    follow_steps,
    never_captured,
)
from flatout.torch_private.modules import Convolution
from flatout.train.step import TrainStep

UNCERTAINTY_RANKS = {"ddp": 0.05, "zero1": 0.05, "fsdp": 0.35, "tensor": 0.05, "pipeline": 0.05}
"""In addition, for what is sent and received. Under fsdp gloo's threads let go of their copies late in some steps, when
up to a third more was held; over NCCL nothing was measured."""
UNCERTAINTY_CPU = 0.03
UNCERTAINTY_UNREAD_KERNELS = 0.3
"""On a processor for which there are no rules of oneDNN's workspaces: the difference seen on one with AMX."""
UNCERTAINTY_CUDA = 0.1
UNCERTAINTY_CUDA_UNKNOWN = 0.5
"""For an unnamed GPU: the buffers of reductions grow with its multiprocessors, up to 96 MiB on 128 of them."""
UNCERTAINTY_CUDA_RECURRENT = 0.45
"""Recurrent layers, of which a few small steps are measured: up to 41 % too low on an H100, eight times larger."""
UNCERTAINTY_SPARSE = 1.5
"""Where gradients are sparse: up to 143 % more was measured within two steps, of SGD with momentum."""
NOT_COVERED_SPARSE = (
    "sparse gradients: what their kernels hold while they sort and add rows, "
    "and an optimizer's sparse state, which may grow with every step, as SGD's momentum does"
)
LARGE_SEGMENT_BYTES = 20 * 2**20
"""What the CUDA allocator asks the driver for at once."""
UNCERTAINTY_COMPILED = 0.15
UNCERTAINTY_COMPILED_WIDE_DEPTHWISE = 0.65
"""Its kernels' workspaces are known uncompiled; compiled they were 38 % of the forecast less in one of two cases."""
UNCERTAINTY_NOT_AS_COMPILED = 0.3
"""Where the plan compiles and the forecast had to be of the uncompiled model."""


def forecast(
    step: TrainStep,
    batch: object,
    *,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    ranks: int | None = None,
) -> MemoryForecast:
    """The peak of one call of `step`, its plan included, without running it. Nothing of yours is changed.

    batch: any batch of the right kinds and shapes; with `batch_size`, its tensors are taken to have that many samples
    instead. device: where it would run; None: where the model is; 'cpu', 'cuda', or a GPU of the catalogue
    ('rtx-4090', 'a100-80gb', 'h200'), which need not be here. ranks: of the one of so many that holds the most, which
    share training as the plan's `parallel` says; they need not be here. The batch is that of them all. The stages of a
    pipeline, which measured times decide in the first step, are assumed from counted operations and bytes.

    Raises UsageError for what is no TrainStep, a GPU that is not known, a batch without tensors, and ranks without a
    plan for them.
    """
    training = Training.of(step, batch)
    samples = training.samples_wanted(batch_size)
    if ranks is not None:
        training, samples = of_one_rank(training, samples, as_whole_number(ranks, "ranks"))
    return forecast_training(training, find_target(device, step.model), samples)


def of_one_rank(training: Training, samples: int, ranks: int) -> tuple[Training, int]:
    """The training of one of several ranks, and the most samples that are a rank's share."""
    if training.plan.parallel is None:
        raise UsageError(
            f"ranks is {ranks}, and the plan has no parallel",
            limit="it says what each of them holds",
            remedy="set it: step.with_plan(flatout.Plan(parallel='fsdp'))",
        )
    if training.plan.fsdp_cpu_offload:
        raise UsageError(
            "fsdp_cpu_offload is set", limit="what waits in the host's memory is not forecast", remedy="drop it"
        )
    shares = shares_of_batch(training.plan, ranks)
    if samples < shares:
        which = f"{ranks} ranks" if shares == ranks else f"{shares} shares of {ranks} ranks"
        raise UsageError(f"the batch has {samples} samples for {which}", limit="each has one at least")
    return replace(training, ranks=ranks), -(-samples // shares)


def forecast_training(training: Training, target: Target, batch_size: int) -> MemoryForecast:
    """`forecast` of what was checked already."""
    began = time.perf_counter()
    with _sparse_gradients_noticed() as sparse:
        made = _forecast(training, target, batch_size)
    if sparse:
        made = replace(
            made,
            uncertainty=max(made.uncertainty, UNCERTAINTY_SPARSE),
            not_covered=(*made.not_covered, NOT_COVERED_SPARSE),
        )
    return replace(made, seconds=time.perf_counter() - began)


@contextlib.contextmanager
def _sparse_gradients_noticed() -> Iterator[list[str]]:
    """Yields a list that has an entry afterwards if an optimizer was given a sparse gradient."""
    found: list[str] = []

    def look(optimizer: Optimizer, *_: object) -> None:
        if any(one.grad is not None and one.grad.layout is not torch.strided for one in parameters_of(optimizer)):
            found.append(type(optimizer).__name__)

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _forecast(training: Training, target: Target, batch_size: int) -> MemoryForecast:
    try:
        if training.plan.parallel == "pipeline" and training.ranks > 1:
            return _of_largest_stage(training, target, batch_size)
        return _from_fake_run(training, target, batch_size)
    except FlatoutError:
        raise
    except Exception as error:  # control flow depends on values, or an operation has no fake form: .numpy()
        if training.ranks > 1:
            raise UsageError(
                f"a step of {training.ranks} ranks cannot be run on fake tensors: {describe_error(error)}",
                limit="without them there are no ranks to measure",
                remedy="forecast without ranks; each holds at most that for its share of a batch",
            ) from error
        if training.samples < 2 and not isinstance(error, DEPENDS_ON_DATA):
            raise
        return forecast_from_real_steps(
            training,
            target,
            batch_size,
            error,
            uncertainty=_uncertainty(training, target, as_compiled=False),
            not_covered=_not_covered(training, target, as_compiled=False),
            workspace_of=_workspace_of(target),
        )


@dataclass(frozen=True, kw_only=True)
class _FakeSteps:
    timeline: Timeline
    offloaded_bytes: int
    """That one step offloads to the host's memory."""
    not_in_force: tuple[tuple[str, str], ...]


def _from_fake_run(training: Training, target: Target, batch_size: int) -> MemoryForecast:
    """As compiled where the plan says so; uncompiled where its graphs cannot be traced."""
    as_compiled = training.plan.compile is not None and training.plan.activation_checkpointing is None
    try:
        steps = _fake_timeline(training, target, batch_size, as_compiled=as_compiled)
    except FlatoutError:
        raise
    except Exception:
        if not as_compiled:
            raise
        as_compiled = False  # not every model can be traced; it may still run uncompiled
        steps = _fake_timeline(training, target, batch_size, as_compiled=False)
    made = forecast_of(
        steps.timeline,
        target,
        batch_size=batch_size,
        uncertainty=_uncertainty(training, target, as_compiled),
        not_covered=_not_covered(training, target, as_compiled),
        device=None if _pretends(training, target) else ("cuda" if target.cuda else None),
    )
    if target.cuda:  # which free block serves a request can depend on an order that no rule knows: one segment's worth
        made = replace(made, uncertainty=made.uncertainty + LARGE_SEGMENT_BYTES / max(1, made.peak_bytes))
    if training.ranks > 1:
        more = UNCERTAINTY_RANKS[training.plan.parallel or ""]
        made = replace(made, ranks=training.ranks, rank=training.rank, uncertainty=made.uncertainty + more)
    return replace(made, offloaded_bytes=steps.offloaded_bytes, not_in_force=steps.not_in_force)


def _of_largest_stage(training: Training, target: Target, batch_size: int) -> MemoryForecast:
    """Of the stages that may hold the most of all: the first, the last, and, of those between, each that has more
    blocks than all before it. These have fewer parts of a batch under way the later they are."""
    last = training.ranks - 1
    exchange = PretendedExchange(lambda rank: rank if rank in (0, last) else 1)
    begins: list[int] = []
    for rank in sorted({0, 1, last}):  # in a first step each sees what it has gradients of, and the next round knows it
        with fake_step(replace(training, rank=rank, exchange=exchange), batch_size) as (step, batch):
            step(batch)
            begins = step.model.__dict__[STAGES].begins
    blocks = [end - begin for begin, end in pairwise(begins)]
    largest = [rank for rank in range(1, last) if blocks[rank] > max(blocks[1:rank], default=0)]
    found = [
        _from_fake_run(replace(training, rank=rank, exchange=exchange), target, batch_size)
        for rank in (0, *largest, last)
    ]
    most = max(found, key=lambda one: one.peak_bytes)
    one_more = 1 / blocks[most.rank] if begins[-1] > training.ranks else 0.0  # block, where times decide otherwise
    return replace(most, stages=tuple(begins), uncertainty=most.uncertainty + one_more)


@contextlib.contextmanager
def fake_step(
    training: Training, samples: int | None = None, *, as_on_cuda: bool = False
) -> Iterator[tuple[TrainStep, object]]:
    """(a step that runs on fake tensors, of the rank that the training is of, and its batch). Nothing of the training
    is changed. as_on_cuda: with the kernels that CUDA has, and the optimizer's updates for all weights at once."""
    world = FakeRun()
    fake = on_fake_copies(world, training, samples)
    if as_on_cuda:
        default_to_foreach(fake.optimizer)
    on_cpu = training.device_type == "cpu"
    cuda = operations_as_on_cuda() if as_on_cuda and on_cpu else contextlib.nullcontext()
    ranks = pretended_ranks(training.ranks, training.rank, training.exchange)
    with torch_keeps_quiet(), ranks, generators_kept(), world, RealTensorsKept(), cuda, ValuesForOptimizers():
        fake.model.train()
        step = fake.make_step()
        try:
            yield step, fake.batch
        finally:
            step.close()


def count_operations(training: Training) -> float:
    """Floating point operations of one step, recomputation included, counted in a fake run."""
    with fake_step(training) as (step, batch):
        finish = count_step()
        try:
            step(batch)
        finally:
            counted = finish()
    return counted


def _pretends(training: Training, target: Target) -> bool:
    """Is the target another device than the one that the model is on?"""
    return target.cuda != (training.device_type == "cuda")


def _workspace_of(target: Target) -> WorkspaceOf:
    """Rules for what kernels hold inside."""
    return cuda_workspaces(target.multiprocessors, target.compute_capability) if target.cuda else cpu_workspace


def _uncertainty(training: Training, target: Target, as_compiled: bool) -> float:
    if training.plan.compile is not None and not target.cuda and _has_wide_depthwise(training.model):
        return UNCERTAINTY_COMPILED_WIDE_DEPTHWISE
    if training.plan.compile is not None:  # how graphs are fused was compared on the CPU alone
        return UNCERTAINTY_COMPILED if as_compiled and not target.cuda else UNCERTAINTY_NOT_AS_COMPILED
    if target.cuda:
        recurrent = any(isinstance(part, torch.nn.RNNBase) for part in training.model.modules())
        known = UNCERTAINTY_CUDA_RECURRENT if recurrent else UNCERTAINTY_CUDA
        return UNCERTAINTY_CUDA_UNKNOWN if target.multiprocessors is None else known
    return UNCERTAINTY_UNREAD_KERNELS if _unread_kernels(training) else UNCERTAINTY_CPU


def _unread_kernels(training: Training) -> bool:
    """Has the model layers for whose kernels there are no rules on this processor, in this precision?"""
    kinds = (Convolution, torch.nn.RNNBase)
    dtypes = {p.dtype for part in training.model.modules() if isinstance(part, kinds) for p in part.parameters()}
    if training.plan.precision in ("bf16", "fp16") and dtypes:
        dtypes.add(torch.bfloat16)
    return not all(rules_were_read_for(dtype) for dtype in dtypes)


def _has_wide_depthwise(model: nn.Module) -> bool:
    convolutions = (one for one in model.modules() if isinstance(one, Convolution))
    return any(one.groups == one.in_channels > 1 and max(one.kernel_size) > 3 for one in convolutions)


def _not_covered(training: Training, target: Target, as_compiled: bool) -> list[str]:
    found = []
    kinds = [type(one) for one in training.model.modules()]
    if training.plan.compile is not None and as_compiled:
        found.append("torch.compile: what the compiler fuses otherwise than assumed, and compiling itself")
    elif training.plan.compile is not None:
        found.append("torch.compile: the forecast is of the uncompiled model, which usually keeps more")
    if target.cuda:
        found.append("the CUDA context (some hundred MiB) and NCCL's buffers")
        if target.multiprocessors is None:
            found.append("buffers of column sums (bias gradients), up to 100 MiB: name the GPU, such as 'rtx-4090'")
        if any(issubclass(kind, Convolution) for kind in kinds):
            found.append("cuDNN's workspaces for convolutions")
        if any(issubclass(kind, torch.nn.RNNBase) for kind in kinds):
            found.append("what cuDNN's recurrent layers keep for the backward pass")
    else:
        found.append("buffers inside kernels that Flatout has no rule for (flatout.memory.kernel_workspaces)")
        if _unread_kernels(training):
            found.append(
                "what oneDNN's convolutions and recurrent layers hold: its rules were read on AVX-512 without AMX"
            )
    return found


def _call_as_compiled(model: nn.Module, mode: str | None, world: FakeRun) -> None:
    """From now on the parts of the copy that torch.compile would compile hold memory as compiled ones do."""
    from flatout.memory.compiled_run import CompiledCall

    for part in repeated_blocks(model) if mode == "regional" else [model]:
        set_call(part, CompiledCall(part, world))


def _fake_timeline(training: Training, target: Target, batch_size: int, *, as_compiled: bool) -> _FakeSteps:
    world = FakeRun()
    fake = on_fake_copies(world, training, batch_size)
    if target.cuda:
        default_to_foreach(fake.optimizer)
    host = PretendedHost()
    pretend = contextlib.ExitStack()
    if target.cuda:
        pretend.enter_context(offloading_to(host))
    if target.cuda and _pretends(training, target):
        pretend.enter_context(operations_as_on_cuda())
    real = RealTensorsKept()
    tracker = Tracker(workspace_of=_workspace_of(target))
    with (
        torch_keeps_quiet(),
        pretended_ranks(training.ranks, training.rank, training.exchange),
        generators_kept(),
        world,
        real,
        pretend,
        ValuesForOptimizers(),
        contextlib.ExitStack() as closing,
        tracker,
    ):
        if as_compiled:
            _call_as_compiled(fake.model, training.plan.compile, world)
        step = follow_steps(tracker, fake, closing)
    own = {id(one) for one in training.model.parameters()}
    if any(id(one) in own for one in real.gradients):
        raise UsageError(
            "the loss function uses a model of its own",
            limit="a forecast calls it with a copy on fake tensors",
            remedy="write it as loss_fn(model, batch) and use that model",
        )
    return _FakeSteps(
        timeline=tracker.timeline(),
        offloaded_bytes=host.moved_bytes // training.steps_followed,
        not_in_force=tuple(step.rolled_back),
    )


def on_fake_copies(world: FakeRun, training: Training, batch_size: int | None = None) -> Training:
    """With `batch_size` samples, under the part of the plan that a fake run can carry out."""
    try:
        copies = world.fake_copies((training.model, training.optimizer, training.loss_fn, training.batch))
    except Exception as error:
        raise cannot_be_copied(error) from error
    model, optimizer, loss_fn, batch = copies
    samples = batch_size or training.samples
    if samples != training.samples:
        batch = resize_batch(batch, samples, lambda one: world.tensor_like(one, (samples, *one.shape[1:])))
    never_captured(optimizer)
    plan = carried_out(training.plan, training.ranks)
    return training.under(plan).on_copies(model, optimizer, loss_fn, batch, samples)


def default_to_foreach(optimizer: Optimizer) -> None:
    """As torch does for weights on CUDA; it does not recognise fake ones as being there."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
