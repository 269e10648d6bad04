"""What a plan's `parallel` stands for: how the ranks of a run share the training of one model.

    dp             no ranks: one process spreads each call of the model over the GPUs that it sees
    ddp            every rank has the whole model; gradients are averaged
    zero1          the same, and each rank keeps the optimizer's state of a part of the parameters
    fsdp           each rank keeps a part of everything: parameters, gradients, state
                   with tensor_ranks: a part of a part of every layer that so many neighbouring ranks share
    tensor         every rank has the whole batch, and a part of every layer
    pipeline       every rank has the whole batch, and some of the layers

A model that the user gave to DistributedDataParallel or fully_shard is trained as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.errors import PlanError, UsageError
from flatout.machine.ranks import ranks
from flatout.parallel.strategy import Strategy
from flatout.parallel.whole_tensors import PART_OF_STATE, STAGES, across_of, whole_shape
from flatout.plan import shares_of_batch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.plan import Plan

COMPARED = (
    "parallel",
    "micro_batches",
    "precision",
    "batch_norm",
    "gradient_compression",
    "ddp_bucket_mib",
    "ddp_static_graph",
    "fsdp_dtype",
    "fsdp_keep_gathered",
    "fsdp_cpu_offload",
    "tensor_ranks",
    "nonfinite",
)
"""Choices that decide what ranks send one another."""


def parallelize(model: Module, optimizer: Optimizer, plan: Plan) -> Strategy:
    """Share the training among this process's ranks as the plan says, or as the user did; alone, change nothing.

    Raises PlanError for choices that do not go together, UsageError for a model that cannot be shared that way.
    """
    import torch

    _check_kept(model, optimizer, plan)
    given = None if plan.tensor_ranks is not None else _as_given(model)
    if given is not None or plan.parallel is None:
        return given or Strategy()
    if plan.parallel == "dp":
        return _in_one_process(model, plan)
    if ranks().count == 1:
        return Strategy()
    from flatout.memory.fake_run import is_fake  # here: it takes a second to import
    from flatout.parallel.averaging import beside_model, refuse_beside_model

    shares_of_batch(plan, ranks().count)  # PlanError where that cannot be
    if not is_fake(next(model.parameters())):  # in a forecast there are no others
        _check_place(model)
        _check_alike(model, plan, beside_model(model, optimizer))
    if plan.parallel in ("tensor", "pipeline") or plan.tensor_ranks is not None:
        refuse_beside_model(model, optimizer, plan.parallel)
    if plan.parallel == "tensor":
        from flatout.parallel.tensor.training import split_over_ranks

        return split_over_ranks(model, optimizer, plan)
    if plan.parallel == "pipeline":
        from flatout.parallel.pipeline.training import in_stages

        return in_stages(model, optimizer, plan)
    _check_norms(model, plan)
    if plan.gradient_compression == "bf16" and not all(one.is_cuda for one in model.parameters()):
        raise PlanError(
            "gradient_compression is 'bf16', and the model is on the CPU",
            limit="torch sends bf16 gradients between GPUs",
            remedy="use 'fp16', or drop it",
        )
    if plan.batch_norm == "synced":
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if plan.tensor_ranks is not None:
        from flatout.parallel.tensor.with_fsdp import split_and_sharded

        return split_and_sharded(model, optimizer, plan)
    if plan.parallel == "fsdp":
        from flatout.parallel.shard import sharded

        return sharded(model, optimizer, plan)
    from flatout.parallel.replicate import replicated

    strategy = replicated(model, optimizer, plan)
    if plan.parallel == "zero1" and strategy.group is not None:
        from flatout.parallel.sharded_updates import ShardedUpdates

        updates = ShardedUpdates(optimizer, strategy.group)
        strategy.gather_state, strategy.close = updates.gather_state, updates.close
    return strategy


def _in_one_process(model: Module, plan: Plan) -> Strategy:
    if (count := ranks().count) > 1:
        raise PlanError(
            f"parallel is 'dp', and this is one of {count} ranks",
            limit="with 'dp' one process uses all GPUs",
            remedy="set parallel = 'ddp', or start the script without a launcher",
        )
    from flatout.parallel.data_parallel import gpus_of, spread_over_gpus

    if len(gpus := gpus_of(model)) < 2:
        return Strategy()
    _check_norms(model, plan)
    return spread_over_gpus(model, gpus, plan)


def let_go(model: Module, *, failed: bool = False) -> None:
    """Have a model in FSDP2 hold the parts of its parameters again, which are those that its optimizer has. A call that
    no backward pass follows, such as one without gradients or one that failed, leaves whole ones in their place.
    Nothing is sent."""
    if is_sharded(model):
        from flatout.parallel.shard import reshard

        reshard(model, failed=failed)


def is_sharded(model: Module) -> bool:
    """Was it given to torch's fully_shard, by `parallel` or by the user? Its package is not imported to find out."""
    return hasattr(model, "set_requires_gradient_sync")


def _check_place(model: Module) -> None:
    """Refuse a model on another GPU than this rank's, the current device: NCCL sends from that one, and torch's own
    message, where it does not hang, says nothing of the model. Local, before any collective."""
    import torch
    from torch import distributed

    places = {one.device for one in model.parameters() if one.is_cuda}
    if not places or "nccl" not in str(distributed.get_backend()):
        return
    own = torch.device("cuda", torch.cuda.current_device())
    if own in places:
        return
    raise UsageError(
        f"the model is on {min(map(str, places))}, and rank {distributed.get_rank()} has {own}",
        limit="NCCL sends from the current GPU, and each rank has one of its own",
        remedy="use model.to(flatout.ranks().device); in a script that begins torch.distributed itself, call "
        "torch.cuda.set_device with the GPU of each rank first",
    )


