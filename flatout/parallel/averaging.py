"""Same values and mean gradients on all ranks, of whole tensors.

Strategies see to the model's parameters. Those that the optimizer trains and the model does not have, such as a
temperature or class centres of the loss, are made the same on all ranks, and their gradients averaged, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from flatout.errors import UsageError
from flatout.memory.fake_run import is_fake
from flatout.parallel.whole_tensors import is_distributed
from flatout.parameters import parameters_of

_GLOO_SENDS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
)
_SENT_AS_BYTES = frozenset(one for one in vars(torch).values() if isinstance(one, torch.dtype)) - _GLOO_SENDS
PACKET_BYTES = 25 << 20
"""Tensors are sent together, up to so many bytes at a time: as many as DDP's buckets hold."""


def same_on_all_ranks(model: torch.nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers: ranks that drew them from different seeds would each train
    another model."""
    sent_by_first((*model.parameters(), *model.buffers()))


def sent_by_first(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Take over rank 0's values; a collective of all ranks. group: None: torch's own.

    Raises UsageError, on all ranks, for a sparse tensor.
    """
    with torch.no_grad():
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise UsageError(
                    f"a parameter or buffer of shape {list(tensor.shape)} is sparse",
                    limit="every rank begins with the values of rank 0, which are sent whole",
                    remedy="make it dense, or keep it out of the model's buffers",
                )
            sent = tensor.detach().contiguous()
            # Bytes, where gloo lacks the dtype: it sends no float8, no int16 and no unsigned numbers beyond bytes.
            as_bytes = sent.dtype in _SENT_AS_BYTES and sent.numel() > 0
            distributed.broadcast(sent.reshape(-1).view(torch.uint8) if as_bytes else sent, 0, group=group)
            if not tensor.is_contiguous() and not torch.equal(tensor, sent):
                _take_over(tensor, sent)


def _take_over(tensor: Tensor, sent: Tensor) -> None:
    try:
        tensor.copy_(sent)
    except RuntimeError as error:
        raise UsageError(
            f"a parameter or buffer of shape {list(tensor.shape)} differs from that of rank 0, and its elements share "
            "memory",
            limit="every rank begins with the values of rank 0",
            remedy="make it with .clone() or .contiguous() after .expand()",
        ) from error


def are_sent_as_they_are(tensors: Iterable[Tensor]) -> bool:
    """Can torch's own code, as that of DDP, send all of them and write what it gets to them?"""
    return all(
        one.layout == torch.strided and one.dtype not in _SENT_AS_BYTES and not _overlaps(one) for one in tensors
    )


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
    sum_over_ranks([one.grad for one in used if one.grad is not None], group, divided_by=ranks)
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


def sum_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup, *, divided_by: int = 1) -> None:
    """Of each tensor the sum of all ranks, in place."""
    for packet in packets(tensors):
        flat = torch.cat([one.reshape(-1) for one in packet])
        distributed.all_reduce(flat, group=group)
        taken_over(packet, flat if divided_by == 1 else flat.div_(divided_by))


def taken_over(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Give tensors the values that lie one after the other in `flat`."""
    for one, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        one.copy_(part.view(one.shape))


def packets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one dtype and device, each of up to PACKET_BYTES or a single tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for one in tensors:
        found = kinds.setdefault((one.dtype, one.device), [[]])
        if found[-1] and sum(other.nbytes for other in found[-1]) + one.nbytes > PACKET_BYTES:
            found.append([])
        found[-1].append(one)
    return [packet for found in kinds.values() for packet in found]


def beside_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer trains besides the model's parameters, but for any that are spread over ranks (DTensors)."""
    own = {id(one) for one in model.parameters()}
    return [one for one in parameters_of(optimizer) if id(one) not in own and not is_distributed(one)]


def refuse_beside_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer, parallel: str) -> None:
    """UsageError where there is any of that.

    Under "tensor" and "pipeline" a rank computes a part of the loss, or none, and so of their gradients. Under "fsdp"
    torch's kernels for GPUs clip and update all of a group at once, and take no whole tensors beside DTensors.
    """
    found = beside_model(model, optimizer)
    if found:
        raise UsageError(
            f"the optimizer trains a parameter of shape {list(found[0].shape)} that is not the model's",
            limit=f"parallel = {parallel!r} shares the training of the model alone",
            remedy="use parallel = 'ddp' or 'zero1', or make it a parameter that the model uses in its forward",
        )


def averaged_beside_model(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup
) -> Callable[[], None]:
    """Begin with rank 0's values, a collective. Returns what averages the gradients of a step, which is one too."""
    sent_by_first(beside_model(model, optimizer))
    known = -1
    beside: list[Tensor] = []

    def average() -> None:
        nonlocal known, beside
        moved = len(parameters_of(optimizer))
        if moved != known:  # a group may join later
            known, beside = moved, beside_model(model, optimizer)
        average_gradients(beside, group)

    return average
