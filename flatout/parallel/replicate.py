"""Data parallel: every rank has the whole model, and gradients are averaged over the ranks by torch's DDP.

The model itself is not wrapped: its calls are routed through a DDP, so that its type, its attributes and the names in
its state dict stay as they are, and it can be called by itself, as in an evaluation, without the other ranks.

DDP waits for the gradient of every parameter, unless it is told to walk through the graph in every step to find those
that get none. Whether there are any is seen in the first step, whose gradients are averaged here, after the backward
pass; DDP takes over from the second step on. A model that is called several times for one loss, with parameters that
get no gradient, is one that DDP cannot take: its gradients go on being averaged here.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from flatout.errors import UsageError
from flatout.memory.fake_run import is_fake
from flatout.parallel.averaging import (
    are_sent_as_they_are,
    average_gradients,
    averaged_beside_model,
    same_on_all_ranks,
    sent_by_first,
)
from flatout.parallel.strategy import Strategy, group_or_none

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from flatout.plan import Plan

COMPRESSIONS: dict[str, Callable[..., object]] = {  # as torch has them: it does not type its hooks
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
"""How gradients are sent in half as many bytes."""
FIRST_BUCKET_MIB, BUCKET_MIB = 1, 25
"""Of gradients that torch's DDP sends together: small at first, as then nothing else is there to send."""


class _Relay(torch.nn.Module):
    """Calls whatever function it is given: a call of its model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], object]) -> object:
        return call()


def replicated(model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Strategy:
    """Train `model` on every rank, from rank 0's weights."""
    group = group_or_none(distributed.group.WORLD)
    if group is None:
        return Strategy()
    same_on_all_ranks(model)
    average_beside = averaged_beside_model(model, optimizer, group)
    all_used = False
    calls = _Calls()

    def average() -> None:
        nonlocal all_used
        all_used = average_gradients(model.parameters(), group)
        average_beside()

    def settled() -> Strategy:
        if is_fake(next(model.parameters())):
            return _as_ddp_holds_memory(model, plan, group)
        if not all_used and calls.most_of_ranks(model, group) > 1:
            return _averaged_here(model, group, average)
        return _in_ddp(model, plan, average_beside, unused=not all_used)

    return Strategy(
        group=group,
        wrapper=calls.noted,
        before_loss=calls.begin,
        after_backward=average,
        alone_before_step=True,
        settled=settled,
    )


def wrapped_by_user(ddp: DistributedDataParallel) -> Strategy:
    return Strategy(group=group_or_none(ddp.process_group), ddp=ddp, without_reduction=ddp.no_sync)


