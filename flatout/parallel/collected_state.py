"""The state of an optimizer of which each rank has the entries of some parameters, as one state dict on all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from flatout.parameters import Saved


def collected(state: Saved, own: Iterable[bool], group: ProcessGroup) -> dict[str, object]:
    """The state dict with each parameter's entry from the first rank that answers for it; a collective.

    own: of each parameter, in the optimizer's order, whether this rank does.
    """
    numbers = [number for one in state["param_groups"] for number in one["params"]]
    kept: dict[int, dict[str, object]] = state["state"]
    mine = {number: kept[number] for number, is_own in zip(numbers, own, strict=True) if is_own and number in kept}
    every: list[dict[int, dict[str, object]]] = [{}] * group.size()  # filled by torch
    forms = {number: {key: _form(value) for key, value in entry.items()} for number, entry in mine.items()}
    distributed.all_gather_object(every, forms, group=group)
    entries: dict[int, dict[str, object]] = {}
    for number in numbers:
        rank = next((rank for rank, found in enumerate(every) if number in found), None)
        if rank is not None:
            entries[number] = {
                key: _received(mine[number][key] if rank == group.rank() else form, form, rank, group)
                for key, form in every[rank][number].items()
            }
    return {**state, "state": entries}


class _Form:
    """A tensor without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type


def _form(value: object) -> object:
    return _Form(value) if isinstance(value, Tensor) else value


def _received(own: object, form: object, rank: int, group: ProcessGroup) -> object:
    if not isinstance(form, _Form):
        return form
    if not isinstance(own, Tensor):
        own = torch.empty(form.shape, dtype=form.dtype, device=form.device)
    return sent(own, rank, group)


def sent(value: Tensor, rank: int, group: ProcessGroup) -> Tensor:
    """`value` of a rank, on all of them, where it has the same shape and dtype: a collective."""
    if rank == group.rank():
        buffer = value.detach().contiguous()
    else:
        buffer = torch.empty_like(value, memory_format=torch.contiguous_format, requires_grad=False)
    distributed.broadcast(buffer, distributed.get_global_rank(group, rank), group=group)
    return buffer
