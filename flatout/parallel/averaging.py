"""Same values and mean gradients on all ranks, of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from flatout.errors import UsageError
from flatout.memory.fake_run import is_fake

PACKET_BYTES = 25 << 20
"""Tensors are sent together, up to so many bytes at a time: as many as DDP's buckets hold."""


def same_on_all_ranks(model: torch.nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers: ranks that drew them from different seeds would each train
    another model."""
    sent_by_first((*model.parameters(), *model.buffers()))


def sent_by_first(tensors: Iterable[Tensor]) -> None:
    """Take over rank 0's values; a collective."""
    with torch.no_grad():
        for tensor in tensors:
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
