"""Fully sharded data parallel (torch's FSDP2): each rank holds a part of every parameter, gradient and moment.

A block's parameters are gathered just before it runs and let go of right after; its gradients are averaged and
scattered as soon as they are there. Repeated blocks are sharded one by one, the rest of the model together, and with it
blocks that share parameters.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from flatout.data.nested import tensors_in
from flatout.errors import PlanError, UsageError
from flatout.levers.compile import repeated_blocks
from flatout.parallel.averaging import averaged_beside_model, refuse_beside_model, same_on_all_ranks
from flatout.parallel.strategy import Strategy, group_or_none
from flatout.parallel.whole_tensors import CUT, is_distributed, like
from flatout.torch_private.attributes import view_base
from flatout.torch_private.dispatch import disable_current_modes

if TYPE_CHECKING:
    from flatout.plan import Plan

_NOT_ON_PARTS = ("Adafactor", "Rprop")
"""Optimizers of torch whose operations its DTensors lack."""


def sharded_by_user(model: torch.nn.Module) -> Strategy | None:
    """None: it was not given to fully_shard.

    Each part's gradients are scattered at once, so nothing holds a reduction back: whole gradients would take the
    memory that sharding saves."""
    if not isinstance(model, FSDPModule):
        return None
    parameter = next((one for one in model.parameters() if is_distributed(one)), None)
    if parameter is None:
        raise UsageError(
            "the model was given to fully_shard, and has no sharded parameter",
            limit="its ranks are those of its parameters",
            remedy="pass a model with parameters to fully_shard",
        )
    mesh = parameter.device_mesh  # type: ignore[attr-defined]  # of a DTensor
    if mesh.ndim > 1 and parameter.placements[0].is_replicate():  # type: ignore[attr-defined]
        raise UsageError(
            f"the model was given to fully_shard on a mesh of {mesh.ndim} dimensions, replicated along the first",
            limit="its gradients are averaged over all of these ranks, and losses here over one dimension",
            remedy="give fully_shard a mesh of one dimension",
        )
    outputs = _Outputs()
    return Strategy(
        group=group_or_none(mesh.get_group(0)),
        wrapper=outputs.noted,
        after_loss=outputs.check,
        calls_are_collective=True,
    )


class _Outputs:
    """The model's outputs, until the loss is there. One that is a view and was changed in place has lost the hook by
    which FSDP gathers the parameters again for the backward pass: gradients would be wrong without an error."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int]] = []
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)  # it is checked here

    def noted(self, module: torch.nn.Module, call: Callable[[], object]) -> object:
        output = call()
        for _, tensor in tensors_in(output, "output"):
            if isinstance(tensor, torch.Tensor) and view_base(tensor) is not None:
                self._seen.append((tensor.detach(), tensor._version))  # they count changes together
        return output

    def check(self) -> None:
        seen, self._seen = self._seen, []
        for tensor, version in seen:
            if tensor._version != version:
                raise UsageError(
                    "loss_fn changed an output of the model in place",
                    limit="under fully_shard the gradients would be wrong: the output is a view",
                    remedy="write out = out + x in place of out += x, or clone the output first",
                )


def sharded(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, mesh: DeviceMesh | None = None
) -> Strategy:
    """Shard the model over all ranks, in place, and give the optimizer the sharded parameters.

    Every rank begins with rank 0's weights. State that the optimizer holds already is sharded with its parameters.
    What the model returns keeps its dtype under fsdp_dtype, so that losses are computed in fp32. With fsdp_cpu_offload
    the parts stay in the host's memory, and the model may be there too when it is given. mesh: the ranks over which it
    is sharded, which have the same values already; None: all.
    """
    blocks = check_shardable(model, optimizer)
    before = dict(model.named_parameters(remove_duplicate=False))
    device = next(iter(before.values())).device.type
    offload = OffloadPolicy()
    if plan.fsdp_cpu_offload:
        _check_offload()
        device, offload = "cuda", CPUOffloadPolicy()
    if device != "cpu":
        refuse_beside_model(model, optimizer, "fsdp")
    if mesh is None:
        same_on_all_ranks(model)
        mesh = mesh_of((distributed.get_world_size(),), device)
    gathered = torch.bfloat16 if plan.fsdp_dtype == "bf16" else None
    inside = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=gathered and torch.float32)
    outside = replace(inside, output_dtype=gathered and torch.float32)
    again = False if plan.fsdp_keep_gathered else None  # None: torch's default, which gathers blocks twice
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inside, offload_policy=offload, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=outside, offload_policy=offload, reshard_after_forward=again)
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        if hasattr(old, CUT):  # this rank's part of a layer was sharded further
            setattr(after[name], CUT, getattr(old, CUT))
    exchange_parameters(optimizer, [(old, after[name]) for name, old in before.items()])
    strategy = sharded_by_user(model)
    assert strategy is not None, "it has just been sharded"
    if strategy.group is not None:
        strategy.after_backward = averaged_beside_model(model, optimizer, strategy.group)
    return strategy


