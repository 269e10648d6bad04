"""Keep an in-memory data set on the GPU: no copy per step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.data.fetch import batched_fetch
from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class DataOnDevice(Lever):
    """Batches are indexed on the device; the script's own `.to(device)` then finds them there."""

    name = "data set on the device"
    plan_field = "data_device"
    exactness = "bit-same"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the script trains on the CPU")
        if not any(loader.fetch == "batched" and not loader.workers for loader in observed.loaders):
            return refuse("no loader over tensors in memory feeds training")
        if any(loader.pin_memory for loader in observed.loaders):
            return refuse("the script pins its batches, and only the CPU's memory can be pinned")
        return offer("cuda", reason="the data are tensors in memory")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        return batched_fetch(
            {"batched"}, device=value, on_mismatch=lambda why: subject.incidents.append((self.name, why))
        )
