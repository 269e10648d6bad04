"""A private copy of the user's model, as a plan says: dtype, bits, layout, folded norms.

The user's model is read and never changed. Weights are converted while they are copied, so a copy in bf16 costs half
the memory of the model and nothing besides. A model in FSDP2, whose ranks gather its layers, is called itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.types import Device

from flatout.arguments import as_device, as_model
from flatout.data.nested import map_leaves
from flatout.errors import PlanError, UsageError
from flatout.evaluation_mode import evaluating
from flatout.infer.output_tensors import is_tensor
from flatout.infer.prediction.linear import (
    INT_MM_MULTIPLE,
    Int8Linear,
    PackedLinear,
    RoundedLinear,
    fits_int_mm,
    packs,
    swap_linears,
)
from flatout.parallel.collected_state import sent
from flatout.parallel.parallelize import is_sharded, let_go
from flatout.parallel.whole_tensors import ELSEWHERE, home_of, ranks_of_calls
from flatout.plan import Plan
from flatout.precision.quantize import INT4_GROUP
from flatout.torch_private.modules import BatchNorm
from flatout.train.placement import join_recurrent_weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Placed:
    """The copy, and what was done to it. Call it as the model."""

    model: nn.Module
    dtype: torch.dtype
    """Of its weights; where they are of several and the plan says none, of the first."""
    input_dtype: torch.dtype | None
    """Of the floating-point inputs it is given; None: as they are, for a model of several dtypes or without weights."""
    result_dtype: torch.dtype | None
    """Of the user's model, which results get back; None: they stay as they are, as nothing was converted."""
    device: torch.device
    rate: str
    """Whose ceiling binds: fp32, bf16, fp16 or int8."""
    channels_last: bool
    remake: Callable[[], nn.Module] | None
    """Makes a fresh, unmodified copy; None once preparation is done, and for what is no copy."""
    is_copy: bool = True
    """False for a model in FSDP2: it is the user's."""
    ranks: ProcessGroup | None = None
    """Those that call it together, each with a part of it; None: this process alone."""
    notes: list[str] = field(default_factory=list)
    """What was done, and what could not be done and why."""

    def __call__(self, *args: object, **keywords: object) -> object:
        if self.is_copy:
            return self.model(*args, **keywords)
        try:
            output = self.model(*args, **keywords)
        except BaseException:
            let_go(self.model, failed=True)
            raise
        let_go(self.model)
        # Ranks decide by what they see: on GPUs two may compute unlike bits, and the first one's are right for all.
        assert self.ranks is not None, "its parameters are on several"
        return map_leaves(partial(sent, rank=0, group=self.ranks), output, is_tensor)

    @property
    def has_stages(self) -> bool:
        """Are some of its blocks on other ranks?"""
        return self.ranks is not None and any(getattr(one, ELSEWHERE, False) for one in self.model.parameters())

    def evaluating(self) -> AbstractContextManager[None]:
        """Around calls: in evaluation mode, in which a copy always is."""
        return contextlib.nullcontext() if self.is_copy else evaluating(self.model)


def place(model: nn.Module, plan: Plan, device: Device = None) -> Placed:
    """The copy in evaluation mode on `device` (None: where the model is), without gradients.

    Raises PlanError for choices that contradict one another, UsageError for what is no module or has no values.
    """
    as_model(model)
    if any(one.is_meta for one in model.parameters()):
        limit = "predict computes with their values"
        raise UsageError("the model's weights are on the meta device", limit=limit, remedy="load them")
    first = next((one for one in model.parameters() if one.is_floating_point()), None)
    own_dtype = torch.float32 if first is None else first.dtype
    dtype = DTYPES[plan.precision] if plan.precision else own_dtype
    kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
    here = torch.device("cpu") if first is None else first.device
    target = here if device is None else as_device(device)
    if is_sharded(model):
        return _as_it_is(model, plan, device)
    if target.type == "meta":
        raise UsageError("device is 'meta'", limit="predict computes with values", remedy="name another, such as 'cpu'")
    check_bits(plan, target)
    channels_last = plan.memory_format == "channels_last"

    def make() -> nn.Module:
        made = _converted(model, dtype if plan.precision else None, target)
        if channels_last:
            made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made

    used = {dtype} if plan.precision else kinds
    name = next((name for name in ("bf16", "fp16") if DTYPES[name] in used), "fp32")  # the one that rounds most
    return Placed(
        model=make(),
        dtype=dtype,
        input_dtype=dtype if plan.precision or len(kinds) == 1 else None,
        result_dtype=own_dtype if plan.precision else None,
        device=target,
        rate=plan.activations or name,
        channels_last=channels_last,
        remake=make,
        ranks=ranks_of_calls(model),
    )


def _as_it_is(model: nn.Module, plan: Plan, device: Device) -> Placed:
    """A model in FSDP2. PlanError for choices that would change a copy of it."""
    changing = ("precision", "weights", "activations", "memory_format", "fold_batch_norm", "compile")
    choice = next((name for name in changing if getattr(plan, name) is not None), None)
    if choice is not None:
        raise PlanError(
            f"the plan's {choice} is {getattr(plan, choice)!r}, and the model's weights are sharded over ranks (FSDP2)",
            limit="they are gathered layer by layer, and the model runs as it is",
            remedy="drop it; for products in bf16, train with fsdp_dtype = 'bf16'",
        )
    first = next(one for one in model.parameters() if one.is_floating_point())
    here = home_of(first)
    if device is not None and as_device(device) not in (here, torch.device(here.type)):
        raise UsageError(
            f"device is {str(device)!r}, and the model's weights are sharded over ranks on {here.type}",
            limit="they are gathered there",
            remedy="drop it",
        )
    same = len({one.dtype for one in model.parameters() if one.is_floating_point()}) == 1
    return Placed(
        model=model,
        dtype=first.dtype,
        input_dtype=first.dtype if same else None,
        result_dtype=None,
        device=here,
        rate=next((name for name, dtype in DTYPES.items() if dtype is first.dtype), "fp32"),
        channels_last=False,
        remake=None,
        is_copy=False,
        ranks=ranks_of_calls(model),
    )