def _check_alike(model: Module, plan: Plan, beside: Sequence[Tensor] = ()) -> None:
    """Compare parameters, buffers and plans of all ranks: a collective, before any other. Ranks of different code would
    wait for one another, or, worse, add up gradients of different things.

    beside: what the optimizer trains besides the model's parameters.
    """
    from torch import distributed

    others = [(f"parameter {number} beside the model", one) for number, one in enumerate(beside)]
    tensors = [*model.named_parameters(), *model.named_buffers(), *others]
    here: list[str] = [f"{name} is {value!r}" for name in COMPARED if (value := getattr(plan, name)) is not None]
    here += [f"{name} has shape {list(whole_shape(one))} and dtype {str(one.dtype)[6:]}" for name, one in tensors]
    here += [f"{name} {'is' if one.requires_grad else 'is not'} trained" for name, one in model.named_parameters()]
    every: list[list[str]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(every, here)
    for rank, there in enumerate(every):
        if there == every[0]:
            continue
        first, other = next(
            (one, two)
            for one, two in zip([*every[0], "nothing more"], [*there, "nothing more"], strict=False)
            if one != two
        )
        raise UsageError(
            f"the ranks differ: on rank 0 {first}, on rank {rank} {other}",
            limit="all ranks train the same model by the same plan",
            remedy="start the same script with the same arguments on each",
        )


def _check_kept(model: Module, optimizer: Optimizer, plan: Plan) -> None:
    """A model that is on several ranks stays there: to any other strategy its parts would look like a whole model."""
    kept, asked = _earlier(model), _named(plan)
    if kept is not None and kept != asked and (kept not in ("ddp", "fsdp") or plan.tensor_ranks is not None):
        raise UsageError(
            f"parallel is {asked!r}, and the model was put on several ranks by {kept!r}",
            limit="it stays there",
            remedy="keep these choices, or restore a checkpoint of it into a new model",
        )
    if plan.parallel != "zero1" and optimizer.state and getattr(optimizer, PART_OF_STATE, False):
        raise UsageError(
            f"parallel is {plan.parallel!r}, and an earlier step with 'zero1' was closed",
            limit="each rank has the optimizer's state of a part of the parameters",
            remedy="change the plan with step = step.with_plan(plan), or make a new optimizer",
        )


def _named(plan: Plan) -> str | None:
    return plan.parallel if plan.tensor_ranks is None else f"{plan.parallel} + {plan.tensor_ranks} tensor_ranks"


def _earlier(model: Module) -> str | None:
    """How an earlier step put the model on several ranks, or, for ddp and fsdp, the user did."""
    import torch

    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    sharded = is_sharded(model)
    across = across_of(model)
    if across is not None:
        return f"fsdp + {across.count} tensor_ranks" if sharded else "tensor"
    if any(STAGES in module.__dict__ for module in model.modules()):
        return "pipeline"
    return "fsdp" if sharded else None


def _as_given(model: Module) -> Strategy | None:
    import torch

    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        from flatout.parallel.replicate import wrapped_by_user

        return wrapped_by_user(model)
    if is_sharded(model):
        from flatout.parallel.shard import sharded_by_user

        return sharded_by_user(model)
    return None


def _check_norms(model: Module, plan: Plan) -> None:
    """Statistics would be those of a rank's share, so that the training is another with every number of ranks; or the
    model that is evaluated is, where only running ones are concerned, as of an instance norm."""
    from torch.nn import SyncBatchNorm

    from flatout.torch_private.modules import BatchNorm, NormWithStatistics

    found = [
        name
        for name, layer in model.named_modules()
        if layer.training
        and isinstance(layer, NormWithStatistics)
        and (isinstance(layer, BatchNorm) or layer.running_mean is not None)
    ]
    sharer, alone = ("GPU", "GPU") if plan.parallel == "dp" else ("rank", "process")
    on_gpu = all(one.is_cuda for one in model.parameters())
    if plan.batch_norm == "synced" and not on_gpu:
        raise PlanError(
            "batch_norm is 'synced', and the model is on the CPU",
            limit="torch's SyncBatchNorm works on GPUs",
            remedy="use batch_norm = 'local', or a layer that treats each sample by itself (GroupNorm, LayerNorm)",
        )
    if plan.batch_norm == "local":
        return
    batch = [name for name in found if isinstance(model.get_submodule(name), BatchNorm)]
    running = [name for name in found if name not in batch]
    if running:
        raise UsageError(
            f"{running[0] or 'the model'} is an instance norm with running statistics, and parallel is "
            f"{plan.parallel!r}",
            limit=f"they would be those of each {sharer}'s share: other statistics on every {sharer}",
            remedy="make it with track_running_stats=False, or set batch_norm = 'local' to accept that",
        )
    apart = [name for name in batch if not isinstance(model.get_submodule(name), SyncBatchNorm)]
    if apart and plan.batch_norm is None:
        synced = "batch_norm = 'synced', or " if on_gpu and sharer == "rank" else ""
        raise UsageError(
            f"{apart[0] or 'the model'} is a batch norm, and parallel is {plan.parallel!r}",
            limit=f"its mean and variance would be those of each {sharer}'s share: not the training of one {alone}",
            remedy=f"set {synced}batch_norm = 'local' to accept that; or use GroupNorm or LayerNorm",
        )
