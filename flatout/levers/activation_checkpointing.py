"""Recompute activations in backward instead of keeping them: less memory for more time.

'block' keeps only the inputs of each repeated block. 'selective' also keeps the results of matrix products, attention
and convolutions, which cost most to recompute; the operations between them are recomputed.

It saves memory, not time, so `flatout tune` tries it only with `--fit`.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flatout.levers.compile import repeated_blocks
from flatout.levers.lever import COSTS_TIME, Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.model_call import Call, set_call
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.torch_private.attributes import COMPILED_CALL, plain_call

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.checkpoint import CheckpointPolicy


class ActivationCheckpointing(Lever):
    """Recompute activations of repeated blocks in backward instead of keeping them.

    `block` keeps only each block's inputs. `selective` also keeps the results of matrix products, attention and
    convolutions, which cost most to recompute. Recomputation draws the same random numbers. It saves memory and
    takes time, so `flatout tune` tries it only with `--fit`.

    blocks: how many of them, starting from the first, whose activations would be kept longest; None: all.
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
        set_call(block, _checkpointed(compiled or plain_call(block), selective))

    def undo(module: Module) -> None:
        for block, compiled in zip(repeated_blocks(module)[:count], before, strict=True):
            set_call(block, compiled)

    return undo


def _checkpointed(call: Call, selective: bool) -> Call:
    from torch.utils.checkpoint import checkpoint

    run: Call = checkpoint
    context: dict[str, object] = {"context_fn": _keep_products} if selective else {}

    @functools.wraps(call)
    def recomputed(*args: object, **kwargs: object) -> object:
        import torch

        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return run(call, *args, use_reentrant=False, **context, **kwargs)

    return recomputed


def _keep_products() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """(context of the forward pass, context of its recomputation)"""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = _products()

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return forward, recomputation


@functools.cache
def _products() -> frozenset[object]:
    """The operations whose results are kept; those that this build of torch has."""
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
            found |= {getattr(packet, overload) for overload in packet.overloads()}
    return frozenset(found)
