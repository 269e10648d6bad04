"""DataParallel: one process spreads each call of a model over the GPUs that it sees.

Each training call copies the weights to the other GPUs, splits the inputs by samples, computes the parts in a thread
each, and puts the outputs together on the model's own GPU; the backward pass adds the gradients up there. This is what
torch.nn.DataParallel does, by the same functions, with four differences: the model is not wrapped; the copies compute
in the dtype of the caller's autocast, where torch's threads fall back to fp16; calls without gradients stay on one GPU;
and what cannot be split by samples is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, parallel_apply, replicate

from flatout.data.nested import batch_length, slice_batch, split_batch, tensors_in, to_device
from flatout.errors import PlanError, UsageError
from flatout.evaluation_mode import evaluating
from flatout.levers.model_call import call_of, set_call
from flatout.levers.subject import is_plain_training
from flatout.parallel.strategy import Strategy
from flatout.precision.autocast import in_autocast_of_caller
from flatout.precision.outputs import difference
from flatout.torch_private.attributes import COMPILED_CALL
from flatout.units import format_bytes

if TYPE_CHECKING:
    from flatout.plan import Plan

Inputs: TypeAlias = "tuple[tuple[object, ...], dict[str, object]]"
"""Of a call: args and kwargs."""
CHECKED_SAMPLES = 2
"""On each GPU, in the first call."""
DIFFERENCE = 0.01
"""Of outputs, see `difference`: rounding, TF32's too, is below it."""
REMEDY = "set parallel = 'ddp', and start a process for each GPU: flatout launch train.py"


def gpus_of(model: nn.Module) -> list[int]:
    """The GPUs that share the work: the model's, and the others that this process sees; none of a model on the CPU."""
    weight = next(model.parameters())
    if not weight.is_cuda:
        return []
    return [weight.get_device(), *(one for one in range(torch.cuda.device_count()) if one != weight.get_device())]


def spread_over_gpus(model: nn.Module, gpus: Sequence[int], plan: Plan) -> Strategy:
    """Have each training call of `model` computed on these GPUs, its own first. Warns of what it costs.

    Raises PlanError for batch_norm = 'synced', UsageError for a model that is on several devices.
    """
    devices = sorted({str(one.device) for one in (*model.parameters(), *model.buffers())})
    if len(devices) > 1:
        raise UsageError(
            f"parallel is 'dp', and the model is on {' and '.join(devices)}",
            limit="all of it is copied from one GPU to the others",
            remedy="drop parallel, or move the model: model.cuda()",
        )
    if plan.batch_norm == "synced":
        raise PlanError(
            "batch_norm is 'synced', and parallel is 'dp'",
            limit="torch's SyncBatchNorm needs a process for each GPU",
            remedy="use batch_norm = 'local', or parallel = 'ddp'",
        )
    copied = format_bytes(sum(one.nbytes for one in (*model.parameters(), *model.buffers())))
    more = f"{len(gpus) - 1} more GPU{'s' * (len(gpus) > 2)}"
    warnings.warn(
        f"parallel is 'dp': each step copies {copied} to {more}, and adds up gradients on GPU {gpus[0]}, all from one "
        "process. DDP keeps the weights on each GPU: flatout launch train.py, with parallel = 'ddp'",
        stacklevel=5,  # past parallelize and TrainStep
    )
    earlier, call, spread = getattr(model, COMPILED_CALL), call_of(model), _Spread(gpus)

    def chosen(*args: object, **kwargs: object) -> object:
        return spread(model, call, (args, kwargs)) if is_plain_training() else call(*args, **kwargs)

    set_call(model, chosen)
    return Strategy(close=lambda: set_call(model, earlier))


