"""Recompute activations in backward instead of keeping them: less memory for more time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flatout.buffers import version_of
from flatout.errors import UsageError
from flatout.levers.compile import repeated_blocks
from flatout.levers.lever import COSTS_TIME, Lever, Value, Verdict, offer, refuse
from flatout.levers.model_call import Call, call_of, calls_put_back, set_call
from flatout.levers.observed import Observed
from flatout.levers.recomputation import Context, RecomputedBlock
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.checkpoint import CheckpointPolicy

NO_BLOCK = "the model has no repeated block"


class ActivationCheckpointing(Lever):
    """Recompute activations of repeated blocks in backward instead of keeping them.

    `block` keeps only each block's inputs. `selective` also keeps the results of matrix products, attention and
    convolutions, which cost most to recompute, but not in compiled blocks. Recomputation draws the same random
    numbers (torch's, Python's and numpy's), and finds the buffers that a block changes as they were. Hugging Face
    decoders train without their cache of keys and values meanwhile, as with `use_cache=False`: where the cache lays
    these out in another way, that is another rounding. It saves memory and takes time, so `flatout tune` tries it only
    with `--fit`.

    In a plan for `TrainStep`, `checkpointed_blocks` limits this to the first N blocks, whose activations live longest.
    """

    name = "activation checkpointing"
    plan_field = "activation_checkpointing"
    acts_on_forward = True
    usual_saving = COSTS_TIME

    def __init__(self, blocks: int | None = None) -> None:
        self.blocks = blocks

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not any(module.repeated_block for module in observed.modules):
            return refuse(NO_BLOCK)
        return offer("selective", "block", reason="saves memory, costs time")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        if not subject.any_model and not any(repeated_blocks(module) for module in subject.modules):
            subject.note_incident(self.name, NO_BLOCK)
        with (
            subject.modules.each(lambda module: _checkpoint_blocks(module, value == "selective", self.blocks)),
            subject.around_calls(_without_cache) if subject.any_model else nullcontext(),  # TrainStep does it by itself
        ):
            yield

    def wraps_blocks(self, value: Value) -> bool:
        return True


def _without_cache(module: Module, call: Callable[[], object]) -> object:
    with caches_off(caching(module)):
        return call()


@contextlib.contextmanager
def caches_off(configs: Sequence[Any]) -> Iterator[None]:  # as below
    """A block that is computed again would find its own keys and values in a cache, and attend to them twice."""
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def caching(model: Module) -> list[object]:  # of any class
    """The configurations of models that keep keys and values in each pass, as Hugging Face's decoders do by default."""
    configs = {id(one): one for module in model.modules() if (one := vars(module).get("config")) is not None}
    return [one for one in configs.values() if getattr(one, "use_cache", None) is True]


def _checkpoint_blocks(module: Module, selective: bool, count: int | None) -> Undo[Module] | None:
    blocks = repeated_blocks(module)[:count]
    undo = calls_put_back(blocks)
    for block in blocks:
        set_call(block, _checkpointed(block, call_of(block), selective))
    return undo


def _checkpointed(block: Module, call: Call, selective: bool) -> Call:
    from torch.utils.checkpoint import checkpoint

    run: Call = checkpoint
    plain: dict[str, object] = {"context_fn": _keep_products} if selective else {}
    found = RecomputedBlock(block)
    eager = {"context_fn": lambda: found.contexts(*_keep_products() if selective else (nullcontext(), nullcontext()))}
    kind = type(block).__name__

    @functools.wraps(call)
    def recomputed(*args: object, **kwargs: object) -> object:
        import torch

        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once
            return run(call, *args, use_reentrant=False, **plain, **kwargs)
        inputs = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        versions = [version_of(one) for one in inputs]
        result = run(call, *args, use_reentrant=False, **eager, **kwargs)
        if [version_of(one) for one in inputs] != versions:
            raise UsageError(
                f"a block of the model, {kind}, changes its input in place",
                limit="activation checkpointing computes a block a second time, from the same input",
                remedy="make its first operation one that is not in place, or drop activation_checkpointing",
            )
        return result

    return recomputed


def _keep_products() -> tuple[Context, Context]:
    """(of the forward pass, of its recomputation)"""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = _products()

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    if hasattr(forward, "respect_saved_tensors_hooks"):  # from torch 2.15 on; `checkpoint` cannot set it: it is inside
        forward.respect_saved_tensors_hooks = True  # under activation_offload, the results that are kept leave too
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