def check_bits(plan: Plan, device: torch.device) -> None:
    """PlanError for weights in few bits where no kernel reads them: each product would widen the whole matrix first."""
    if plan.weights is not None and plan.activations is None and device.type != "cpu":
        limit = "only the CPU holds weights alone in few bits; "
        limit += "elsewhere each product would widen the whole matrix first"
        remedy = "set activations = 'int8' with weights = 'int8', which multiplies whole numbers, or precision = 'bf16'"
        raise PlanError(f"the plan's weights is {plan.weights!r} on {device}", limit=limit, remedy=remedy)


def round_and_pack(placed: Placed, plan: Plan, besides: Collection[str] = ()) -> str:
    """Linear layers in the plan's bits; those of full bits in oneDNN's layout, where the processor has one.

    besides: names of layers that stay as they are. Returns what was done, in words; '' for nothing.
    """
    on_cpu = placed.device.type == "cpu"
    left: list[nn.Linear] = []

    def make(layer: nn.Linear) -> nn.Module | None:
        if getattr(layer.weight, ELSEWHERE, False):
            return None
        if plan.activations == "int8" and (on_cpu or fits_int_mm(layer)):
            return Int8Linear(layer)
        if plan.activations is None and plan.weights == "int8":
            return RoundedLinear(layer, bits=8)
        if plan.weights == "int4" and layer.in_features % INT4_GROUP == 0:
            return RoundedLinear(layer, bits=4)
        if plan.weights is None and layer.weight.dtype is placed.dtype:
            return PackedLinear(layer)
        left.append(layer)
        return None

    if plan.weights is None and not (on_cpu and plan.compile is None and packs(placed.dtype)):
        return ""
    count = swap_linears(placed.model, make, besides)
    if plan.weights is None:
        return f"{count} linear layers hold weights in oneDNN's layout" if count else ""
    if plan.activations == "int8":
        said, why = "multiply 8-bit inputs by 8-bit weights", f"sizes are not multiples of {INT_MM_MULTIPLE}"
    else:
        said, why = f"hold {plan.weights} weights", f"inputs are not a multiple of {INT4_GROUP}"
    return f"{count} linear layers {said}" + (f"; {len(left)} left, whose {why}" if left else "")


@torch.inference_mode(False)  # what is made in it cannot be written to later, outside of it
def _converted(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """A deep copy whose tensors are already in their new dtype (None: their own) and place when they are made."""
    kept = _kept_in_their_dtype(model)
    copies: dict[int, Tensor] = {}

    def converted(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype and tensor.is_floating_point() and id(tensor) not in kept else tensor.dtype
        if getattr(tensor, ELSEWHERE, False):  # one NaN in memory, in whatever shape
            return torch.full((), torch.nan, dtype=wanted, device=device).expand(tensor.shape)
        return tensor.detach().to(device=device, dtype=wanted, copy=True)

    with torch.no_grad():
        for parameter in model.parameters():
            copies[id(parameter)] = new = nn.Parameter(converted(parameter), requires_grad=False)
            setattr(new, ELSEWHERE, getattr(parameter, ELSEWHERE, False))
        for buffer in model.buffers():
            copies[id(buffer)] = converted(buffer)
        # A deep copy refuses results of computations that a module keeps, such as a weight that is normed.
        for one in (one for module in model.modules() for one in vars(module).values()):
            if isinstance(one, Tensor) and not one.is_leaf:
                copies.setdefault(id(one), converted(one))
    try:
        made = copy.deepcopy(model, dict(copies))
    except Exception as error:
        what = f"the model cannot be copied: {type(error).__name__}: {error}"
        remedy = "keep files, locks and generators out of the model"
        raise UsageError(what, limit="predict works on a copy of it", remedy=remedy) from error
    join_recurrent_weights(made)
    config = getattr(made, "config", None)
    if dtype and hasattr(model, "main_input_name") and hasattr(config, "dtype"):  # Hugging Face models may ask theirs
        config.dtype = dtype  # type: ignore[union-attr]
    made.eval()  # nothing is made of what it returns: a model's own `train` may forget to return it
    return made


def _kept_in_their_dtype(model: nn.Module) -> set[int]:
    """Batch norms' statistics (their kernels take inputs of another dtype), and what a Hugging Face model recomputes
    and keeps out of its state dict: rotary frequencies lose their meaning in 8 bits of mantissa."""
    kept: set[int] = set()
    foreign = hasattr(model, "main_input_name")
    for module in model.modules():
        if isinstance(module, BatchNorm):
            kept |= {id(one) for one in (*module.parameters(False), *module.buffers(False))}
        if foreign:
            names = module._non_persistent_buffers_set
            kept |= {id(buffer) for name, buffer in module.named_buffers(recurse=False) if name in names}
    return kept
