"""Recompute activations in backward instead of keeping them: less memory for more time.

'block' keeps only the inputs of each repeated block. 'selective' also keeps the results of matrix products, attention
and convolutions, which cost most to recompute; the operations between them are recomputed.

It saves memory, not time, so `flatout tune` tries it only with `--fit`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from flatout.levers.compile import repeated_blocks
from flatout.levers.lever import COSTS_TIME, Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.model_call import Call, set_call
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.torch_private.attributes import COMPILED_CALL, plain_call

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.checkpoint import CheckpointPolicy

Context: TypeAlias = AbstractContextManager[object]


class ActivationCheckpointing(Lever):
    """Recompute activations of repeated blocks in backward instead of keeping them.

    `block` keeps only each block's inputs. `selective` also keeps the results of matrix products, attention and
    convolutions, which cost most to recompute, but not in compiled blocks. Recomputation draws the same random
    numbers. It saves memory and takes time, so `flatout tune` tries it only with `--fit`.

    In a plan for `TrainStep`, `checkpointed_blocks` limits this to the first N blocks, whose activations live longest.
    """

    name = "activation checkpointing"
    plan_field = "activation_checkpointing"
    acts_on_forward = True

    def __init__(self, blocks: int | None = None) -> None:
        self.blocks = blocks

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return COSTS_TIME

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not any(module.repeated_block for module in observed.modules):
            return refuse("the model has no repeated block")
        return offer("selective", "block", reason="saves memory, costs time")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        return subject.modules.each(lambda module: _checkpoint_blocks(module, value == "selective", self.blocks))

    def wraps_blocks(self, value: Value) -> bool:
        return True


def _checkpoint_blocks(module: Module, selective: bool, count: int | None) -> Undo[Module] | None:
    blocks = repeated_blocks(module)[:count]
    if not blocks:
        return None
    before: list[Call | None] = [getattr(block, COMPILED_CALL) for block in blocks]
    for block, compiled in zip(blocks, before, strict=True):
        set_call(block, _checkpointed(block, compiled or plain_call(block), selective))
    changed = [(weakref.ref(block), compiled) for block, compiled in zip(blocks, before, strict=True)]

    def undo(module: Module) -> None:  # by what was changed: the model may have other blocks by now
        for reference, compiled in changed:
            if (block := reference()) is not None:
                set_call(block, compiled)

    return undo


def _checkpointed(block: Module, call: Call, selective: bool) -> Call:
    from torch.utils.checkpoint import checkpoint

    from flatout.torch_private.modules import NormWithStatistics

    run: Call = checkpoint
    plain: dict[str, object] = {"context_fn": _keep_products} if selective else {}
    norms = [one for one in block.modules() if isinstance(one, NormWithStatistics) and one.track_running_stats]
    eager = {"context_fn": functools.partial(_with_statistics_kept, norms, selective)} if norms else plain

    @functools.wraps(call)
    def recomputed(*args: object, **kwargs: object) -> object:
        import torch

        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        context = plain if torch.compiler.is_compiling() else eager  # a compiled graph updates statistics once
        return run(call, *args, use_reentrant=False, **context, **kwargs)

    return recomputed


def _with_statistics_kept(norms: Sequence[Module], selective: bool) -> tuple[Context, Context]:
    forward, recomputation = _keep_products() if selective else (nullcontext(), nullcontext())
    return forward, _StatisticsKept(norms, recomputation)


class _StatisticsKept:
    """A recomputation that updates copies of the running statistics: a batch counts once in them.

    It may be entered again, for a second backward pass.
    """

    def __init__(self, norms: Sequence[Module], recomputation: Context) -> None:
        self._norms, self._recomputation = norms, recomputation
        self._before: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [dict(norm._buffers) for norm in self._norms]
        for norm, buffers in zip(self._norms, self._before, strict=True):
            norm._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
        self._recomputation.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._recomputation.__exit__(kind, error, trace)
        finally:
            for norm, buffers in zip(self._norms, self._before, strict=True):
                norm._buffers.update(buffers)
            self._before = []


def _keep_products() -> tuple[Context, Context]:
    """(of the forward pass, of its recomputation)"""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = _products()

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return forward, recomputation


@functools.cache
def _products() -> frozenset[object]:
    """The operations whose results are kept; those that this build of torch has. Not the overloads that write to a
    given tensor, as compiled code calls them: what it writes to, it uses again for other results."""
    import torch

    names = (
        "mm addmm bmm baddbmm linear mkldnn_linear convolution _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu"
    )
    found = set()
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found |= {getattr(packet, one) for one in packet.overloads() if not one.endswith("out")}
    return frozenset(found)
