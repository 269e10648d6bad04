"""Dispatcher modes, the state of autograd in this thread, and pytrees. Importing this imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import TYPE_CHECKING

import torch

from flatout.torch_private.lookup import imported_from_torch, private

if TYPE_CHECKING:
    from torch._ops import OpOverload

with imported_from_torch():
    # No public API observes every operation of a step; torch.utils.flop_counter is built on these.
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    # No public API flattens nested containers as torch does, including types that a program registered.
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten


class ListeningMode(TorchDispatchMode):
    """A mode that is never active while torch.compile traces. Opting out of tracing would import the whole compiler.

    It sees higher order operators (`flex_attention`) as one operation each: torch refuses them under any other mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Calls `listen` with each operation; of one that is made of others, with these.

        Autograd takes such operations apart before a mode sees them. In inference mode it is off, and nothing does.
        """
        if torch.is_inference_mode_enabled() and _gives_tensors(func):
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        return self.listen(func, args, kwargs or {})

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The result of the operation, which this has to call."""
        raise NotImplementedError


@functools.lru_cache(maxsize=4096)
def _gives_tensors(operation: object) -> bool:
    """What asks for sizes or strides of a subclass gives none, and would be asked by its own parts for ever."""
    schema = getattr(operation, "_schema", None)  # higher order operators have none
    return schema is not None and any("Tensor" in str(one.type) for one in schema.returns)


Switch = Callable[[], AbstractContextManager[object]]

current_dispatch_mode: Callable[[], TorchDispatchMode | None] = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode"
)
"""The innermost dispatch mode; no public equivalent."""

disable_current_modes: Switch = private("torch.utils._python_dispatch._disable_current_modes")
"""Disables all dispatch modes; a caller can only exit those it entered itself."""

without_torch_function: Switch = private("torch._C.DisableTorchFunction")
"""Disables every `__torch_function__`, including those of modes; no public equivalent."""

without_subclass_torch_function: Switch = private("torch._C.DisableTorchFunctionSubclass")
"""Disables `__torch_function__` of subclasses only; the public `Tensor.__torch_function__` also wraps the results."""

without_torch_dispatch: Switch = private("torch._C._DisableTorchDispatch")
"""Disables every `__torch_dispatch__`; no public equivalent."""

current_function_mode: Callable[[], object] = private("torch.overrides._get_current_function_mode")
"""The innermost function mode; only that one can be exited. No public equivalent."""

current_graph_task: Callable[[], int] = private("torch._C._current_graph_task_id")
"""Identifies the backward pass running in this thread; -1 outside of one. No public equivalent."""

keeps_graph: Callable[[], bool] = private("torch._C._autograd._get_current_graph_task_keep_graph")
"""Does the backward pass running in this thread keep its graph for another one? No public equivalent."""

current_node: Callable[[], object] = private("torch._C._current_autograd_node")
"""The node that the backward pass is executing; no public equivalent."""

next_node_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")
"""The sequence number of the next autograd node of this thread; no public equivalent."""

node_number = methodcaller("_sequence_nr")
"""The sequence number of an autograd node; no public equivalent."""

saved_tensor_hooks: Callable[[bool], tuple[Callable[..., object], Callable[..., object]] | None] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
"""The innermost hooks set by `torch.autograd.graph.saved_tensors_hooks`, which can only be set in public. They identify
activation checkpointing."""

transform_level: Callable[[], int | None] = private("torch._C._functorch.maybe_current_level")
"""The nesting level of torch.func transforms; None outside. No public equivalent."""

_forward_gradients = private("torch.autograd.forward_ad")
"""Its `_current_level` is at least 0 inside of torch.autograd.forward_ad.dual_level; no public equivalent."""

jit_trace_under_way: Callable[[], object] = private("torch._C._get_tracing_state")
"""None outside of torch.jit.trace; the public `torch.jit.is_tracing` adds a Python call."""


def beside_autograd() -> bool:
    """Under a torch.func transform, in a level of forward gradients, or in a torch.jit.trace."""
    return (
        transform_level() is not None
        or int(_forward_gradients._current_level) >= 0
        or jit_trace_under_way() is not None
    )


profiler_is_on: Callable[[], bool] = private("torch.autograd._profiler_enabled")
"""True while any kind of profiler records; no public equivalent."""
