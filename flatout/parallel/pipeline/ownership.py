"""Which rank trains which parameter of a model in stages, and what becomes of the others.

A block's parameters are trained by its stage. Of those around the blocks the first backward pass shows who needs them:
one stage (an embedding, a last layer), which then trains them alone; or several (an embedding that is also the last
layer), whose gradients are added up, so that their copies stay the same.

What another rank trains is given up: the parameter keeps its shape, and is one NaN in memory. State dicts of the model
and of the optimizer are those of one process, collected from the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from flatout.errors import UsageError
from flatout.parallel.averaging import sum_over_ranks
from flatout.parallel.collected_state import collected, sent
from flatout.parallel.tensor.parts import Across
from flatout.parallel.whole_tensors import ELSEWHERE
from flatout.parameters import parameters_of

OWNERS = "owners_of_parameters"
"""Attribute of a layer: (the ranks, {parameter or buffer: the rank that has it})."""
Place = tuple[nn.Module, str]


class Ownership:
    """Of one model; begins: the first block of each stage, and the number of blocks."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], begins: list[int], across: Across) -> None:
        self._across = across
        stage_of = {
            module: stage
            for stage in range(len(begins) - 1)
            for block in blocks[begins[stage] : begins[stage + 1]]
            for module in block.modules()
        }
        self._inside: list[tuple[Place, int]] = []
        self._around: list[Place] = []
        self._users: list[frozenset[int]] | None = None
        """Of each of those around, the ranks where it has a gradient; None before the first backward pass."""
        self._shared: list[tuple[list[int], Across]] = []
        """Numbers of those around that this rank uses together with others."""
        places: dict[nn.Parameter, list[tuple[Place, int | None]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append(((module, name), stage_of.get(module)))
        for parameter, found in places.items():
            stages = {stage for _, stage in found}
            stage = found[0][1]
            if stage is not None and len(stages) == 1:
                self._inside += [(place, stage) for place, _ in found]
            elif parameter.requires_grad:
                self._around.append(found[0][0])
        for place, stage in self._inside:
            _own(place, stage, across)
            if stage != across.rank:
                give_up(_at(place))
        for module, stage in stage_of.items():
            for name, _ in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    _own((module, name), stage, across)

    def after_backward(self, model: nn.Module) -> bool:
        """Add up the gradients of what several stages use; was it the first time, which shows who trains what?

        Raises UsageError for a gradient of what another rank trains.
        """
        first = self._users is None
        foreign = next((place for place, rank in self._inside if rank != self._across.rank and _given(place)), None)
        if self._users is None:
            if foreign is not None:
                raise self._unexpected(model, foreign)
            self._look(model)
        assert self._users is not None, "it has just been filled"
        for place, users in zip(self._around, self._users, strict=True):
            if _given(place) and self._across.rank not in users:
                foreign = place
        if foreign is not None:
            raise self._unexpected(model, foreign)
        for numbers, users_here in self._shared:
            parameters = [_at(self._around[number]) for number in numbers]
            for one in parameters:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
            sum_over_ranks([one.grad for one in parameters if one.grad is not None], users_here.group)
        return first

    def _look(self, model: nn.Module) -> None:
        """A collective: who has gradients of what is around the blocks."""
        every = self._across.of_all([_given(place) for place in self._around])
        self._users = [
            frozenset(rank for rank, flags in enumerate(every) if flags[i]) for i in range(len(self._around))
        ]
        first_of: dict[Tensor, int] = {_at(place): i for i, place in enumerate(self._around)}
        for module in model.modules():  # every place of a parameter, also where two layers share it
            for name, parameter in module.named_parameters(recurse=False):
                users = self._users[first_of[parameter]] if parameter in first_of else None
                if users:
                    _own((module, name), min(users), self._across)
        for place, users in zip(self._around, self._users, strict=True):
            if users and self._across.rank not in users:
                give_up(_at(place))
        for users in sorted({users for users in self._users if len(users) > 1}, key=sorted):
            ranks = [distributed.get_global_rank(self._across.group, rank) for rank in sorted(users)]
            group = distributed.new_group(ranks)  # a collective of all ranks, members or not
            if self._across.rank in users:
                self._shared.append(([i for i, one in enumerate(self._users) if one == users], Across(group)))

    def counted_here(self) -> list[Tensor]:
        """The parameters that this rank counts in a sum over all ranks: each is counted by one of them."""
        mine = [_at(place) for place, rank in self._inside if rank == self._across.rank]
        for place, users in zip(self._around, self._users or (), strict=False):
            if users and min(users) == self._across.rank:
                mine.append(_at(place))
        return list({id(one): one for one in mine}.values())

    def _unexpected(self, model: nn.Module, place: Place) -> UsageError:
        names = {id(one): name for name, one in model.named_parameters()}
        return UsageError(
            f"{names.get(id(_at(place)), place[1])} has a gradient on rank {self._across.rank}, and another trains it",
            limit="parallel = 'pipeline' fixes in the first step who trains what, and other ranks do not have it",
            remedy="use each parameter in every step, and none of other stages in loss_fn; or parallel = 'fsdp'",
        )


def give_up(parameter: Tensor) -> None:
    """Free its memory. Its shape stays; whatever reads it reads NaN."""
    parameter.grad = None
    setattr(parameter, ELSEWHERE, True)
    parameter.data = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(
        parameter.shape
    )


def _at(place: Place) -> Tensor:
    return place[0].get_parameter(place[1])


def _given(place: Place) -> bool:
    return _at(place).grad is not None


# state dicts


def _own(place: Place, rank: int, across: Across) -> None:
    module, name = place
    if OWNERS not in module.__dict__:
        module.__dict__[OWNERS] = across, {}
        module.register_state_dict_post_hook(_collected_state)
        module.register_load_state_dict_pre_hook(_state_of_own)
    module.__dict__[OWNERS][1][name] = rank


def _collected_state(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    across, owners = module.__dict__[OWNERS]
    for name, rank in owners.items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # these are asked for with keep_vars
            state[prefix + name] = sent(value, rank, across.group)


def _state_of_own(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """What another rank trains is not loaded: it is replaced by itself."""
    for name in module.__dict__[OWNERS][1]:
        parameter = module._parameters.get(name)
        if prefix + name in state and getattr(parameter, ELSEWHERE, False):
            state[prefix + name] = parameter


class OwnState:
    """Hooks on an optimizer, which keeps the state of what this rank trains; its state dict is that of all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, across: Across) -> None:
        self._optimizer, self._across = optimizer, across
        self.drop()
        optimizer.register_state_dict_post_hook(self._collect)
        optimizer.register_load_state_dict_post_hook(lambda _: self.drop())

    def drop(self) -> None:
        """What other ranks train."""
        for parameter in parameters_of(self._optimizer):
            if getattr(parameter, ELSEWHERE, False):
                self._optimizer.state.pop(parameter, None)

    def _collect(self, _: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:  # as torch has it
        """Of each parameter, from the first rank that trains it; a collective."""
        own = [not getattr(parameter, ELSEWHERE, False) for parameter in parameters_of(self._optimizer)]
        return collected(state, own, self._across.group)
