"""What all sources of batches have in common: how they hand batches out, and the place in the data that is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.units import counted

if TYPE_CHECKING:
    import torch


class PlaceState(TypedDict):
    """Where a run is in its data."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class HandingOut:
    """How a source hands out batches: their size, the plan, the device, and this rank's part of each."""

    batch_size: int
    plan: Plan
    drop_last: bool
    device: torch.device
    rank: int
    ranks: int

    @property
    def least_samples(self) -> int:
        """The least samples of a last batch; with fewer it is dropped."""
        return self.batch_size if self.drop_last else self.ranks


def left_out_text(rest: int, samples: int, out: HandingOut) -> str:
    """The warning of samples at the end of an epoch that are no batch."""
    than = "there are ranks" if out.plan.tensor_ranks is None else "the shares of the ranks"
    return (
        f"an epoch leaves out {counted(rest, 'sample')} of {samples}: the last batch would have fewer than {than} "
        f"({out.ranks})"
    )


def other_kind(counted: str, here: str) -> UsageError:
    """For a position that was saved of data of another kind."""
    remedy = "resume with the data of that run"
    return UsageError(f"the saved position counts {counted}", limit=f"here the data is {here}", remedy=remedy)


def no_batch(what: str, epoch: int, *, once: bool) -> UsageError:
    """once: the data is an iterator."""
    return UsageError(
        f"the {what} yielded no batch in epoch {epoch}",
        limit="an iterator is exhausted after one epoch" if once else "an epoch has at least one batch",
        remedy="pass an object whose __iter__ starts over each time, or train for as long as the data lasts",
    )
