"""Modes of torch's dispatcher, autograd's state in this thread, and nests of tensors. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import methodcaller

from flatout.torch_private.lookup import imported_from_torch, private

with imported_from_torch():
    # torch.utils.flop_counter is built on them, but nothing public lets one see every operation of a step.
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    # Nothing public walks through nests as torch itself does, with the types that a program registers.
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten


class ListeningMode(TorchDispatchMode):
    """A mode that is never where torch.compile traces: to be skipped by it, all of the compiler would be imported."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


Switch = Callable[[], AbstractContextManager[object]]

current_dispatch_mode: Callable[[], TorchDispatchMode | None] = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode"
)
"""The innermost mode; nothing public names it."""

disable_current_modes: Switch = private("torch.utils._python_dispatch._disable_current_modes")
"""Outside of all modes for a time; the public switches reach only those that were entered by the caller."""

without_torch_function: Switch = private("torch._C.DisableTorchFunction")
"""Tensors answer past every `__torch_function__`, a mode's too; the public one of this kind leaves modes on."""

without_subclass_torch_function: Switch = private("torch._C.DisableTorchFunctionSubclass")
"""Only past that of their own class; the public `Tensor.__torch_function__` also wraps the results."""

without_torch_dispatch: Switch = private("torch._C._DisableTorchDispatch")
"""Past every `__torch_dispatch__`; nothing public does that."""

current_function_mode: Callable[[], object] = private("torch.overrides._get_current_function_mode")
"""The innermost function mode, without which a mode cannot be left out of turn; nothing public names it."""

current_graph_task: Callable[[], int] = private("torch._C._current_graph_task_id")
"""The backward pass under way in this thread, -1 outside of one; nothing public tells."""

current_node: Callable[[], object] = private("torch._C._current_autograd_node")
"""The node of the graph that a backward pass is running; nothing public tells."""

next_node_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")
"""The number that the next node of a graph in this thread gets, which dates it; nothing public tells."""

node_number = methodcaller("_sequence_nr")
"""That of a node."""

saved_tensor_hooks: Callable[[bool], tuple[Callable[..., object], Callable[..., object]] | None] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
"""The hooks that `torch.autograd.graph.saved_tensors_hooks` has put on last: by them checkpointing is known."""

transform_level: Callable[[], int | None] = private("torch._C._functorch.maybe_current_level")
"""How deep inside torch.func's transforms; None outside. Nothing public tells."""

jit_trace_under_way: Callable[[], object] = private("torch._C._get_tracing_state")
"""None outside of torch.jit.trace; `torch.jit.is_tracing` is Python on top of it and is not asked for every call."""

profiler_is_on: Callable[[], bool] = private("torch.autograd._profiler_enabled")
"""Is any profiler recording, of whichever kind? Nothing public tells."""
