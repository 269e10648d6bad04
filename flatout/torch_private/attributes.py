"""Names of private attributes of torch's objects. Importing this imports nothing, torch included.

None of them has a public equivalent. Where a default is given, code falls back to it if the attribute is missing.
"""

from __future__ import annotations

from operator import attrgetter

from flatout.torch_private.lookup import Private

COMPILED_CALL = "_compiled_call_impl"
"""nn.Module: what its `__call__` calls first; None by default. It is the only way to replace the call of one instance
without changing its type, its state dict, or what a deep copy of it calls."""

COMPILED_FROM = "_torchdynamo_orig_callable"
"""function that torch.compile returned: what it compiles; absent from all others. Seen in torch 2.13."""

plain_call = attrgetter("_call_impl")
"""nn.Module: its call with hooks, bypassing `COMPILED_CALL`. The public `forward` runs no hooks."""

ORIGINAL_MODULE = "_orig_mod"
"""wrapper made by torch.compile: the wrapped module. It is also the prefix of the keys of its state dict."""

LAYOUT_VERSIONS = "_metadata"
"""State dict: the layout version of each layer; `load_state_dict` reads it from the dict's attribute."""

IS_REPLICA = "_is_replica"
"""nn.Module: True for a copy made by DataParallel; False by default."""

EXPORT_GUARDS = "_guards_fn"
"""Module of an exported program: the submodule that checks input sizes; None by default. Seen in torch 2.13."""

STEP_IS_SCHEDULED = "_wrapped_by_lr_sched"
"""Optimizer's `step`: present if a learning rate scheduler wrapped it, so not the script did; absent by default."""

TAKES_SCALE_IN_STEP = "_step_supports_amp_scaling"
"""Optimizer: its kernel skips the update by itself if a gradient is inf or NaN; False by default."""

CAPTURE_WAS_WARNED_OF = "_warned_capturable_if_run_uncaptured"
"""Optimizer: True disables the check whether a CUDA graph could capture its step."""

LOADER_ITERATOR = "_iterator"
"""DataLoader with persistent workers: the iterator it reuses; None by default."""

view_base = attrgetter("_base")
"""Tensor: the one that it is a view of; None by default."""

LOSS_REDUCTION = "_saved_reduction"
"""Node of autograd that computes a loss: 1 where it is a mean, 2 a sum, 0 neither; absent from other nodes."""

NODE_OUTPUTS = "_input_metadata"
"""Node of autograd: what it takes gradients of, with the shape of each. Seen in torch 2.13."""

PICKLED = "_reduce_ex_internal"
"""Tensor: how pickle and `torch.save` serialize one. A mode is not active there."""

COMPILING_FLAG = "_is_compiling_flag"
"""torch.compiler: the value of `torch.compiler.is_compiling()` outside of tracing; torch.export sets it to True."""


def name_in_schema(operation: Private) -> str:
    """Operator overload: "aten::mm", without the name of the overload, which the public `name()` appends. Higher order
    operator, which has no overloads: "higher_order::flex_attention"."""
    schema = getattr(operation, "_schema", None)
    return f"higher_order::{operation.name()}" if schema is None else str(schema.name)


def packet_of(operation: object) -> object:  # as above
    """Operator overload: its operator. The public `overloadpacket` adds a Python call for every operation. A higher
    order operator is its own."""
    return getattr(operation, "_overloadpacket", operation)


def changed_arguments(operation: object) -> tuple[int, ...]:
    """Operator overload: places of the arguments that it changes, by its schema; no public equivalent."""
    arguments = getattr(getattr(operation, "_schema", None), "arguments", ())
    return tuple(place for place, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write)


PROFILER_STARTS = ("_prepare_profiler", "_enable_profiler")
"""torch.autograd.profiler: what every profiler of torch calls as it starts, which fails where one is on."""

TOTAL_NORM = "_get_total_norm"
"""torch.nn.utils.clip_grad: what `clip_grad_norm_` calls, also where a script imported that by name."""
