"""Names of private attributes of torch's objects. Importing this imports nothing, torch included.

Each is read where torch offers no question with the same answer; where torch lacks one, the reader takes the answer
that is given here as its default.
"""

from __future__ import annotations

from operator import attrgetter

COMPILED_CALL = "_compiled_call_impl"
"""nn.Module: what its `__call__` calls first; None by default. There is no other place where an instance's call can be
replaced without changing its type, its state dict, or what a deep copy of it calls."""

plain_call = attrgetter("_call_impl")
"""nn.Module: its call with hooks, past `COMPILED_CALL`; `forward` has no hooks."""

ORIGINAL_MODULE = "_orig_mod"
"""torch.compile's wrapper: the module inside, and so the prefix in the keys of its state dict."""

LAYOUT_VERSIONS = "_metadata"
"""State dict: the layout version of each layer; `load_state_dict` looks for it as an attribute of the dict."""

IS_REPLICA = "_is_replica"
"""nn.Module: a copy that DataParallel made; False by default."""

EXPORT_GUARDS = "_guards_fn"
"""Module of an exported program: the module that checks the sizes of its inputs; absent by default. Seen in 2.13."""

STEP_IS_SCHEDULED = "_wrapped_by_lr_sched"
"""Optimizer's `step`: put there by a learning rate scheduler, and not by the script; absent by default."""

TAKES_SCALE_IN_STEP = "_step_supports_amp_scaling"
"""Optimizer: its kernel skips the update itself where a gradient is inf or NaN; False by default."""

CAPTURE_WAS_WARNED_OF = "_warned_capturable_if_run_uncaptured"
"""Optimizer: True keeps its step from asking whether a CUDA graph could capture it."""

LOADER_ITERATOR = "_iterator"
"""DataLoader with persistent workers: the iterator that it keeps; None by default."""

PICKLED = "_reduce_ex_internal"
"""Tensor: how pickle and `torch.save` take one apart; `__reduce_ex__` is not asked past a mode."""

COMPILING_FLAG = "_is_compiling_flag"
"""torch.compiler: True makes `torch.compiler.is_compiling()` True; torch sets it while it exports."""

name_in_schema = attrgetter("_schema.name")
"""Operator overload: "aten::mm". The public `name()` is Python, has the overload behind it, and this is asked for every
operation."""

packet_of = attrgetter("_overloadpacket")
"""Operator overload: the operator. The public `overloadpacket` is Python, and this is asked for every operation."""