def mesh_of(sizes: tuple[int, ...], device: str, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """All ranks, in so many rows and columns. A collective: of its groups."""
    with disable_current_modes():  # it computes with the ranks' numbers, in a forecast too
        return init_device_mesh(device, sizes, mesh_dim_names=names)


def check_shardable(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    """The blocks that are sharded one by one. UsageError for what FSDP2 does not take, before anything is sharded."""
    _check_optimizer(optimizer)
    _check_parameters(dict(model.named_parameters(remove_duplicate=False)))
    blocks = _separate_blocks(model)
    _check_dtypes(model, blocks)
    return blocks


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    for name, one in parameters.items():
        if one.ndim == 0:
            what, remedy = "has no dimension", "give it one, with a single element: torch.nn.Parameter(torch.ones(1))"
        elif not one.numel():
            what, remedy = f"has the shape {list(one.shape)}, without an element", "leave it out of the model"
        elif not one.is_contiguous():
            what, remedy = "is not contiguous in memory", "make it so: model.to(memory_format=torch.contiguous_format)"
            if one.ndim not in (4, 5):
                remedy = "make it so: torch.nn.Parameter(values.contiguous())"
        elif one._backward_hooks or one._post_accumulate_grad_hooks:
            what, remedy = "has hooks on its gradient, which its parts would not have", "remove them"
        else:
            continue
        raise UsageError(
            f"the parameter {name} {what}, and parallel is 'fsdp'",
            limit="torch's FSDP2 cuts each parameter along its first dimension",
            remedy=f"{remedy}; or use parallel = 'ddp'",
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = next((name for name in _NOT_ON_PARTS if isinstance(optimizer, getattr(torch.optim, name))), None)
    if kind is not None:
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}, and parallel is 'fsdp'",
            limit=f"torch's {kind} does not update parameters of which a rank has a part (DTensors)",
            remedy="use another, such as AdamW, or parallel = 'zero1'",
        )


def _check_dtypes(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
    """UsageError where parameters that are gathered together, a block's or those of the rest, differ in dtype."""
    names = {id(one): name for name, one in model.named_parameters()}
    apart = {id(one) for block in blocks for one in block.parameters()}
    rest = [one for one in model.parameters() if id(one) not in apart]
    for together in (*(block.parameters() for block in blocks), rest):
        first_of: dict[torch.dtype, str] = {}
        for one in together:
            if one.requires_grad:
                first_of.setdefault(one.dtype, names[id(one)])
        if len(first_of) > 1:
            listed = " and ".join(f"{name} is {str(dtype)[6:]}" for dtype, name in first_of.items())
            raise UsageError(
                f"{listed}, and parallel is 'fsdp'",
                limit="torch's FSDP2 gathers a block's parameters together, and those around the blocks, in one dtype",
                remedy="make them alike, as model.float() does; or use parallel = 'ddp' or 'zero1'",
            )


def _separate_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks that share no parameter with anything outside of them. The others are sharded with the rest
    of the model, together: FSDP2 has a shared parameter in one group alone."""
    blocks = repeated_blocks(model)
    users = Counter(id(one) for block in blocks for one in {id(one): one for one in block.parameters()}.values())
    inside = {module for block in blocks for module in block.modules()}
    users.update(id(one) for module in model.modules() if module not in inside for one in module._parameters.values())
    return [block for block in blocks if all(users[id(one)] == 1 for one in block.parameters())]


def _check_offload() -> None:
    if not torch.cuda.is_available():
        raise PlanError(
            "fsdp_cpu_offload on a machine without a GPU that torch can use",
            limit="parameters are in the host's memory already",
            remedy="drop it",
        )
    backends = distributed.get_backend_config()
    if "cpu:" not in backends:
        raise PlanError(
            f"fsdp_cpu_offload, and the ranks send to each other by {backends}",
            limit="the norm of gradients in the host's memory is added up there",
            remedy="let Flatout begin torch.distributed, or: init_process_group('cpu:gloo,cuda:nccl')",
        )


def reshard(model: torch.nn.Module, *, failed: bool = False) -> None:
    """Let go of parameters that were gathered for a forward pass that no backward pass follows; failed: it raised."""
    reset: Callable[[], None] | None = getattr(model, "reset_iter_state", None)  # torch 2.13 has it
    if failed and reset is not None:  # else FSDP2 takes the pass for one that is under way
        reset()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def exchange_parameters(optimizer: torch.optim.Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Have the optimizer update the second of each pair in place of the first; its state of that one goes along."""
    new = {id(old): (old, parameter) for old, parameter in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [new[id(one)][1] if id(one) in new else one for one in group["params"]]
    for old, parameter in new.values():
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[parameter] = {key: like(parameter, value) for key, value in state.items()}
