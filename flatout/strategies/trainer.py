"""The process that trains with the user's step: alone, or one of several ranks. `Told` says what it does.

An error of Flatout's ends it as a refusal (`flatout.script.replicas.settings`), which its parent reads.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from flatout import environment
from flatout.data.nested import countable_samples
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.machine.ranks import joined, joined_rank, joined_ranks
from flatout.parallel.communication_costs import SHARINGS
from flatout.parallel.whole_tensors import whole
from flatout.script.replicas.settings import Refusals
from flatout.script.replicas.trial_rank import dropout_left_out
from flatout.strategies.facts import facts_of
from flatout.strategies.made import endless, training_of
from flatout.strategies.told import FACTS, LOSSES, WEIGHTS, Role, Told


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder."""
    folder = Path(arguments[0])
    told = Told.of(folder)
    work: dict[Role, Callable[[Told, Path], None]] = {"train": _train, "record": _record, "facts": _facts}
    try:
        work[told.role](told, folder)
    except FlatoutError as error:
        machine = isinstance(error, MachineError)
        refusals = Refusals(folder, environment.rank() or 0)
        raise refusals.refuse(error.what, limit=error.limit, remedy=error.remedy, machine=machine) from None
    return 0


def _train(told: Told, folder: Path) -> None:
    step, batches = training_of(told.spec, told.planned())
    for batch in endless(batches, told.spec):
        if not step.steps:
            _check_share(batch, told)
        step(batch)


def _record(told: Told, folder: Path) -> None:
    """Leave the mean loss of each step, and the weights after the last one."""
    step, batches = training_of(told.spec, told.planned())
    if told.nudge:
        _nudge(step.model, told.nudge, told.nudge_seed)
    losses: list[float] = []
    with dropout_left_out(torch):
        for batch in itertools.islice(endless(batches, told.spec), told.steps):
            if not losses:
                _check_share(batch, told)
            losses.append(_of_all_ranks(step(batch)))
    step.finish()
    state = step.model.state_dict()  # whole tensors where ranks have parts of their own; a collective
    weights = {
        name: whole(value).detach().cpu().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if joined_rank() == 0:
        (folder / LOSSES).write_text(json.dumps(losses), encoding="utf-8")
        torch.save(weights, folder / WEIGHTS)


def _facts(told: Told, folder: Path) -> None:
    found = facts_of(told.spec, told.planned(), told.ranks, told.memory_limit_bytes)
    (folder / FACTS).write_text(json.dumps(asdict(found)), encoding="utf-8")


def _nudge(model: torch.nn.Module, size: float, seed: int) -> None:
    """Each weight up or down by this share, or by the least that its dtype can hold."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            signs = torch.randint(0, 2, one.shape, generator=generator) * 2 - 1
            if one.is_floating_point():
                one.mul_(1 + max(size, torch.finfo(one.dtype).eps) * signs.to(one.device, one.dtype))


def _of_all_ranks(loss: torch.Tensor) -> float:
    """That of the whole batch: the mean over the ranks."""
    if not joined():
        return float(loss)
    loss = loss.clone()
    torch.distributed.all_reduce(loss)
    return float(loss) / joined_ranks()


def _check_share(batch: object, told: Told) -> None:
    """UsageError where a rank that is to train on its share of a batch has the whole batch."""
    if told.samples is None or told.ranks == 1 or told.samples < told.ranks or told.planned().parallel not in SHARINGS:
        return
    samples = countable_samples(batch)
    if samples is not None and samples >= told.samples:
        raise UsageError(
            f"a rank has a batch of {samples} samples",
            limit=f"a batch has {told.samples} in one process, and {told.planned().parallel} gives each rank its share",
            remedy="make the batches with flatout.batches(data, batch_size, plan)",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
