"""ZeRO stage 1: each rank keeps the optimizer's state of its own part of the parameters, and updates only these.

The optimizer stays the user's own object, so schedules, clipping and fused kernels work on. Before its step the
gradients of the other ranks' parameters are hidden from it; after the step every rank sends what it updated. Its
state_dict() collects the state of all ranks, so it is called on all of them; load_state_dict() takes a whole state and
keeps this rank's part: a checkpoint does not depend on the number of ranks.

torch's ZeroRedundancyOptimizer is another object with groups of its own, of which a scheduler of the user's optimizer
would know nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from flatout.errors import UsageError
from flatout.parallel.averaging import packets, taken_over
from flatout.parallel.collected_state import collected
from flatout.parallel.whole_tensors import PART_OF_STATE
from flatout.parameters import parameters_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


AT_ONCE = 2
"""Packets of updated parameters that are sent at the same time. Between two ranks on a CPU (gloo, 7 to 33 million
parameters) that takes 15 to 25 % less time than one after the other; an all_gather of whole shards takes more."""


class ShardedUpdates:
    """Hooks on an optimizer that share its updates among the ranks of a group; `close` removes them."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
        if any(one.numel() and torch.is_complex(one) for one in parameters_of(optimizer)):
            raise UsageError(
                "parallel is 'zero1', and the model has complex parameters",
                limit="they are sent as real numbers",
                remedy="use parallel = 'ddp'",
            )
        self._group, self._optimizer = group, optimizer
        self._rank, self._count = group.rank(), group.size()
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._owners: list[int] = []
        self._drop_others()
        self._handles = [
            optimizer.register_step_pre_hook(self._hide),
            optimizer.register_step_post_hook(self._share),
            optimizer.register_state_dict_post_hook(self._collect),
            optimizer.register_load_state_dict_post_hook(lambda _: self._drop_others()),
        ]

    def owners(self) -> list[int]:
        """Of each parameter, in the optimizer's order, the rank that updates it: of each group the largest first, each
        to the rank that has least so far. The same on all ranks, whatever trained before; a group that is added later
        (add_param_group) changes no owner, which has the state."""
        groups: list[list[Tensor]] = [group["params"] for group in self._optimizer.param_groups]
        if sum(map(len, groups)) == len(self._owners):
            return self._owners
        load, owners = [0] * self._count, list[int]()
        for parameters in groups:
            owner = [0] * len(parameters)
            for number in sorted(range(len(parameters)), key=lambda one: (-parameters[one].numel(), one)):
                rank = min(range(self._count), key=lambda one: (load[one], one))
                owner[number], load[rank] = rank, load[rank] + parameters[number].numel()
            owners += owner
        self._owners = owners
        return owners

    def gather_state(self) -> None:
        """Hold the state of all parameters on every rank; a collective. To be closed then."""
        entries = self._optimizer.state_dict()["state"]
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            if number in entries:
                self._optimizer.state[parameter] = entries[number]
        _has_whole_state(self._optimizer)

    def close(self) -> None:
        """The optimizer steps by itself again; on each rank with the state of its own part only, if it has any and it
        was not gathered."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.register_load_state_dict_post_hook(_has_whole_state)

    # around a step

    def _hide(self, *_: object) -> None:
        parameters = zip(parameters_of(self._optimizer), self.owners(), strict=True)
        self._hidden = [(one, one.grad) for one, owner in parameters if owner != self._rank]
        for one, _grad in self._hidden:
            one.grad = None

    def _share(self, *_: object) -> None:
        for one, gradient in self._hidden:
            one.grad = gradient
        self._hidden = []
        by_owner: list[list[Tensor]] = [[] for _ in range(self._count)]
        for parameter, owner in zip(parameters_of(self._optimizer), self.owners(), strict=True):
            if parameter.grad is not None:  # averaged by DDP: the same ones on all ranks
                by_owner[owner].append(parameter)
        with torch.no_grad():
            self._send([packets(tensors) for tensors in by_owner])

    def _send(self, by_owner: list[list[list[Tensor]]]) -> None:
        """The packets of all ranks in turns, AT_ONCE on the way: a link then carries both directions, and what has
        arrived is copied meanwhile."""
        under_way: deque[Callable[[], None]] = deque()
        for turn in zip_longest(*by_owner):
            for owner, packet in enumerate(turn):
                if packet is None:
                    continue
                under_way.append(self._sent(owner, packet))
                if len(under_way) == AT_ONCE:
                    under_way.popleft()()
        for finish in under_way:
            finish()

    def _sent(self, owner: int, tensors: list[Tensor]) -> Callable[[], None]:
        """Begins to send these; returns what waits for them, and takes them over where they are another rank's."""
        mine = owner == self._rank
        size = sum(one.numel() for one in tensors)
        flat = torch.cat([one.reshape(-1) for one in tensors]) if mine else tensors[0].new_empty(size)
        source = distributed.get_global_rank(self._group, owner)
        work = distributed.broadcast(flat, source, group=self._group, async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()
            if not mine:
                taken_over(tensors, flat)

        return finish

    # states

    def _drop_others(self) -> None:
        setattr(self._optimizer, PART_OF_STATE, True)
        for one, owner in zip(parameters_of(self._optimizer), self.owners(), strict=True):
            if owner != self._rank:
                self._optimizer.state.pop(one, None)

    def _collect(self, _: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:  # as torch has it
        """The whole state, on every rank: of each parameter from the rank that updates it."""
        return collected(state, [owner == self._rank for owner in self.owners()], self._group)


def _has_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Once it was gathered, or loaded after the end."""
    setattr(optimizer, PART_OF_STATE, False)
