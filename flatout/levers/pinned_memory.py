"""Page-locked batches for a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class PinnedMemory(Lever):
    """Page-locked batches, so that the GPU can copy them while it computes."""

    name = "pinned memory"
    plan_field = "pin_memory"
    switch = "loader"

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.share("transfer")
        if share is None:
            return Saving(expected=0.02, least=-0.05, most=0.5)
        return Saving(expected=0.5 * share, least=-0.05, most=share, why=f"copies take {share:.1%} of a step")

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the model is on the CPU")
        if not observed.loaders or all(loader.pin_memory for loader in observed.loaders):
            return refuse("no loader that lacks pin_memory feeds training")
        return offer(True, reason="batches are copied to the GPU every step")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        def before_iterator(loader: DataLoader[object]) -> None:
            loader.pin_memory = True

        return subject.before_iterators(before_iterator)
