"""What a training step has to know of a model whose layers are cut over ranks.

All ranks have the same batch, so losses and gradients are those of one process: nothing is averaged. Parameters that
are not cut (norms, positions, biases of sums) have the same gradient on every rank, from the same bits.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: state dicts, as torch has them

import torch
from torch import Tensor, distributed

from flatout.data.nested import map_leaves, tensors_in
from flatout.errors import UsageError
from flatout.memory.fake_run import is_fake
from flatout.parallel.averaging import same_on_all_ranks
from flatout.parallel.strategy import Strategy, group_or_none
from flatout.parallel.tensor.parts import Across, Cut, cut_of
from flatout.parallel.tensor.random import same_random_states
from flatout.parallel.tensor.splitting import Splitting
from flatout.parallel.whole_tensors import CutTensor, across_of, like, local_part, total_norm, whole_or_cut
from flatout.parameters import parameters_of
from flatout.tensor_bytes import bytes_view

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flatout.plan import Plan

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def split_over_ranks(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, group: ProcessGroup | None = None
) -> Strategy:
    """Cut the model, from rank 0's weights, and the optimizer's state; a model that is cut goes on as it is.

    group: the ranks that share each layer; None: all. Raises UsageError for a model that cannot be cut, or an optimizer
    that needs whole matrices.
    """
    group = group or group_or_none(distributed.group.WORLD)
    if group is None:
        return Strategy()
    check_elementwise(optimizer)
    known = across_of(model)
    across = known or Across(group)
    if known is None:
        splitting = Splitting(model, across)
        same_on_all_ranks(model)
        splitting.carry_out()
    _keep_parts(optimizer)
    device = next(model.parameters()).device
    same_batch = SameBatch(across)

    def begin(batch: object) -> None:
        same_batch.check(batch)
        same_random_states(device, across.group)

    def agree() -> None:
        overflow_on_all(parameters_of(optimizer), across)

    return Strategy(
        together=across.group,
        calls_are_collective=True,
        before_step=begin,
        after_backward=agree if plan.precision == "fp16" else None,
        total_norm=lambda parameters: norm_of_parts(parameters, across),
    )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that may not treat each weight by itself."""
    if not any(isinstance(optimizer, getattr(torch.optim, name)) for name in _ELEMENTWISE):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}, and layers are cut over ranks",
            limit=f"it updates parts of matrices: it has to treat each weight by itself, as {', '.join(_ELEMENTWISE)}",
            remedy="use one of these, or parallel = 'zero1'",
        )


def norm_of_parts(parameters: list[Tensor], across: Across) -> Tensor:
    """The norm of the whole gradient, on every rank: what is cut counts once for each part, what is not once."""
    cut = [one.grad for one in parameters if one.grad is not None and cut_of(one) is not None]
    same = [one.grad for one in parameters if one.grad is not None and cut_of(one) is None]
    square = total_norm(cut).float().square()
    square = square.to(parameters[0].device).clone()  # the norm of nothing is on the CPU
    distributed.all_reduce(square, group=across.group)
    return (square + total_norm(same).to(square).square()).sqrt()


def overflow_on_all(parameters: list[Tensor], across: Across) -> None:
    """Where a rank's gradient is not finite, make all ranks' so: each one's scaler then skips this step."""
    gradients = [local_part(one.grad) for one in parameters if one.grad is not None]
    gradients = [one for one in gradients if one.numel()]
    bad = torch.zeros((), device=parameters[0].device)
    if gradients:
        bad = (~torch.nn.utils.get_total_norm(gradients, norm_type=float("inf")).isfinite()).float()
    distributed.all_reduce(bad, distributed.ReduceOp.MAX, group=across.group)  # also by a rank without a gradient
    if gradients:
        gradients[0].add_(torch.where(bad > 0, float("inf"), 0.0).to(gradients[0].dtype))


class SameBatch:
    """Compares the ranks' first batches: different ones would be computed with without any sense, and without an
    error."""

    def __init__(self, across: Across) -> None:
        self._across, self._compared = across, False

    def check(self, batch: object) -> None:
        """A collective, once. Raises UsageError on all ranks."""
        if self._compared or any(is_fake(one) for _, one in tensors_in(batch)):  # in a forecast there are no others
            return
        self._compared = True
        every = self._across.of_all(_digest(batch))
        ranks = distributed.get_process_group_ranks(self._across.group)
        other = next((rank for rank, digest in zip(ranks, every, strict=True) if digest != every[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has another batch than rank {ranks[0]}",
                limit=f"ranks {', '.join(map(str, ranks))} compute one model together, and so with the same batch",
                remedy="pass the plan to flatout.batches, or the same data, seed and batch to each of them",
            )


def _digest(batch: object) -> str:
    found = hashlib.sha256()

    def add(leaf: Tensor) -> Tensor:
        found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        found.update(bytes_view(leaf).numpy().tobytes())
        return leaf

    map_leaves(add, batch, lambda leaf: isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return found.hexdigest()


# an optimizer's state: parts inside, whole in its state dict

_KEEP_PARTS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _keep_parts(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        cut = cut_of(parameter)
        if cut is not None and parameter in optimizer.state:
            state = optimizer.state[parameter]
            state.update({key: cut.part(value) for key, value in state.items() if isinstance(value, Tensor)})
    if optimizer not in _KEEP_PARTS:
        _KEEP_PARTS.add(optimizer)
        optimizer.register_state_dict_post_hook(_whole_state)
        optimizer.register_load_state_dict_pre_hook(_part_of_state)


def _whole_state(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:  # as torch has it
    """A collective, unless parts are kept."""
    return _changed(optimizer, state, lambda parameter, cut, value: whole_or_cut(value, cut))


def _part_of_state(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:
    def part_of(parameter: Tensor, cut: Cut, value: Tensor | CutTensor) -> Tensor:
        part: Tensor = value.value if isinstance(value, CutTensor) else like(parameter, value)
        return part

    return _changed(optimizer, state, part_of)


def _changed(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Callable[[Tensor, Cut, Any], Tensor | CutTensor]
) -> dict[str, object]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    entries = dict(state["state"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):  # torch compares their number
        cut = cut_of(parameter)
        if cut is not None and number in entries:
            entries[number] = {
                key: change(parameter, cut, value) if isinstance(value, Tensor | CutTensor) else value
                for key, value in entries[number].items()
            }
    return {**state, "state": entries}
