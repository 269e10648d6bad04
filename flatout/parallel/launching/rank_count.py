"""How many ranks a machine starts: one for each GPU that is visible; one, where there is none."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import UsageError
from flatout.machine.detect import detect
from flatout.parallel.launch_request import MOST_RANKS
from flatout.plan_document import short

AUTO = "auto"
MOST_DIGITS = 9
"""Of a number on the command line: Python refuses to read one of thousands."""


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """Ranks of this machine."""

    ranks: int
    gpus: int
    """That are visible here, and that the installed torch can drive."""
    reason: str
    """Why so many: '4 GPUs'."""


def count_ranks(asked: str = AUTO, *, option: str = "--nproc-per-node") -> RankCount:
    """asked: 'auto', or a number as text; option: what the user calls it, in errors.

    Raises UsageError for anything else, and for more ranks than GPUs, where there are any.
    """
    ranks = ranks_asked(asked, option=option)
    machine = detect()
    gpus = len(machine.usable_gpus)
    if ranks is None:
        if gpus:
            return RankCount(ranks=gpus, gpus=gpus, reason=f"{gpus} GPU{'s' * (gpus != 1)}")
        why = machine.no_devices_reason or "torch is a build for the CPU, or for a newer driver"
        return RankCount(ranks=1, gpus=0, reason=f"no GPU: {why}")
    if gpus and ranks > gpus:
        raise UsageError(
            f"{option} is {ranks}, and {gpus} GPU{'s are' if gpus > 1 else ' is'} visible",
            limit="each rank has a GPU of its own",
            remedy=f"use {option} {gpus}, or hide the GPUs to train on the CPU: CUDA_VISIBLE_DEVICES=",
        )
    return RankCount(ranks=ranks, gpus=gpus, reason="as asked")


def ranks_asked(asked: str, *, option: str = "--nproc-per-node") -> int | None:
    """The number; None: 'auto'. Raises UsageError for anything else."""
    if asked == AUTO:
        return None
    digits = asked.isascii() and asked.isdecimal() and len(asked) <= MOST_DIGITS
    if not digits or not 1 <= int(asked) <= MOST_RANKS:
        raise UsageError(
            f"{option} is {short(asked)}",
            limit=f"it is {AUTO!r} or a number from 1 to {MOST_RANKS}",
            remedy=f"use {option} {AUTO}: a rank for each GPU",
        )
    return int(asked)
