"""FSDP with tensor parallelism: neighbouring ranks share each layer and a batch, FSDP2 shards across the others.

    4 ranks, tensor_ranks = 2     share each layer and a batch
    share the parts (FSDP2)         rank 0    rank 1
                                    rank 2    rank 3

Neighbours are on one machine, with the fastest links, for what they exchange in every layer. Each layer is cut first,
and its parts are sharded: what FSDP gathers is a rank's part of a layer, never all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import distributed

from flatout.parallel.shard import check_shardable, mesh_of, sharded, sharded_by_user
from flatout.parallel.strategy import Strategy
from flatout.parallel.tensor.training import check_elementwise, split_over_ranks
from flatout.parallel.whole_tensors import across_of

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.plan import Plan


def split_and_sharded(model: Module, optimizer: Optimizer, plan: Plan) -> Strategy:
    """Cut the model's layers and shard the parts, in place, from rank 0's weights; a model where that was done goes on
    as it is.

    Raises UsageError, before anything is changed, for what either of the two does not take.
    """
    assert plan.tensor_ranks is not None
    known = across_of(model)
    if known is not None:
        layers, parts = split_over_ranks(model, optimizer, plan, known.group), sharded_by_user(model)
    else:
        check_elementwise(optimizer)
        check_shardable(model, optimizer)
        device = next(model.parameters()).device.type
        sizes = (distributed.get_world_size() // plan.tensor_ranks, plan.tensor_ranks)
        mesh = mesh_of(sizes, device, ("fsdp", "tensor"))
        layers = split_over_ranks(model, optimizer, plan, mesh.get_group("tensor"))
        parts = sharded(model, optimizer, plan, mesh["fsdp"])
    assert parts is not None, "it has been sharded"
    return replace(
        parts,
        together=distributed.group.WORLD,
        before_step=layers.before_step,
        after_backward=layers.after_backward,
        total_norm=layers.total_norm,
    )
