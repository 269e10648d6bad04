"""Run training steps on fake tensors: shapes, dtypes and lifetimes are real, the numbers and their memory are not.

Copies of a model, its optimizer and a batch are made without their memory; what a step does to the
copies, it does to nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from flatout.memory.tracking import plain_tensors
from flatout.memory.workspace import Operation
from flatout.parameters import copy_own_attributes
from flatout.replaced import replaced
from flatout.torch_private.dispatch import (
    TorchDispatchMode,
    disable_current_modes,
    is_traceable_wrapper_subclass,
    tree_leaves,
)
from flatout.torch_private.fake_tensors import (
    LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from flatout.torch_private.tensors import efficient_attention, read_as_number

DEPENDS_ON_DATA: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    GuardOnDataDependentSymNode,
)
"""What a fake run raises where control flow depends on a tensor's values."""

T = TypeVar("T", bound=Iterable[object])


class FakeRun(FakeTensorMode):
    """A context in which tensors are fake.

    with FakeRun() as world:
        model, optimizer = world.fake_copies((model, optimizer))
        ...
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def fake_copies(self, objects: T) -> T:
        """A deep copy in which every tensor is fake; what was shared is shared again."""
        copied: dict[int, object] = {
            id(one): one.clone_state() for one in generators_in(objects)
        }  # their state is a tensor whose values matter
        with FakeCopyMode(self):
            made = copy.deepcopy(objects, copied)
            for one, other in zip(objects, made, strict=True):
                if isinstance(one, optimizers.Optimizer) and isinstance(other, optimizers.Optimizer):
                    copy_own_attributes(one, other, copied)
        return made

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:  # options: as torch has them
        """A fake copy. What is on the meta device, as a model that is larger than this machine, is on the CPU there:
        meta tensors know neither ranks nor autocast."""
        made = super().from_tensor(tensor, **options)
        if tensor.is_meta:
            made.fake_device = torch.device("cpu")
        return made

    def tensor_like(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A fake tensor of another shape."""
        with self:
            made: Tensor = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return made


def is_fake(tensor: object) -> bool:
    """Has that tensor neither memory nor values? Nor has one around such: a rank's part under FSDP, a DTensor."""
    if isinstance(tensor, FakeTensor) or not isinstance(tensor, Tensor):
        return isinstance(tensor, FakeTensor)
    return is_traceable_wrapper_subclass(tensor) and all(isinstance(one, FakeTensor) for one in plain_tensors(tensor))


def generators_in(objects: Iterable[object]) -> Iterator[torch.Generator]:
    """Generators that the modules among these objects hold as attributes."""
    for one in objects:
        for module in one.modules() if isinstance(one, torch.nn.Module) else ():
            yield from (value for value in vars(module).values() if isinstance(value, torch.Generator))


@contextlib.contextmanager
def torch_keeps_quiet() -> Iterator[None]:
    """Torch logs a traceback for every operation that fails on fake tensors; the error itself says it better."""
    logger = logging.getLogger(LOGGER)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class RealTensorsKept(TorchDispatchMode):
    """Tensors of the user's own that take part, as a discriminator's in the loss of its generator, stay as they are.

    Inside a fake run an operation may still change a real tensor (a count of batches), and a backward pass leaves fake
    gradients on real parameters. Both are undone at the end. `gradients`: the parameters that got one.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.gradients: list[Tensor] = []
        self._leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TorchDispatchMode.__exit__(self, kind, error, trace)
        for parameter, gradient in self._leaves.values():
            if parameter.grad is not gradient and isinstance(parameter.grad, FakeTensor):
                parameter.grad = gradient
                self.gradients.append(parameter)
        with torch.no_grad():
            for tensor, value in self._written.values():
                tensor.copy_(value)
        self._leaves.clear()
        self._written.clear()

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        in_place = func.__name__.partition(".")[0].endswith("_")
        for number, one in enumerate(tree_leaves((args, kwargs or {}))):
            if not isinstance(one, Tensor) or is_fake(one):
                continue
            if one.requires_grad and one.is_leaf and id(one) not in self._leaves:
                self._leaves[id(one)] = one, one.grad
            if number == 0 and in_place and id(one) not in self._written:
                with disable_current_modes():
                    self._written[id(one)] = one, one.detach().clone()
        return func(*args, **(kwargs or {}))


class ValuesForOptimizers(TorchDispatchMode):
    """Within an optimizer's step, a tensor that is read as a number reads as 1: Adafactor reads its weights' norms.

    What it does with a number is arithmetic; no size depends on it. In a forward, one may: there reading is refused.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._steps = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ValuesForOptimizers:
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(lambda *_: self._count(1)),
            optimizers.register_optimizer_step_post_hook(lambda *_: self._count(-1)),
        ]
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TorchDispatchMode.__exit__(self, kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def _count(self, change: int) -> None:
        self._steps += change

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self._steps and func is read_as_number and isinstance(args[0], Tensor):
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else True if dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def operations_as_on_cuda() -> Iterator[None]:
    """Let fake tensors of the CPU go through the kernels that CUDA has, where those keep other things for backward.

    Dropout keeps a mask of one byte an element, not of four; attention keeps one number a row, not the scores.
    """
    with (
        replaced(functional, "dropout", lambda _: _dropout),
        replaced(functional, "scaled_dot_product_attention", lambda _: _attention),
    ):
        yield


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    lead = query.shape[:-3]
    query, key, value = (one.reshape(-1, *one.shape[-3:]) for one in (query, key, value))
    if query.dim() == 3:
        query, key, value = (one.unsqueeze(0) for one in (query, key, value))
    out = efficient_attention(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return out.reshape(*lead, *out.shape[-3:])
