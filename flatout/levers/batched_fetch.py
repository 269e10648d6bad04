"""Take whole batches out of in-memory data instead of one sample at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.data.fetch import batched_fetch
from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine

DATA_SHARE_WORTH_TRYING = 0.03


class BatchedFetch(Lever):
    """One operation on the live data for a batch, where it is known what a sample is made of. Nothing is kept."""

    name = "batched fetch"
    plan_field = "fetch"
    exactness = "bit-identical"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.loaders:
            return refuse("no DataLoader feeds training")
        too_little = data_too_small(observed)
        if too_little:
            return refuse(too_little)
        if all(loader.workers for loader in observed.loaders):
            return refuse("the loader has workers, set by the script")
        found = next((loader for loader in observed.loaders if loader.fetch and not loader.workers), None)
        if found is None:
            return refuse(observed.loaders[0].fetch_obstacle)
        return offer("batched", reason=f"the data lie in memory ({found.dataset})")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        return batched_fetch(on_mismatch=lambda why: subject.incidents.append((self.name, why)))

    def label(self, value: Any) -> str:
        return self.name


def data_too_small(observed: Observed) -> str:
    """Why no change of the loader can pay, or '' if waiting for data is a real share of a step."""
    share = observed.share("data")
    if share is not None and share < DATA_SHARE_WORTH_TRYING:
        return f"waiting for data is {share:.1%} of a step"
    return ""