class _Calls:
    """How often the model is called for one loss, in passes of which a gradient is taken."""

    def __init__(self, limit: int | None = None) -> None:
        self._now, self._most, self._limit = 0, 0, limit

    def begin(self) -> None:
        self._now = 0

    def noted(self, _module: torch.nn.Module, call: Callable[[], object]) -> object:
        if torch.is_grad_enabled():
            self._now += 1
            self._most = max(self._most, self._now)
            if self._limit is not None and self._now > self._limit:
                raise UsageError(
                    "loss_fn calls the model more often than in the first step, and not all parameters are used",
                    limit="DDP looks for unused parameters in what one call returns",
                    remedy="continue with step = step.with_plan(step.plan)",
                )
        return call()

    def most_of_ranks(self, model: torch.nn.Module, group: ProcessGroup) -> int:
        """A collective."""
        most = torch.tensor(self._most, device=next(model.parameters()).device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
        return int(most)


def _averaged_here(model: torch.nn.Module, group: ProcessGroup, average: Callable[[], None]) -> Strategy:
    """As in the first step. Before each step the buffers are rank 0's, as DDP has it."""

    def begin(_batch: object) -> None:
        sent_by_first(model.buffers())

    return Strategy(group=group, before_step=begin, after_backward=average, alone_before_step=True)


def _as_ddp_holds_memory(model: torch.nn.Module, plan: Plan, group: ProcessGroup) -> Strategy:
    """For a forecast, since DDP cannot take fake tensors: its buckets, which are there all the time, are where the
    gradients lie once they are computed. In DDP's first step there is one for them all, then several, filled in the
    order in which the gradients came."""
    trained = [one for one in model.parameters() if one.requires_grad]
    places, came, steps = _in_buckets(trained, [math.inf]), dict[int, Tensor](), 0

    def before_loss() -> None:
        nonlocal places, steps
        if steps == 1:
            places, steps = {}, 2  # the old one is gone before there are new ones
            limits = [FIRST_BUCKET_MIB * 2**20, (plan.ddp_bucket_mib or BUCKET_MIB) * 2**20]
            places = _in_buckets(list(came.values()), limits)

    def after_backward() -> None:
        nonlocal steps
        steps = max(steps, 1)

    def moved(parameter: Tensor) -> None:
        came[id(parameter)] = parameter
        if (place := places.get(id(parameter))) is not None:  # none where it had no gradient before
            parameter.grad = place

    hooks = [one.register_post_accumulate_grad_hook(moved) for one in trained]

    def close() -> None:
        for hook in hooks:
            hook.remove()

    return Strategy(group=group, before_loss=before_loss, after_backward=after_backward, close=close)


def _in_buckets(gradients: Sequence[Tensor], limits: Sequence[float]) -> dict[int, Tensor]:
    """For each parameter the place of its gradient: in flat tensors of one dtype, each full once it has so many bytes
    as its limit says, the last of which holds for all that follow."""
    buckets: dict[torch.dtype, list[list[Tensor]]] = {}
    for one in gradients:
        of_dtype = buckets.setdefault(one.dtype, [[]])
        limit = limits[min(len(of_dtype), len(limits)) - 1]
        if sum(other.nbytes for other in of_dtype[-1]) >= limit:
            of_dtype.append([])
        of_dtype[-1].append(one)
    places: dict[int, Tensor] = {}
    for bucket in itertools.chain.from_iterable(buckets.values()):
        flat, begin = torch.empty(sum(one.numel() for one in bucket), dtype=bucket[0].dtype, device=bucket[0].device), 0
        for one in bucket:
            places[id(one)] = flat.as_strided(one.size(), one.stride(), begin)
            begin += one.numel()
    return places


def _in_ddp(model: torch.nn.Module, plan: Plan, average_beside: Callable[[], None], *, unused: bool) -> Strategy:
    own_buffers = not are_sent_as_they_are(model.buffers())
    options: dict[str, Any] = {  # keywords of DDP
        _syncs_buffers(): any(True for _ in model.buffers()) and not own_buffers
    }
    if plan.ddp_bucket_mib is not None:
        options["bucket_cap_mb"] = plan.ddp_bucket_mib
    ddp = DistributedDataParallel(
        _Relay(model),
        find_unused_parameters=unused and not plan.ddp_static_graph,  # with a static graph it sees that by itself
        static_graph=bool(plan.ddp_static_graph),
        gradient_as_bucket_view=True,
        init_sync=False,  # the ranks are the same already
        **options,
    )
    if plan.gradient_compression is not None:
        ddp.register_comm_hook(None, COMPRESSIONS[plan.gradient_compression])
    strategy = wrapped_by_user(ddp)
    strategy.before_step = _before_step(model, sends_buffers=own_buffers)
    if unused:
        calls = _Calls(None if plan.ddp_static_graph else 1)
        strategy.wrapper = lambda module, call: calls.noted(module, lambda: ddp(call))
        strategy.before_loss, strategy.after_backward = calls.begin, average_beside
        return strategy
    complete = _Complete(model)

    def after_backward() -> None:
        complete.check()
        average_beside()

    def without_reduction() -> AbstractContextManager[None]:
        complete.in_parts()
        return ddp.no_sync()

    strategy.wrapper = lambda module, call: complete.expected(lambda: ddp(call))
    strategy.without_reduction = without_reduction
    strategy.after_backward, strategy.close = after_backward, complete.close
    return strategy


class _Complete:
    """Sees to it that the reducing backward pass has a gradient for each trained parameter, as those of the first step
    had. Without one DDP leaves others as each rank has them, and says so in the next step, after the update."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._there = set[Tensor]()
        """Those that got one since the model was called last; only filled once batches come in parts."""
        self._handles: list[RemovableHandle] = []

    def in_parts(self) -> None:
        """From now on gradients may be those of earlier parts. Hooks tell; they take 1 to 2 µs for each parameter."""
        if not self._handles:
            self._handles = [one.register_post_accumulate_grad_hook(self._there.add) for one in self._trained.values()]

    def expected(self, call: Callable[[], object]) -> object:
        """A call of the model, in any part of a batch: the last one is what counts."""
        self._there.clear()
        return call()

    def check(self) -> None:
        """Before anything uses the gradients. A rank that has all of them waits for one that has not, which ends."""
        for name, one in self._trained.items():
            if one.grad is None or (self._handles and one not in self._there):
                raise UsageError(
                    f"{name} got no gradient in this step, and all parameters did in the first one",
                    limit="DDP then waits for all of them in every step, and would leave the gradients of the ranks "
                    "apart",
                    remedy="leave parallel out and train DistributedDataParallel(model, find_unused_parameters=True); "
                    "or use parallel = 'fsdp' where all ranks leave out the same layers",
                )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _before_step(model: torch.nn.Module, *, sends_buffers: bool) -> Callable[[object], None]:
    """Called before each step: UsageError where other parameters are frozen than now, as DDP averages the gradients of
    those alone that it was made with. sends_buffers: give all ranks rank 0's, which DDP cannot."""
    parameters = list(model.parameters())
    trained = [one.requires_grad for one in parameters]

    def check(_batch: object) -> None:
        if trained != [one.requires_grad for one in parameters]:
            raise UsageError(
                "parameters were frozen or unfrozen in the middle of training",
                limit="DDP averages the gradients of those that were trained from its start",
                remedy="continue with step = step.with_plan(step.plan)",
            )
        if sends_buffers:
            sent_by_first(model.buffers())

    return check


def _syncs_buffers() -> str:
    """What torch calls its option to send rank 0's buffers to all ranks in each forward pass; renamed in 2.13."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
