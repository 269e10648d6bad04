"""What ranks tell each other before each exchange of tensors, so that ranks that part end with the reason.

All ranks run the same script, and stay together only as long as their control flow does. A rank that leaves its loop
early, because it decides by the loss of its own share, would leave the others waiting in an exchange for ever. So
before each one every rank gives a row of numbers: what it is about to do, how often it has before, which batches it was
handed, at which learning rates. Rows that differ are the reason. The rows are exchanged on the host (gloo), also where
gradients are exchanged between GPUs: nothing waits for a device.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flatout import environment
from flatout.errors import MachineError, describe_error
from flatout.machine.ranks import TIMEOUT_SECONDS, end_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UPDATE, DATA, WEIGHTS, LOSS, END, FAILED = range(1, 7)
"""What a rank is about to do."""
_DOES = {
    UPDATE: "reads its gradients",
    DATA: "begins to draw training batches",
    WEIGHTS: "calls a model that it has not called before",
    LOSS: "begins a backward pass",
    END: "has ended",
    FAILED: "has failed",
}
END_SECONDS = 5.0
"""How long a rank that has failed waits for the others to learn of it."""


class RanksDiffer(Exception):
    """The ranks are no longer at the same place: `what` they do, the `limit` and a `remedy`; 'failed' where a rank has
    failed by itself, and says so itself."""

    def __init__(self, what: str, *, limit: str = "", remedy: str = "", failed: bool = False) -> None:
        super().__init__(what)
        self.what, self.limit, self.remedy, self.failed = what, limit, remedy, failed


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of one rank. Whole numbers of 64 bits."""

    event: int
    updates: int = 0
    backwards: int = 0
    """Since the start."""
    batches: int = 0
    order: int = 0
    """A digest of the indices of all samples in all batches so far, on all ranks."""
    rates: int = 0
    """A digest of the learning rates."""
    weights: int = 0
    """A digest of some of the weights; 0: not compared now."""
    gradients: int = 0
    """A digest of which parameters have a gradient: may differ."""
    given: int = 0
    """The bits of a number for the others."""

    @property
    def number(self) -> float:
        return float(struct.unpack("d", struct.pack("q", self.given))[0])


def bits(number: float) -> int:
    """For `Row.given`."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


_NAMES = tuple(one.name for one in fields(Row))


class Agreement:
    """The process group of the ranks, begun at the first exchange, and the rows that they compare."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.ended = False
        self._group: ProcessGroup | None = None

    @property
    def group(self) -> ProcessGroup:
        """Of all ranks. The first call begins it; it is none of the script's."""
        if self._group is None:
            self._group = self._begin()
        return self._group

    def compare(self, row: Row) -> list[Row]:
        """Every rank's row. Raises RanksDiffer, on all ranks, where they are at different places."""
        if self.count == 1:
            return [row]
        rows = self._gathered(row)
        if reason := _difference(rows, self.rank):
            self.ended = True
            raise reason
        return rows

    def end(self, *, failed: bool) -> None:
        """This rank has ended. The others learn of it if they have not; never raises."""
        if self._group is None or self.ended or self.count == 1:
            return
        self.ended = True
        with contextlib.suppress(Exception):
            row = Row(event=FAILED if failed else END)
            self._gather(row, END_SECONDS if failed else TIMEOUT_SECONDS)

    def close(self) -> None:
        """The process ends: see `end_ranks`."""
        begun, self._group = self._group is not None, None  # gloo's threads end with the last reference to it
        if begun:
            end_ranks()

    def _gathered(self, row: Row) -> list[Row]:
        try:
            return self._gather(row, TIMEOUT_SECONDS)
        except RuntimeError as error:  # of torch.distributed: the others have gone, or do not come
            self.ended = True
            raise RanksDiffer(
                f"rank {self.rank} {_DOES[row.event]}, and another rank does not answer: {describe_error(error)}",
                limit=f"it has ended, or did not come within {TIMEOUT_SECONDS:.0f} s",
                remedy="look for its error above",
            ) from None

    def _gather(self, row: Row, seconds: float) -> list[Row]:
        import torch
        from torch import distributed

        mine = torch.tensor([getattr(row, name) for name in _NAMES], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        work: Any = distributed.all_gather(found, mine, group=self.group, async_op=True)  # Any: torch has no type
        work.wait(timedelta(seconds=seconds))
        return [Row(**dict(zip(_NAMES, one.tolist(), strict=True))) for one in found]

    def _begin(self) -> ProcessGroup:
        import torch
        from torch import distributed
        from torch.distributed.distributed_c10d import init_process_group  # that of torch.distributed is the script's

        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # the only one that this rank sees
            backend = "cpu:gloo,cuda:nccl"
        hook = sys.excepthook  # torch puts its own in its place, which names the rank: the launcher does that already
        try:
            with environment.ranks_shown():
                init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
        except (RuntimeError, ValueError) as error:
            raise MachineError(
                f"the ranks did not find each other: {describe_error(error)}",
                limit="each connects to rank 0 on this machine",
            ) from error
        finally:
            sys.excepthook = hook
        world = distributed.group.WORLD
        assert world is not None
        return world


def _difference(rows: Sequence[Row], rank: int) -> RanksDiffer | None:
    """The first thing in which they differ, as a reason; None: they are at the same place."""
    if all(row.event == END for row in rows):
        return None
    for number, row in enumerate(rows):
        if row.event == FAILED:
            return RanksDiffer(f"rank {number} has failed", failed=True)
    if len({row.event for row in rows}) > 1:
        return RanksDiffer(
            _told(rows, lambda row: _DOES[row.event]),
            limit="ranks exchange gradients in every step, so all of them have to make the same steps",
            remedy="decide when to stop, or to skip a step, by what is the same on all ranks: an evaluation, not the "
            "loss of a training batch, which is that of a rank's share",
        )
    if len({row.order for row in rows}) > 1 or len({row.batches for row in rows}) > 1:
        return RanksDiffer(
            "the ranks were handed different batches",
            limit="every rank takes its share of the same batch",
            remedy="seed what orders the data, and take nothing from the clock or from the process's number",
        )
    if len({row.backwards for row in rows}) > 1:
        return RanksDiffer(
            _told(rows, lambda row: f"has made {row.backwards} backward passes"),
            limit="gradients are exchanged after the same passes on all ranks",
            remedy="do not skip a pass by the loss of a training batch, which is that of a rank's share",
        )
    if len({row.rates for row in rows}) > 1:
        return RanksDiffer(
            "the learning rates of the ranks differ",
            limit="their weights have to stay the same",
            remedy="let the schedule follow the steps, or a loss of an evaluation: that of a training batch is a "
            "rank's share",
        )
    if len({row.weights for row in rows}) > 1:
        return RanksDiffer(
            "the weights of the ranks differ",
            limit="they are the same before every step",
            remedy="change weights by an optimizer alone, from gradients, or by what is the same on all ranks",
        )
    return None


def _told(rows: Sequence[Row], tell: Callable[[Row], str]) -> str:
    """What the first rank does, and the first other one that does something else."""
    first = tell(rows[0])
    number = next(number for number, row in enumerate(rows) if tell(row) != first)
    return f"rank 0 {first}, and rank {number} {tell(rows[number])}"