class _Spread:
    """A call in parts, each on a GPU of its own."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus, self._few, self._checked = gpus, CHECKED_SAMPLES * len(gpus), False

    def __call__(self, model: nn.Module, call: Callable[..., object], inputs: Inputs) -> object:
        if not self._checked and (samples := _length(inputs)) > 1:
            self._check_splits_by_samples(model, call, slice_batch(inputs, 0, min(samples, self._few)))
            self._checked = True
        return self._in_parts(model, call, inputs)

    def _in_parts(self, model: nn.Module, call: Callable[..., object], inputs: Inputs) -> object:
        _length(inputs)  # UsageError, in the words of a call, before those of a batch
        parts = split_batch(inputs, len(self._gpus))
        if len(parts) == 1:
            return call(*inputs[0], **inputs[1])
        gpus = self._gpus[: len(parts)]
        parts = [to_device(part, gpu) for part, gpu in zip(parts, gpus, strict=True)]
        copies = replicate(model, gpus, detach=not torch.is_grad_enabled())
        for copy in copies:
            for module in copy.modules():
                set_call(module, None)
        calls: list[Any] = [in_autocast_of_caller(copy) for copy in copies]  # torch asks for modules, and calls them
        with _no_attribute_set(copies[0]):
            outputs = parallel_apply(calls, [args for args, _ in parts], [kwargs for _, kwargs in parts], gpus)
        for part, output in zip(parts, outputs, strict=True):
            _check_per_sample(output, batch_length(part))
        try:
            return gather(outputs, gpus[0])
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"what the model returns cannot be put together from several GPUs: {error}",
                limit="parallel = 'dp' joins tensors, alone or in dicts, tuples and lists",
                remedy=REMEDY,
            ) from error

    def _check_splits_by_samples(self, model: nn.Module, call: Callable[..., object], few: Inputs) -> None:
        """Do a few samples give the same outputs in parts as together? Not where layers mix samples, or where the first
        dimension is time. In evaluation mode, so that nothing is drawn; nothing is said where that does not work."""
        with evaluating(model), torch.no_grad(), torch.autocast("cuda", enabled=False):
            try:
                together, apart = call(*few[0], **few[1]), self._in_parts(model, call, few)
            except Exception:  # a model that only trains, or does not fit: the call itself shows it
                return
        pairs = zip(tensors_in(together, "output"), tensors_in(apart, "output"), strict=False)
        for (path, wanted), (_, found) in pairs:
            if wanted.shape != found.shape or _apart(found, wanted):
                raise UsageError(
                    f"the model computes another {path} for a batch in parts than for the whole batch",
                    limit="'dp' splits the first dimension of all inputs, whose entries must not depend on one another",
                    remedy="pass inputs [batch, ...], or drop parallel: it couples the samples of a batch",
                )


def _length(inputs: object) -> int:
    try:
        return batch_length(inputs)
    except UsageError as error:
        said = error.what.replace("the batch", "a call of the model").replace("batch[0]", "args")
        raise UsageError(
            said.replace("batch[1]", "kwargs"),
            limit="parallel = 'dp' splits the model's inputs along their first dimension, which is the samples'",
            remedy="pass only tensors [batch, ...] to the model, or " + REMEDY,
        ) from error


@contextlib.contextmanager
def _no_attribute_set(copy: nn.Module) -> Iterator[None]:
    """Raise UsageError if the call sets an attribute: the copies are gone after it."""
    before = {name: dict(module.__dict__) for name, module in copy.named_modules()}
    yield
    for name, module in copy.named_modules():
        known = before[name]
        changed = [key for key, value in module.__dict__.items() if key not in known or value is not known[key]]
        if changed:
            raise UsageError(
                f"the model's call sets {name + '.' if name else ''}{changed[0]}",
                limit="with parallel = 'dp' it sets that of a copy, which is dropped after the call",
                remedy=f"return it from forward, or {REMEDY}",
            )


def _check_per_sample(output: object, samples: int) -> None:
    for path, tensor in tensors_in(output, "output"):
        if tensor.dim() == 0 or len(tensor) != samples:
            shape = list(tensor.shape)
            raise UsageError(
                f"the model's {path} is a tensor of shape {shape} for {samples} samples",
                limit="parallel = 'dp' joins outputs along their first dimension, which is the samples'",
                remedy=f"compute a loss in loss_fn, from the model's outputs; or {REMEDY}",
            )


def _apart(found: Tensor, wanted: Tensor) -> bool:
    if not wanted.is_floating_point() or not wanted.numel():
        return not torch.equal(found, wanted)
    return difference(found, wanted) > DIFFERENCE
