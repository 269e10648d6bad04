"""Read whole batches from in-memory data instead of one sample at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flatout.data.fetch import batched_fetch
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine

BEYOND_THE_WAIT = 1.7
"""Times the wait for data: the most that is saved, as the steps themselves get faster where no Python code runs between
them (measured at 1.3 to 1.7 where it was more than the wait)."""


class BatchedFetch(Lever):
    """Read in-memory data by whole batches instead of sample by sample.

    One indexing operation per batch on the live data: tensors, `Subset`, and classes whose `__getitem__` only
    returns stored rows (indexed, scaled, cast, or passed through torchvision's `ToTensor` and `Normalize`). Batches
    come in the order that torch's own sampler draws. Nothing is cached, and no code of the script is skipped.
    """

    name = "batched fetch"
    plan_field = "fetch"
    names_value = False

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.share("data")
        if share is None:
            return Saving(expected=0.05, least=-0.05, most=0.9)
        most = min(BEYOND_THE_WAIT * share, (1 + share) / 2)
        return Saving(expected=0.8 * share, least=-0.05, most=most, why=f"waiting for data is {share:.1%} of a step")

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.loaders:
            return refuse("no DataLoader feeds training")
        if all(loader.workers for loader in observed.loaders):
            return refuse("the loader has workers, set by the script")
        found = next((loader for loader in observed.loaders if loader.fetch and not loader.workers), None)
        if found is None:
            return refuse(observed.loaders[0].fetch_obstacle)
        return offer("batched", reason=f"the data is in memory ({found.dataset})")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        return batched_fetch(on_mismatch=subject.reporter(self.name))
