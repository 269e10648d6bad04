"""Data parallel: every rank has the whole model, and gradients are averaged over the ranks by torch's DDP.

The model itself is not wrapped: its calls are routed through a DDP, so that its type, its attributes and the names in
its state dict stay as they are, and it can be called by itself, as in an evaluation, without the other ranks.

DDP waits for the gradient of every parameter, unless it is told to walk through the graph in every step to find those
that get none. Whether there are any is seen in the first step, whose gradients are averaged here, after the backward
pass; DDP takes over from the second step on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from flatout.errors import UsageError
from flatout.memory.fake_run import is_fake
from flatout.parallel.strategy import Strategy, group_or_none

if TYPE_CHECKING:
    from flatout.plan import Plan

COMPRESSIONS: dict[str, Callable[..., Any]] = {  # as torch has them: it does not type its hooks
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
"""How gradients are sent in half as many bytes."""
PACKET_BYTES = 25 << 20
"""Tensors are sent together, up to so many bytes at a time: as many as DDP's buckets hold."""


class _Calls(torch.nn.Module):
    """Calls whatever function it is given: a call of its model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], object]) -> object:
        return call()


def replicated(model: torch.nn.Module, plan: Plan) -> Strategy:
    """Train `model` on every rank, from rank 0's weights."""
    group = group_or_none(distributed.group.WORLD)
    if group is None:
        return Strategy()
    same_on_all_ranks(model)
    all_used = False

    def average() -> None:
        nonlocal all_used
        all_used = average_gradients(model.parameters(), group)

    def settled() -> Strategy:
        if is_fake(next(model.parameters())):
            return _as_ddp_holds_memory(model, group)
        return _in_ddp(model, plan, unused=not all_used)

    return Strategy(group=group, after_backward=average, settled=settled)


def wrapped_by_user(ddp: DistributedDataParallel) -> Strategy:
    return Strategy(group=group_or_none(ddp.process_group), ddp=ddp, without_reduction=ddp.no_sync)


def same_on_all_ranks(model: torch.nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers: ranks that drew them from different seeds would each train
    another model."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().contiguous()
            distributed.broadcast(sent, 0)
            if not tensor.is_contiguous():
                tensor.copy_(sent)


def average_gradients(parameters: Iterable[Tensor], group: ProcessGroup) -> bool:
    """The mean of the ranks' gradients, in place; a rank without one counts as 0. Were there all, on all ranks?"""
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        return True
    counts, ranks = _numbers_of_gradients(trained, group), group.size()
    used = [one for one, count in zip(trained, counts, strict=True) if count]
    for one in used:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        if one.grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of a parameter of shape {list(one.shape)} is sparse",
                limit="gradients are averaged whole",
                remedy="make its embedding without sparse=True",
            )
    for packet in packets([one.grad for one in used if one.grad is not None]):
        flat = torch.cat([one.reshape(-1) for one in packet])
        distributed.all_reduce(flat, group=group)
        flat /= ranks
        for one, part in zip(packet, flat.split([one.numel() for one in packet]), strict=True):
            one.copy_(part.view(one.shape))
    return min(counts) == ranks


def _numbers_of_gradients(parameters: Sequence[Tensor], group: ProcessGroup) -> list[int]:
    """Of each parameter, how many ranks have a gradient of it. In a forecast all ranks are like this one."""
    given = [int(one.grad is not None) for one in parameters]
    if is_fake(parameters[0]):
        return [one * group.size() for one in given]
    counts = torch.tensor(given, dtype=torch.int32, device=parameters[0].device)
    distributed.all_reduce(counts, group=group)
    numbers: list[int] = counts.tolist()
    return numbers


def packets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one dtype and device, each of up to PACKET_BYTES or a single tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for one in tensors:
        found = kinds.setdefault((one.dtype, one.device), [[]])
        if found[-1] and sum(other.nbytes for other in found[-1]) + one.nbytes > PACKET_BYTES:
            found.append([])
        found[-1].append(one)
    return [packet for found in kinds.values() for packet in found]


def _as_ddp_holds_memory(model: torch.nn.Module, group: ProcessGroup) -> Strategy:
    """For a forecast, since DDP cannot take fake tensors: its buckets, which are there all the time, are where the
    gradients lie once they are computed."""
    trained = [one for one in model.parameters() if one.requires_grad]
    buckets = {id(one): torch.empty_like(one) for one in trained}

    def moved(parameter: Tensor) -> None:
        parameter.grad = buckets[id(parameter)]

    hooks = [one.register_post_accumulate_grad_hook(moved) for one in trained]

    def close() -> None:
        for hook in hooks:
            hook.remove()

    return Strategy(group=group, close=close)


def _in_ddp(model: torch.nn.Module, plan: Plan, *, unused: bool) -> Strategy:
    options: dict[str, Any] = {_syncs_buffers(): any(True for _ in model.buffers())}  # keywords of DDP
    if plan.ddp_bucket_mib is not None:
        options["bucket_cap_mb"] = plan.ddp_bucket_mib
    ddp = DistributedDataParallel(
        _Calls(model),
        find_unused_parameters=unused and not plan.ddp_static_graph,  # with a static graph it sees that by itself
        static_graph=bool(plan.ddp_static_graph),
        gradient_as_bucket_view=True,
        init_sync=False,  # the ranks are the same already
        **options,
    )
    if plan.gradient_compression is not None:
        ddp.register_comm_hook(None, COMPRESSIONS[plan.gradient_compression])
    strategy = wrapped_by_user(ddp)
    strategy.wrapper = lambda module, call: ddp(call)
    strategy.before_step = _frozen_as(model)
    return strategy


def _frozen_as(model: torch.nn.Module) -> Callable[[object], None]:
    """Called before each step: UsageError where other parameters are frozen than now, as DDP averages the gradients of
    those alone that it was made with."""
    parameters = list(model.parameters())
    trained = [one.requires_grad for one in parameters]

    def check(_batch: object) -> None:
        if trained != [one.requires_grad for one in parameters]:
            raise UsageError(
                "parameters were frozen or unfrozen in the middle of training",
                limit="DDP averages the gradients of those that were trained from its start",
                remedy="continue with step = step.with_plan(step.plan)",
            )

    return check


def _syncs_buffers() -> str:
    """What torch calls its option to send rank 0's buffers to all ranks in each forward pass; renamed in 2.13."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
